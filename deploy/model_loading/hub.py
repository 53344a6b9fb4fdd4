"""Download, list and remove models of the hub. This module is imported only on demand, because huggingface_hub is an optional extra.

A source is `ORGANISATION/NAME`, or `ORGANISATION/NAME:FILE` for one GGUF file of that repository. FILE may be an abbreviation such as
`Q4_K_M`. If the file is split, all its parts belong to the model, which has the name of its first part.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CacheNotFound, DryRunFileInfo, constants, scan_cache_dir, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import tqdm

from deploy.model_loading.held import Held
from runtime.split_files import parts_of, pattern_of
from runtime.whole_files import ORDINARY, remove_abandoned, replacing

# Files that a served model needs: no pickles, no duplicates in other formats or under other names.
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
DUPLICATES = ["consolidated*", "original/*", "onnx/*", "openvino/*", "coreml/*", "*mmproj*.gguf"]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"(.+)\.[0-9a-f]{8}\.incomplete")  # a partial file with this tag; only the process that began it continues it
STORED = "huggingface_hub.snapshot_download"  # name of the progress bar of huggingface_hub that counts bytes on disk


def download(source: str, report: Callable[[float], None], token: str | None = None) -> Path:
    """Download a model by its hub id. An interrupted download continues with the first file that is missing; its partial files are removed.
    If the hub does not list the files now, download none, because a download begins by storing the names of the files to verify; the model
    must then be on this machine. Return the model's folder or GGUF file. Call `report` with the completed fraction. Raise OSError if a file
    arrived damaged, and FileNotFoundError if the source names a file, but no or several GGUF models match. Errors of the library pass
    through."""
    repo, patterns = _parted(source)
    _remove_parts(repo)
    offered: list[DryRunFileInfo] = []
    fault: Exception | None = None
    try:
        offered = _listed(source, token)
    except Exception as error:  # huggingface_hub raises many kinds of errors
        fault = error
    fresh = [file for file in offered if file.will_download]
    if fresh:
        _note(Path(fresh[0].local_path.removesuffix(fresh[0].filename)), {file.filename for file in fresh})
    arrived = _Arrived(sum(file.file_size or 0 for file in fresh), report)
    bar = _bar(arrived.add)
    options: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": DUPLICATES, "tqdm_class": bar, "token": token}
    try:
        folder = Path(snapshot_download(repo, local_files_only=fault is not None, **options))
    except LocalEntryNotFoundError as missing:
        if fault is None:
            raise
        cause = fault.__cause__ or fault  # the library wraps what has happened in an error of the listing
        if isinstance(cause, HfHubHTTPError):
            raise cause from None
        raise missing from cause
    _verify(folder)
    if patterns is PATTERNS:
        return folder
    found = sorted(path for path in folder.rglob("*.gguf") if _fits(str(path.relative_to(folder)), patterns))
    if len({parts_of(path.name)[0] for path in found}) != 1:
        names = ", ".join(path.name for path in found) or "no file"
        raise FileNotFoundError(f"{source!r} matches {names}; expected one .gguf file of {repo}")
    return found[0]


def reason(error: Exception) -> str:
    """Return in one line why a download failed. Replace the library's own message if the hub does not answer, because that message is about
    the library's cache."""
    if isinstance(error, LocalEntryNotFoundError):
        return f"the hub does not answer ({error.__cause__ or 'offline'}); check the network, or HTTPS_PROXY"
    return " ".join(str(error).split())


def revision(source: str, token: str | None = None) -> str:
    """Return the commit that a download would fetch now, or "" if the hub does not list its files."""
    return next((file.commit_hash for file in _offered(source, token)), "")


def missing_bytes(source: str, token: str | None = None) -> int:
    """Return the number of bytes to download. Return 0 if the hub does not list the files, so that files on this machine can be served
    without a network."""
    return sum(file.file_size or 0 for file in _offered(source, token) if file.will_download)


def held() -> list[Held]:
    """Return the models on this machine. Each GGUF file counts as one model; all other files of a repository together count
    as one model."""
    return [one for one, _ in _held()]


def means(source: str, held_source: str) -> bool:
    """Return whether a source stands for a model that `held` lists as `held_source`."""
    repo, patterns = _parted(source)
    name, _, file = held_source.partition(":")
    return name == repo and (not file if patterns is PATTERNS else _fits(file, patterns))


def remove(source: str) -> int:
    """Delete a model from this machine, and the partial files that killed downloads of its repository have left. Return the number of bytes
    freed: 0 if there was nothing of the model or its repository."""
    repo, patterns = _parted(source)
    freed = _remove_parts(repo)
    for one, paths in _held():
        name, _, file = one.source.partition(":")
        if name == repo and (patterns is PATTERNS or _fits(file, patterns)):
            freed += one.num_bytes
            for path in paths:
                path.unlink(missing_ok=True)
    return freed


