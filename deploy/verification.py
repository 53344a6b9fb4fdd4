"""Verify kept files beside a worker that serves from them: `python -m deploy.verification FILE...` prints what is damaged, a line each.

A process of its own: a thread of low priority could be put aside while it holds the interpreter's lock, and the engine would wait for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from runtime.errors import DamagedFile
from runtime.launch import command
from runtime.sections import SectionFile

COMMAND = command("deploy.verification")


def damage_of(paths: Sequence[Path]) -> str:
    """What another process finds damaged; empty if nothing is. Blocks until it has read them."""
    ended = subprocess.run([*COMMAND, *map(str, paths)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    return ended.stdout.strip()


def main(paths: Sequence[Path]) -> None:
    with suppress(OSError):  # where a sandbox forbids it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    for path in paths:
        for fault in _faults(path):
            print(fault, flush=True)


def _faults(path: Path) -> Iterator[DamagedFile]:
    try:
        SectionFile(path).verify_slowly(_Pace())
    except DamagedFile as fault:
        yield fault
    except OSError:  # another process has removed it; the worker keeps what it has mapped, and the next start makes it again
        return


class _Pace:
    """Half of the time is left to others, since all priorities share the memory's bandwidth. Without the worker there is nothing to do."""

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
