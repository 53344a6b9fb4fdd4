"""Mark stored files as in use by a marker, a file beside each of them. If a process is killed while it uses a file, the marker remains, and
the next start verifies the file. The start that writes a file need not wait until the file is on the disk, because the marker is removed
only once the file is. After a power failure, the marker still exists on file systems that keep the order of changes to a folder, such as
ext4 with its journal, xfs and btrfs.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from runtime.errors import DamagedFile, UnsafeCache
from runtime.sealed import key_of, opened
from runtime.sections import SectionFile
from runtime.whole_files import locked_file

log = logging.getLogger(__name__)

INFIX = ".used-"  # part of a marker's name between the name of the file and a random part
_BLOCK_BYTES = 32 << 20
_refused = set[Path]()  # files that the disk failed to write; noted, because only the first `fsync` after a failure reports it


class Use:
    """A marker next to a file. It is locked while this process lives, and removed when the process ends normally, unless it is unknown
    whether the disk has the file. An unlocked marker remains if a process is killed or a machine loses power."""

    def __init__(self, path: Path) -> None:
        """Create the marker, and let the end of this process call `end`. Raise OSError if the folder is not writable, or its file system
        has no locks."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = locked_file(path)  # locked before another process can mistake it for an abandoned marker
        self._path = path
        self._file = os.fdopen(descriptor)
        self._marker = path.with_name(path.name + INFIX + name.rpartition(".")[2])
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError if the file system has no locks
            os.rename(name, self._marker)
        except OSError:
            self._file.close()
            os.unlink(name)
            raise
        atexit.register(self.end)

    def end(self) -> None:
        """Wait until the file is on the disk, and remove the marker. If it is unknown whether the disk has the file, only unlock the
        marker."""
        atexit.unregister(self.end)
        if _is_on_disk(self._path):
            self._marker.unlink(missing_ok=True)
        self._file.close()


def flush(paths: Sequence[Path]) -> None:
    """Let a thread wait until these files are on the disk. The process then need not wait for them when it ends, and is not killed because
    its end takes long."""

    def wait() -> None:
        for path in paths:
            _is_on_disk(path)

    threading.Thread(target=wait, name="flush", daemon=True).start()


def _is_on_disk(path: Path) -> bool:
    """Wait until the disk has the file, because nobody verifies it after a power failure once no marker is left. Return False if the disk
    has failed to write it, now or at an earlier call, or if the file cannot be opened. Return True if there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # it was not written, or another process has removed it
        return True
    except OSError:  # for example, no file descriptor is left
        return False
    try:
        os.fsync(descriptor)
    except OSError:
        _refused.add(path)
    finally:
        os.close(descriptor)
    return path not in _refused


def markers_of(path: Path) -> list[Path]:
    """List the markers next to a file, both the markers of running processes and those that were left behind."""
    return sorted(path.parent.glob(f"{path.name}{INFIX}*"))


def left_behind(path: Path) -> list[Path]:
    """List the markers of a file whose processes did not end normally."""
    return [marker for marker in markers_of(path) if not _is_locked(marker)]


def _is_locked(marker: Path) -> bool:
    """Return whether a process holds the lock of a marker. Return True, too, if the marker cannot be opened or locked."""
    try:
        with marker.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the marker's process has just ended normally
        return True
    return False


def begin_use(
    path: Path, *, verify: bool = False, restart: bool = False, progress: Callable[[float], None] = lambda _: None
) -> Path | None:
    """Mark a stored file as in use and return its path. If the file exists, verify it first if it was damaged before (`verify`), or if a
    process was killed while it used the file. Remove a damaged file, or return None if it cannot be removed. So there may be no file at the
    returned path; the caller then writes the file. After a `restart` by the server, a killed process is no reason to wait for verification:
    the previous worker only read the file, and a check runs at the same time as the new worker. `progress` gets the fraction that is
    verified. If no marker can be written, the file is used without one. Raise OSError if the file exists and cannot be read."""
    left = left_behind(path)
    if path.exists() and (verify or (left and not restart)):
        why = "it was damaged before" if verify else "the last process that used it was killed"
        log.warning("%s is verified before it is used: %s", path, why)
        if not _is_sound(path, progress):
            return None
    with suppress(OSError):  # the folder is read-only, or the disk full: then the markers of earlier processes stay
        Use(path)
        for marker in left:
            marker.unlink(missing_ok=True)
    return path


def _is_sound(path: Path, progress: Callable[[float], None]) -> bool:
    """Verify a file, and remove it if it is damaged. Return True if it is undamaged, missing or removed now, and False if it is damaged and
    cannot be removed. A file is also damaged if the disk cannot read a part of it. Raise OSError if it cannot be read for another
    reason."""
    try:
        _read(path, lambda fraction: progress(fraction / 2))
        SectionFile(path, key_of(path.parent)).verify(lambda fraction: progress((1 + fraction) / 2))
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return remove_damaged(path, f"{path} cannot be read: {error.strerror}")
    except (DamagedFile, UnsafeCache) as fault:
        return remove_damaged(path, str(fault))
    return True


def _read(path: Path, progress: Callable[[float], None]) -> None:
    """Read a file completely. Raise OSError if the disk cannot read a part of it: in a mapped file, that part would kill this process
    (SIGBUS). `progress` gets the fraction that is read."""
    size, num_read = path.stat().st_size, 0
    with opened(path) as file:
        while data := file.read(_BLOCK_BYTES):
            num_read += len(data)
            progress(num_read / size)


def remove_damaged(path: Path, fault: str) -> bool:
    """Remove a damaged file so that it can be built again, and log that. `fault` describes the damage. Return False if the file cannot be
    removed."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.error("%s; it cannot be removed (%s): remove it as the user that owns the folder", fault, error.strerror)
        return False
    log.warning("%s; it is removed and built again", fault)
    return True
