"""Write files so that readers see either the old file or the complete new one, even if the writer is killed.

A file is written under a temporary name beside its place, and renamed when it is complete. An error removes the temporary file. If the
process is killed, the temporary file remains until a later writer calls `remove_abandoned`, before it writes or once at its start.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from functools import cache
from glob import escape
from pathlib import Path
from typing import IO

from runtime.files import regular

PRIVATE, ORDINARY = 0o600, 0o666  # modes of new files; the umask removes permissions
ABANDONED_S = 3600.0  # another machine's temporary file is abandoned if it did not change for this many seconds: loads write more often
LONGEST_NAME = 200  # a temporary name has a digest instead of a longer name of the file, because a name has at most 255 bytes
_TEMPORARY = re.compile(r"\..+\.(?P<machine>[0-9a-f]{8})\.[0-9a-z_]{8,12}", re.DOTALL)  # earlier versions ended names in 8 letters


@contextmanager
def replacing(path: Path, mode: int = PRIVATE, *, synced: bool = True) -> Generator[IO[bytes]]:
    """Write a file anew, in a folder that exists. With `synced`, readers see the old or the complete new file even after a power failure,
    but the caller waits for the disk, which takes long for gigabytes or for the hundred files of a server's start."""
    descriptor, fresh = locked_file(path, mode)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            yield file
            file.flush()
            if synced:
                os.fsync(file.fileno())
        os.replace(fresh, path)  # after the file is closed, because NFS and FUSE report only then that the disk is full
    except BaseException:
        Path(fresh).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)  # only now: without its lock, the file would count as abandoned before it is renamed
    if synced:
        _sync_directory(path.parent)


def locked_file(path: Path, mode: int = PRIVATE) -> tuple[int, str]:
    """Create an empty file beside `path`, with a temporary name that states the machine. Return its descriptor and its name. The file is
    locked until the descriptor is closed, at the latest when this process ends, if the file system has locks."""
    while True:
        name = str(path.with_name(f"{_beginning(path)}{machine()}.{os.urandom(6).hex()}"))
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits while another process removes the file, which was not locked yet
        if os.fstat(descriptor).st_nlink:
            return descriptor, name
        os.close(descriptor)


def remove_abandoned(path: Path) -> None:
    """Remove the temporary files beside `path` of processes that were killed while they wrote it. Without this, each killed attempt to
    write a large file would leave a temporary file. Machines that share a volume may not see each other's locks, so the files of other
    machines are removed only after ABANDONED_S."""
    _remove_abandoned(path.parent.glob(f"{escape(_beginning(path))}*"))


def remove_all_abandoned(folder: Path) -> None:
    """Remove the temporary files in `folder` as `remove_abandoned` does, whatever file they were for."""
    _remove_abandoned(folder.glob(".*"))


def _remove_abandoned(paths: Iterable[Path]) -> None:
    """Remove those of the files that have a temporary name, unless a process may still write them. Other files, such as the `.NAME.swp` of
    an editor, stay."""
    for left in paths:
        if (name := _TEMPORARY.fullmatch(left.name)) is None:
            continue
        with suppress(OSError), regular(left).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises OSError if a process of this machine writes the file
            if name["machine"] == machine() or time.time() - os.fstat(file.fileno()).st_mtime > ABANDONED_S:
                left.unlink()


def _beginning(path: Path) -> str:
    """Return the beginning of the names of temporary files for `path`. It contains the file's name, or a digest of a long name."""
    encoded = os.fsencode(path.name)
    return f".{path.name if len(encoded) <= LONGEST_NAME else hashlib.sha256(encoded).hexdigest()}."


@cache
def machine() -> str:
    """Return a name for the running kernel. Processes are sure to see each other's locks only if they run on the same kernel."""
    try:
        found = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        found = os.uname().nodename.encode()
    return hashlib.sha256(found).hexdigest()[:8]


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
