"""Models from the hub: what of one is missing here, how much of that has come, which are here, and how they go. Imported on demand: the
package is an extra.

A source is `ORGANISATION/NAME`, or `ORGANISATION/NAME:FILE` for one GGUF file of it; FILE may be as short as `Q4_K_M`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CacheNotFound, DryRunFileInfo, scan_cache_dir, snapshot_download
from huggingface_hub.utils import tqdm

# What a served model needs; no pickles, no duplicates in other formats or under other names.
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
DUPLICATES = ["consolidated*", "original/*", "onnx/*", "openvino/*", "coreml/*"]

STORED = "huggingface_hub.snapshot_download"  # the one of its bars that counts bytes on disk


@dataclass(frozen=True, slots=True)
class Held:
    """A model that is here, as `pull` and `serve` call it."""

    source: str
    num_bytes: int
    used_s: float


def download(source: str, report: Callable[[float], None], token: str | None = None) -> Path:
    """The folder of a hub id, or the file of it, resumed where it broke off."""
    repo, patterns = _parted(source)
    arrived = _Arrived(missing_bytes(source, token), report)
    bar = _bar(arrived.add)
    folder = Path(snapshot_download(repo, allow_patterns=patterns, ignore_patterns=DUPLICATES, tqdm_class=bar, token=token))
    if patterns is PATTERNS:
        return folder
    found = sorted(path for path in folder.rglob("*.gguf") if _fits(str(path.relative_to(folder)), patterns))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "no file"
        raise FileNotFoundError(f"{source!r} means {names}; expected one .gguf file of {repo}")
    return found[0]


def revision(source: str, token: str | None = None) -> str:
    """The commit that a download would bring now; empty where the hub does not say."""
    return next((file.commit_hash for file in _offered(source, token)), "")


def missing_bytes(source: str, token: str | None = None) -> int:
    """0 where the hub does not say; without a network, what is here already is served."""
    return sum(file.file_size or 0 for file in _offered(source, token) if file.will_download)


def held() -> list[Held]:
    """What is here, sorted by name: of each repository what is not GGUF together, and each GGUF file."""
    return sorted((one for one, _ in _held()), key=lambda one: one.source)


def remove(source: str) -> int:
    """Delete a model from this machine; how many bytes that gave, 0 if it was not here."""
    repo, patterns = _parted(source)
    freed = 0
    for one, paths in _held():
        name, _, file = one.source.partition(":")
        if name == repo and (patterns is PATTERNS or _fits(file, patterns)):
            freed += one.num_bytes
            for path in paths:
                path.unlink(missing_ok=True)
    return freed


def _held() -> Iterator[tuple[Held, list[Path]]]:
    """With the paths of their files: the links by name, and what they point at."""
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
            sizes = parts.setdefault(f"{repo.repo_id}:{file.file_name}" if is_gguf else repo.repo_id, {})
            sizes[file.file_path] = 0
            sizes[file.blob_path] = file.size_on_disk
        for source, sizes in parts.items():
            yield Held(source, sum(sizes.values()), repo.last_accessed), list(sizes)


def _parted(source: str) -> tuple[str, list[str]]:
    """The repository, and the patterns of the files that are meant."""
    repo, _, file = source.partition(":")
    if not file:
        return repo, PATTERNS
    if file.endswith(".gguf"):
        return repo, [file, f"*/{file}"]
    return repo, [f"*{spelled}.gguf" for spelled in sorted({file, file.lower(), file.upper()})]


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _offered(source: str, token: str | None) -> list[DryRunFileInfo]:
    """The files of a download; none where the hub does not say: the download itself then tells why."""
    repo, patterns = _parted(source)
    try:
        return snapshot_download(
            repo, allow_patterns=patterns, ignore_patterns=DUPLICATES, tqdm_class=_bar(lambda _: None), dry_run=True, token=token
        )
    except Exception:
        return []


class _Arrived:
    """Bytes of several threads; told when another hundredth has come."""

    def __init__(self, num_bytes: int, report: Callable[[float], None]) -> None:
        self._expected = num_bytes
        self._report = report
        self._arrived = self._told = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._arrived += num_bytes
            percent = min(100, 100 * self._arrived // self._expected) if self._expected else 0
            if percent > self._told:
                self._told = percent
                self._report(percent / 100)


def _bar(add: Callable[[int], None]) -> type[tqdm]:
    class Bar(tqdm):
        """Draws nothing."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts = options.get("name") == STORED
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                add(int(n or 0))

    return Bar
