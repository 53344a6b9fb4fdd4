"""Require regular files: opening a FIFO can block forever, and a device can be read without end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def regular(path: Path) -> Path:
    """Return the path if it is a regular file or a link to a regular file. Otherwise raise an OSError that names the kind of file."""
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'special')}, expected a regular file", str(path))
    return path
