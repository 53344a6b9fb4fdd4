"""Require regular files: opening a FIFO can block forever, and a device can be read without end. Find files and folders, with an error for
those that cannot be read: they must not seem to be absent. Append to files, recognise files that a failed download left in place of a
model's data, and digest the Python files of a folder.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from contextlib import suppress
from io import FileIO
from pathlib import Path

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def regular(path: Path) -> Path:
    """Return the path if it is a regular file or a link to a regular file. Otherwise raise an OSError that says what is there instead."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        if not path.is_symlink():
            raise
        raise FileNotFoundError(errno.ENOENT, f"it is a link to {path.readlink()}, which does not exist", str(path)) from None
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'special')}, expected a regular file", str(path))
    return path


def is_there(path: Path) -> bool:
    """Return whether there is a file, a folder or a link at a path, even a broken link. Raise OSError if that cannot be found out, where
    `os.path.lexists` returns False."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def entries_of(folder: Path) -> list[Path]:
    """Return the paths of a folder's entries, sorted. Raise OSError if the folder cannot be read, where `Path.glob` finds nothing."""
    with os.scandir(folder) as found:
        return sorted(folder / entry.name for entry in found)


def files_below(folder: Path, *, without: str = "") -> list[Path]:
    """Return all files in a folder and in the folders below, sorted, except those in folders with the name `without`. Raise OSError if a
    folder cannot be read, where `Path.rglob` finds nothing."""
    found: list[Path] = []
    for path, folders, names in os.walk(folder, onerror=_raised):
        folders[:] = [name for name in folders if name != without]
        found += (Path(path, name) for name in names)
    return sorted(found)


def _raised(error: OSError) -> None:
    raise error


def at_home(text: str) -> Path:
    """Return the path that a text names, with the home of a user in place of `~` or `~NAME` at its beginning. If this home cannot be found,
    the text itself is the path, as in a shell."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def append_whole(file: FileIO, data: bytes) -> None:
    """Append data to a file without a buffer. If there is room for only a part of it, remove the part and raise OSError."""
    size, rest = os.fstat(file.fileno()).st_size, memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]  # on a nearly full disk, a call writes a part of the data, and the next one raises OSError
    except OSError:
        with suppress(OSError):  # nothing can be removed from a pipe
            file.truncate(size)
        raise


STAND_IN_BYTES = 1024  # bytes at the beginning of a file that show what it is
AGAIN = "download the file again"
_STAND_INS = (
    (re.compile(rb"version https://git-lfs"), "is a Git LFS pointer in place of the file: run `git lfs pull` in its folder"),
    (
        re.compile(rb"\s*<(!doctype|html|\?xml)", re.IGNORECASE),
        f"is a web page in place of the file: {AGAIN}, after a login if it needs one",
    ),
    (re.compile(rb'\s*\{\s*"error"\s*:'), f"is the answer of a server that refused the download: {AGAIN}, after a login if it needs one"),
)


def stand_in(head: bytes) -> str:
    """Return a text that says what a file contains in place of a model's data, and what the user can do, or "" for any other content.
    `head` is the file's beginning."""
    return next((said for pattern, said in _STAND_INS if pattern.match(head)), "")


def digest_of_sources(root: Path, seed: str = "") -> str:
    """Return a digest of `seed` and of the paths and contents of a folder's Python files. Raise OSError if a file cannot be read."""
    digest = hashlib.sha256(seed.encode())
    for path in (file for file in files_below(root, without="__pycache__") if file.suffix == ".py"):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
