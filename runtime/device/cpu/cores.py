"""The cores that this process may use: its affinity, cut to what its control group pays for."""

from __future__ import annotations

import os
from pathlib import Path

# As the process was given them: a thread that was pinned later sees one alone.
_AFFINITY = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def available_cores(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> tuple[int, ...]:
    """Numbers of the cores this process may run on: its affinity, cut to what the quota of its control group pays for."""
    quota = cpu_quota(cgroups, membership)
    return tuple(_AFFINITY if quota is None else _AFFINITY[: max(1, int(quota))])


def cpu_quota(cgroups: Path, membership: Path) -> float | None:
    """The number of cores whose time the control groups grant: the least of all enclosing groups. None without a limit."""
    quotas: list[float] = []
    for line in membership.read_text().splitlines() if membership.is_file() else []:
        _, controllers, group = line.split(":", 2)
        path = Path(group.lstrip("/"))
        for part in (path, *path.parents):  # a container sees its own group as the root, so missing ones are skipped
            if not controllers:
                quotas += _quota(cgroups / part / "cpu.max")
            elif "cpu" in controllers.split(","):
                quotas += _quota(cgroups / "cpu" / part / "cpu.cfs_quota_us", cgroups / "cpu" / part / "cpu.cfs_period_us")
    return min(quotas, default=None)


def _quota(*files: Path) -> list[float]:
    """Version 2 keeps "quota period" in one file, version 1 has a file for each; "max" and -1 mean unlimited."""
    if not all(f.is_file() for f in files):
        return []
    quota, period = " ".join(f.read_text() for f in files).split()
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]
