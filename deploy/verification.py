"""Verify stored files while a worker serves from them: `python -m deploy.verification FILE...` prints one line per damaged file.

This runs in a separate process. If it were a thread of low priority, the system could suspend it while it holds the interpreter's lock, and
the engine would wait for the lock.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from runtime import generated_code
from runtime.errors import DamagedFile, RuntimeFault, UnsafeCache
from runtime.launch import command
from runtime.sealed import key_of
from runtime.sections import SectionFile
from server.signal_names import describe_status

log = logging.getLogger(__name__)

COMMAND = command("deploy.verification")
UNVERIFIED = "%s could not be verified: %s; `relaxserve cache verify` verifies all stored files"


def damage_of(path: Path) -> str:
    """Verify a file in another process and wait for it. Return the description of the damage that the process prints, or "" if it finds
    none. A file that cannot be read is damaged. If the process cannot be started, or ends early for another reason, log that the file is
    not verified."""
    try:
        ended = subprocess.run([*COMMAND, str(path)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    except OSError as error:
        log.warning(UNVERIFIED, path, error.strerror)
        return ""
    if fault := ended.stdout.strip():
        return fault
    how = describe_status(ended.returncode)
    if ended.returncode == -signal.SIGBUS:  # the disk failed to read a page of the mapped file, or the file was cut
        return f"{path} cannot be read: its verification was {how}"
    if ended.returncode:
        log.warning(UNVERIFIED, path, f"the process that reads it ended early ({how})")
    return ""


def main(paths: Sequence[Path]) -> None:
    """Lower the priority of this process, verify files, and print a line per damaged file."""
    generated_code.keep()
    with suppress(OSError):  # a sandbox may forbid to change the scheduler
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    for path in paths:
        for fault in _faults(path):
            print(fault, flush=True)


def _faults(path: Path) -> Iterator[RuntimeFault]:
    """Verify a file. Yield its damage if there is one, and nothing if the file is undamaged or cannot be read."""
    try:
        SectionFile(path, key_of(path.parent)).verify_slowly(_Pace())
    except (DamagedFile, UnsafeCache) as fault:
        yield fault
    except OSError:  # another process has removed the file; the worker keeps what it has mapped, and the next start builds the file again
        return


class _Pace:
    """Pauses after each piece of work for as long as the work took. Processes of all priorities share the memory's bandwidth, so half of
    the time is left to other processes. The process exits if the worker has ended."""

    def __init__(self) -> None:
        self._worker = os.getppid()
        self._began = time.perf_counter()

    def __call__(self) -> None:
        if os.getppid() != self._worker:
            sys.exit()
        time.sleep(time.perf_counter() - self._began)
        self._began = time.perf_counter()


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
