"""Measure the memory and CPU time of processes, as the kernel counts them. All figures are 0 where there is no /proc."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from server.process_state import TIMES, fields_of

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """The memory and the CPU time of processes."""

    own_bytes: int = 0  # resident memory that no other process shares
    # resident pages of files such as packed weights: they belong to the page cache, and are shared by all processes that map them
    mapped_bytes: int = 0
    cpu_s: float = 0.0  # includes descendants that have ended

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.own_bytes + other.own_bytes, self.mapped_bytes + other.mapped_bytes, self.cpu_s + other.cpu_s)


def usage_of(pid: int) -> Usage:
    """Return the usage of a process and its descendants."""
    total, reached = Usage(), [pid]
    while reached:
        folder = Path(f"/proc/{(one := reached.pop())}")
        try:
            times = fields_of(one)[TIMES]
            _, resident, shared = map(int, (folder / "statm").read_text().split()[:3])
        except OSError:  # the process has ended meanwhile
            continue
        reached += _children_of(folder)
        total += Usage((resident - shared) * PAGE_BYTES, shared * PAGE_BYTES, sum(map(int, times)) * TICK_S)
    return total


def _children_of(folder: Path) -> list[int]:
    """Return the children of all threads of the process whose folder this is, or none if the process has ended."""
    found: list[int] = []
    with suppress(OSError):  # the process ended while its threads were listed; from Python 3.12 on, `glob` raises no error in this case
        for file in (folder / "task").glob("*/children"):
            with suppress(OSError):  # the thread has ended since it was listed; the process goes on
                found += map(int, file.read_text().split())
    return found


def resident_bytes() -> int:
    """Return the unshared memory of this process and its descendants."""
    return usage_of(os.getpid()).own_bytes
