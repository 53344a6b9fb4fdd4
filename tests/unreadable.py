"""Let a folder be unreadable, or a file fail when it is looked for, also for a test that root runs."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def make_unreadable(monkeypatch: pytest.MonkeyPatch, folder: Path, number: int = errno.EACCES) -> None:
    """Let every listing of a folder fail with an error of the system; what is in it can still be opened by name."""
    scan, listing = os.scandir, os.listdir

    def refuse(path: Any) -> None:
        if Path(os.fsdecode(path)) == folder:
            raise OSError(number, os.strerror(number), str(folder))

    def scandir(path: Any = ".") -> Iterator[os.DirEntry[str]]:
        refuse(path)
        return scan(path)

    def listdir(path: Any = ".") -> list[str]:
        refuse(path)
        return listing(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(os, "listdir", listdir)


def make_faulty(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Let the disk fail whenever somebody asks for the status of a file, as a network drive does whose server is away for a moment."""
    status, own_status = os.stat, os.lstat

    def refuse(path: Any) -> None:
        if isinstance(path, str | Path) and Path(path) == file:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))

    def stat(path: Any, **options: Any) -> os.stat_result:
        refuse(path)
        return status(path, **options)

    def lstat(path: Any, **options: Any) -> os.stat_result:
        refuse(path)
        return own_status(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "lstat", lstat)
