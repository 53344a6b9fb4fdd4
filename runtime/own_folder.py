"""Folders that belong to one process. A lock marks a folder as used. The kernel releases the lock when the process ends, even if it is
killed, so other processes of the machine can find and remove abandoned folders. Process ids would not do: in another container, the same id
names another process. Machines that share a volume may not see each other's locks, so folders of other machines are removed only after
ABANDONED_S."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Self

from runtime.whole_files import ABANDONED_S, machine


class OwnFolder:
    """A new folder that this process has locked."""

    def __init__(self, parent: Path, prefix: str = "") -> None:
        """Create the folder below `parent`, with a name that begins with `prefix`. First remove such folders of processes that have ended.
        Raise OSError if the folder cannot be created."""
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = f"{prefix}{machine()}_"
        for left in parent.glob(f"{escape(prefix)}*"):
            _remove_left(left, is_own=left.name.startswith(own))
        self.path, self._lock = _locked(parent, own)

    def remove(self) -> None:
        """Remove the folder, unless it was renamed meanwhile, and free its lock."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def move_to(self, place: Path) -> None:
        """Rename the folder, which is complete now, unless another process has already put a folder with the same files at `place`."""
        try:
            self.path.rename(place)
        except OSError:
            if not place.is_dir():
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _locked(parent: Path, prefix: str) -> tuple[Path, int | None]:
    """Create and lock a folder. If another process removes the folder as abandoned before it is locked, create another one."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError):
            lock = _opened(path)
            with suppress(OSError):  # the file system has no locks; without locks, no process removes folders of other processes
                fcntl.flock(lock, fcntl.LOCK_SH)  # waits while another process removes the folder
            if path.exists():
                return path, lock
            os.close(lock)


def _remove_left(folder: Path, *, is_own: bool) -> None:
    """Remove a folder, unless a running process has locked it. `is_own`: a process of this machine has made it."""
    with suppress(OSError):
        lock = _opened(folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_own or time.time() - os.fstat(lock).st_mtime > ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _opened(folder: Path) -> int:
    """Open a folder to lock it, and return the descriptor."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
