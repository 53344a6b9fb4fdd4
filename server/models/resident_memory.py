"""How much memory this process and its children hold, as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    """Of this process and all below it; 0 where there is no /proc."""
    children: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            statm = (folder / "statm").read_text()
        except OSError:  # ended meanwhile
            continue
        pid, parent = int(folder.name), int(stat.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(pid)
        resident, shared = (int(field) for field in statm.split()[1:3])
        sizes[pid] = (resident - shared) * PAGE_BYTES  # mapped files are the page cache's, not the process's
    total, reached = 0, [os.getpid()]
    while reached:
        pid = reached.pop()
        total += sizes.get(pid, 0)
        reached += children.get(pid, [])
    return total