def _remove_parts(repo: str) -> int:
    """Remove the parts of files that killed downloads of a repository have left, and return the number of bytes freed. Parts of a running
    download stay, because it holds the locks of their files. In a read-only cache, all parts stay."""
    cache, name = Path(constants.HF_HUB_CACHE), repo_folder_name(repo_id=repo, repo_type="model")
    freed = 0
    for path in (cache / name / "blobs").glob("*.incomplete"):
        if (found := _PART.fullmatch(path.name)) is None:
            continue
        with suppress(OSError), (cache / ".locks" / name / f"{found[1]}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            num_bytes = path.stat().st_size
            path.unlink()
            freed += num_bytes
    return freed


def _held() -> Iterator[tuple[Held, list[Path]]]:
    """Yield each model of the hub's cache with the paths of its files: the named links, and the blobs to which they point. Yield nothing if
    there is no cache. Each model in a GGUF file of a repository counts on its own."""
    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in repos:
        if repo.repo_type != "model":
            continue
        parts: dict[str, dict[Path, int]] = {}
        for file in (file for revision in repo.revisions for file in revision.files):
            is_gguf = file.file_name.endswith(".gguf")
            sizes = parts.setdefault(f"{repo.repo_id}:{parts_of(file.file_name)[0]}" if is_gguf else repo.repo_id, {})
            sizes[file.file_path] = 0
            sizes[file.blob_path] = file.size_on_disk
        for source, sizes in parts.items():
            yield Held(source, sum(sizes.values()), repo.last_accessed), list(sizes)


def _parted(source: str) -> tuple[str, list[str]]:
    """Split a source into its repository and the patterns of its files. After a colon, the source names a GGUF file, or a format that ends
    the names of GGUF files, in lower or upper case. Without a colon, the patterns are PATTERNS."""
    repo, _, file = source.partition(":")
    if not file:
        return repo, PATTERNS
    if file.endswith(".gguf"):
        return repo, [pattern_of(file), f"*/{pattern_of(file)}"]
    spellings = sorted({file, file.lower(), file.upper()})
    ends = [f"{spelled}{part}.gguf" for spelled in spellings for part in ("", "-?????-of-?????")]
    return repo, [*ends, *(f"*[!0-9A-Za-z]{end}" for end in ends)]  # a word of its own: F16 does not stand for BF16


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _offered(source: str, token: str | None) -> list[DryRunFileInfo]:
    """List the files of a download. Return [] if the hub does not answer or refuses; the download itself then reports why."""
    try:
        return _listed(source, token)
    except Exception:
        return []


def _listed(source: str, token: str | None) -> list[DryRunFileInfo]:
    """List the files of a download. Errors of the library pass through."""
    repo, patterns = _parted(source)
    return snapshot_download(
        repo, allow_patterns=patterns, ignore_patterns=DUPLICATES, tqdm_class=_bar(lambda _: None), dry_run=True, token=token
    )


def _note(snapshot: Path, names: set[str]) -> None:
    """Store the names of files of a snapshot that are about to be downloaded: if this process is killed, the next download verifies
    them."""
    kept = _unverified(snapshot)
    kept.parent.mkdir(parents=True, exist_ok=True)
    _write(kept, names | _names(kept))


def _verify(snapshot: Path) -> None:
    """Verify the files of a snapshot that were not verified since their download, and then remove their names from the list of unverified
    files. Raise OSError if a file is damaged."""
    kept = _unverified(snapshot)
    here = {name for name in _names(kept) if (snapshot / name).exists()}
    for name in sorted(here):
        _require_digest(snapshot / name)
    if here:  # otherwise write nothing, because the cache may be read-only
        if others := _names(kept) - here:  # files that another process downloads
            _write(kept, others)
        else:
            kept.unlink(missing_ok=True)


def _unverified(snapshot: Path) -> Path:
    """Return the path of the file with the names of a repository's files that were not verified since their download."""
    return snapshot.parent.parent / ".unverified"


def _write(kept: Path, names: set[str]) -> None:
    remove_abandoned(kept)
    with replacing(kept, ORDINARY) as file:
        file.write("\n".join(sorted(names)).encode())


def _names(kept: Path) -> set[str]:
    return set(kept.read_text().splitlines()) if kept.is_file() else set()


def _require_digest(path: Path) -> None:
    """Check the SHA-256 of a downloaded file, by which the hub's cache names large files. If the digest is wrong, remove the file and raise
    OSError."""
    stored = path.parent / path.readlink() if path.is_symlink() else path  # follow one link only: the named file may be a link, too
    if not _SHA256.fullmatch(stored.name):
        return  # a small file, named by git's digest
    with stored.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != stored.name:
        for damaged in (stored.resolve(), stored, path):
            damaged.unlink(missing_ok=True)
        raise OSError(f"{path.name} arrived damaged: its SHA-256 is {found}; expected {stored.name}; try again")


class _Arrived:
    """Counts bytes that several threads have downloaded, and reports the completed fraction at every further percent."""

    def __init__(self, num_bytes: int, report: Callable[[float], None]) -> None:
        self._expected = num_bytes
        self._report = report
        self._arrived = self._told = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Count further bytes, on any thread. Without an expected number of bytes, nothing is reported."""
        with self._lock:
            self._arrived += num_bytes
            percent = min(100, 100 * self._arrived // self._expected) if self._expected else 0
            if percent > self._told:
                self._told = percent
                self._report(percent / 100)


def _bar(add: Callable[[int], None]) -> type[tqdm]:
    """Return a class of progress bars for huggingface_hub, which call `add` with the numbers of bytes that arrive."""

    class Bar(tqdm):
        """A bar that draws nothing. If its name is STORED, it forwards the byte counts."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts = options.get("name") == STORED
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                add(int(n or 0))

    return Bar
