"""Find and name the sources of models: folders and GGUF files below the model root, and models that are downloaded, if the settings allow
it."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from runtime.split_files import stem_of
from server.errors import INVALID_SOURCE, ApiError
from server.models.state import NAME
from server.settings import ServerSettings

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[A-Za-z0-9][\w./-]*)?")  # may end with a colon and the end of a file name
CACHED = re.compile(r"/models--[^/]+?--([^/]+?)(?:/snapshots(?:/[^/]+)?)?/?$")  # a repository in the hub's cache

HOSTS = tuple(f"{scheme}{host}/" for scheme in ("https://", "") for host in ("huggingface.co", "hf.co"))
GGUF = ".gguf"
MOST_LEVELS = 2  # levels of folders below the model root: NAME, or ORGANISATION/NAME
MOST_ENTRIES = 4096  # largest number of entries of folders that `offered` examines
DOWNLOADABLE = "a name of the catalogue, or ORGANISATION/NAME or ORGANISATION/NAME:FILE"
NO_UNICODE = "leads to a path that is no Unicode; rename it"


def resolve(source: str, settings: ServerSettings, names: Container[str] = ()) -> str:
    """Return a path that exists below the model root or, if the settings allow downloads, a hub id (without the address of the hub) or one
    of `names`. Raise ApiError for any other source, and for a path that is not Unicode. Symbolic links are resolved before it is checked
    that a path is below the model root."""
    root = real(settings.model_root)
    try:
        path = real(root / source)
        exists = path.exists()
    except (OSError, ValueError) as error:  # too long, or contains a zero byte
        raise _invalid(source, "cannot be a path") from error
    if not path.is_relative_to(root):
        raise _invalid(source, "lies outside the model root; expected a path below it")
    if exists and path != root:
        found = str(settled(root / source))
        if not is_unicode(found):
            raise _invalid(source, NO_UNICODE)
        return found
    plain = without_host(source)
    may_be_downloaded = plain in names or is_hub_id(plain)
    if settings.allow_hub and may_be_downloaded:
        return plain
    if may_be_downloaded:
        remedy = ", and this server downloads none: start it with --allow-hub"
    else:
        remedy = f", and cannot be downloaded; expected {DOWNLOADABLE}" if settings.allow_hub else ""
    raise _invalid(source, f"does not exist below the model root{remedy}")


def require_download(source: str, settings: ServerSettings, names: Container[str]) -> None:
    """Raise ApiError unless this server can download a source: one of `names`, or a hub id."""
    if not (source in names or is_hub_id(source)):
        raise _invalid(source, f"cannot be downloaded; expected {DOWNLOADABLE}")
    if not settings.allow_hub:
        raise _invalid(source, "would be downloaded, and this server downloads nothing: start it with --allow-hub")


def without_host(source: str) -> str:
    """Return a source without the address of the hub, which users of Ollama and of the hub's pages write before it."""
    return next((source.removeprefix(host) for host in HOSTS if source.startswith(host)), source)


def is_hub_id(source: str) -> bool:
    """Return whether a source is a hub id. Any other source that `resolve` returns is an absolute path or a name of the catalogue."""
    return HUB_ID.fullmatch(source) is not None and ".." not in source


def real(path: Path) -> Path:
    """Return a path without symbolic links. A link that leads to itself stays, and counts as absent; `Path.resolve` would raise
    RuntimeError for it."""
    return Path(os.path.realpath(path))


def settled(path: Path) -> Path:
    """Return a path whose folders are no symbolic links. A link to a file keeps its name: the hub's cache stores files by their digests,
    and the parts of a split file are found by their names."""
    return real(path) if path.is_dir() else real(path.parent) / path.name


def is_unicode(path: str) -> bool:
    """Return whether a path can be written as UTF-8, as messages and the state file are."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def names_of(source: str) -> tuple[str, tuple[str, ...]]:
    """Return the default name of a source, and its aliases. A GGUF file is called by its name without the suffix and the number of a part,
    because users call models by this short name; the whole name of the file is an alias, if requests can use it. A folder of the hub's
    cache is called by its repository, any other folder by its own name."""
    file = source.rstrip("/").rpartition("/")[2]
    if (found := CACHED.search(source)) is not None:
        return _plain(found[1]), ()
    if not file.endswith(GGUF):
        return _plain(file), ()
    return _plain(stem_of(file)), (file,) if re.fullmatch(NAME, file) else ()


def _plain(name: str) -> str:
    """Return a name that requests can use: accents are dropped, and other characters become hyphens. If no letter or digit is left, return
    the name as it is."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9._:-]+", "-", plain).strip("-._:") or name


@dataclass(frozen=True, slots=True)
class Offer:
    """A model below the model root that may be loaded."""

    source: str  # the name that a load request gives as source
    path: str  # the source that a loaded model has
    num_bytes: int  # of all its files
    modified_s: float  # time of the last change of a file, in seconds since 1970


def offered(settings: ServerSettings) -> list[Offer]:
    """Return the folders with a config.json and the GGUF files up to two levels below the root, sorted by source. Of a large root only the
    first MOST_ENTRIES entries are examined. Hidden entries, and paths that are no Unicode, are left out. No file is read."""
    root, found, pending = settings.model_root, list[Offer](), deque([(settings.model_root, 0)])
    num_seen = 0
    while pending:
        folder, depth = pending.popleft()
        for entry in _entries(folder):
            num_seen += 1
            if entry.name.startswith(".") or num_seen > MOST_ENTRIES:
                continue
            try:
                if entry.suffix == GGUF and entry.is_file():
                    found.append(_offer(root, entry, [entry]))
                elif entry.is_dir() and (entry / "config.json").is_file():
                    found.append(_offer(root, entry, [file for file in islice(entry.iterdir(), MOST_ENTRIES) if file.is_file()]))
                elif entry.is_dir() and depth + 1 < MOST_LEVELS:
                    pending.append((entry, depth + 1))
            except OSError:  # removed just now, or this user may not read it
                continue
    return sorted((offer for offer in found if is_unicode(offer.path)), key=lambda offer: offer.source)


def _entries(folder: Path) -> list[Path]:
    """Return the first entries of a folder, sorted. The list is empty if the folder was removed just now, or this user may not read it."""
    try:
        return sorted(islice(folder.iterdir(), MOST_ENTRIES))
    except OSError:
        return []


def _offer(root: Path, path: Path, files: list[Path]) -> Offer:
    """Return the offer of a folder or file `path`. The size and the time of change are those of `files`."""
    states = [file.stat() for file in files]
    modified_s = max(state.st_mtime for state in states or [path.stat()])
    return Offer(str(path.relative_to(root)), str(settled(path)), sum(state.st_size for state in states), modified_s)


def _invalid(source: str, why: str) -> ApiError:
    """Return the error for a source that cannot be used."""
    return ApiError(INVALID_SOURCE, f"source {source!r:.120} {why}", param="source")
