"""Which kept files are in use, so that a start knows when the last one did not end in order, and verifies what it left."""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from runtime.errors import DamagedFile
from runtime.sections import SectionFile

log = logging.getLogger(__name__)

INFIX = ".used-"  # behind the name of the file


class Use:
    """A marker beside a file, locked as long as this process lives, and removed when it ends in order. A marker that nobody locks was left
    by a process that was killed, or by a machine that lost its power."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where the folder cannot be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        self._file = os.fdopen(descriptor)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before anybody can take it for one that was left
        self._marker = path.with_name(path.name + INFIX + name.rpartition(".")[2])
        os.rename(name, self._marker)
        atexit.register(self.end)

    def end(self) -> None:
        atexit.unregister(self.end)
        self._marker.unlink(missing_ok=True)
        self._file.close()


def markers_of(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}{INFIX}*"))


def left_behind(path: Path) -> list[Path]:
    """The markers of processes that did not end in order."""
    return [marker for marker in markers_of(path) if not _is_locked(marker)]


def _is_locked(marker: Path) -> bool:
    try:
        with marker.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # its process has just ended in order
        return True
    return False


def begin_use(
    path: Path, *, verify: bool = False, restart: bool = False, progress: Callable[[float], None] = lambda _: None
) -> Path | None:
    """Where to find or put the file, after it was verified if need be: None where it is damaged and cannot be removed. A worker that the
    server restarts does not wait for that: its predecessor only read the file, and a check runs beside it."""
    left = left_behind(path)
    if path.exists() and (verify or (left and not restart)):
        why = "it was damaged before" if verify else "the last process that used it did not end in order"
        log.warning("%s is verified before it is used: %s", path, why)
        if not _is_sound(path, progress):
            return None
    with suppress(OSError):  # of a folder that may only be read
        for marker in left:
            marker.unlink(missing_ok=True)
        Use(path)
    return path


def _is_sound(path: Path, progress: Callable[[float], None]) -> bool:
    """Also true once it is gone."""
    try:
        SectionFile(path).verify(progress)
    except FileNotFoundError:
        return True
    except DamagedFile as fault:
        return remove_damaged(path, str(fault))
    return True


def remove_damaged(path: Path, fault: str) -> bool:
    """Whether it is gone, so that it can be built again in its place."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.error("%s; it cannot be removed (%s): do that as the user that owns the folder", fault, error.strerror)
        return False
    log.warning("%s is removed and built again", fault)
    return True
