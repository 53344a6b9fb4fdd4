"""A full disk, or one that takes no new file. The tests may run as root, whom modes do not stop."""

from __future__ import annotations

import os
import resource
from collections.abc import Generator
from contextlib import contextmanager

import pytest


def refuse_new_files(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """Let every `os.open` that would create a file fail with this number of an error."""
    opened = os.open

    def refuse(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(error, os.strerror(error))
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)


def refuse_renames(monkeypatch: pytest.MonkeyPatch, error: int, suffixes: tuple[str, ...]) -> None:
    """Let every `os.replace` by which a file would get one of these suffixes fail with this number of an error."""
    replace = os.replace

    def refuse(fresh: str, path: os.PathLike[str]) -> None:
        if os.fspath(path).endswith(suffixes):
            raise OSError(error, os.strerror(error))
        replace(fresh, path)

    monkeypatch.setattr(os, "replace", refuse)


@contextmanager
def room_for(num_bytes: int) -> Generator[None]:
    """Let files have at most so many bytes. Of what is longer, the kernel writes the beginning, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
