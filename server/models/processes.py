"""What processes use, as the kernel counts it. All of it is 0 where there is no /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    own_bytes: int = 0  # resident memory that is nobody else's
    mapped_bytes: int = 0  # resident pages of files, as packed weights: the page cache's, and shared by all that map them
    cpu_s: float = 0.0  # with that of processes below it which have ended

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.own_bytes + other.own_bytes, self.mapped_bytes + other.mapped_bytes, self.cpu_s + other.cpu_s)


def usage_of(pid: int) -> Usage:
    """Of a process and all below it."""
    total, reached = Usage(), [pid]
    while reached:
        folder = Path(f"/proc/{reached.pop()}")
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            _, resident, shared = map(int, (folder / "statm").read_text().split()[:3])
            reached += [int(child) for file in (folder / "task").glob("*/children") for child in file.read_text().split()]
        except OSError:  # ended meanwhile
            continue
        total += Usage((resident - shared) * PAGE_BYTES, shared * PAGE_BYTES, sum(map(int, fields[11:15])) * TICK_S)
    return total


def resident_bytes() -> int:
    """What this process and all below it hold of memory."""
    return usage_of(os.getpid()).own_bytes
