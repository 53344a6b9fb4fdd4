"""The cores that this process may use: the cores of its affinity, limited in number by the quota of its control group."""

from __future__ import annotations

import os
from pathlib import Path

from runtime.device.cpu.control_groups import CGROUPS, MEMBERSHIP, folders_of

# Affinity of the process, read before any thread is pinned: a pinned thread sees only one core.
_AFFINITY = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def available_cores(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> tuple[int, ...]:
    """Return the numbers of the cores that this process may use: those of its affinity, but no more than its quota of processor time
    allows."""
    quota = cpu_quota(cgroups, membership)
    return tuple(_AFFINITY if quota is None else _AFFINITY[: max(1, int(quota))])


def num_cores_of_affinity() -> int:
    """Return the number of cores of the process's affinity. A quota may grant the time of fewer cores, and the process may use this time on
    any cores of its affinity."""
    return len(_AFFINITY)


def cpu_quota(cgroups: Path, membership: Path) -> float | None:
    """Return the number of cores whose time the control groups grant: the least quota of the own group and of all groups that
    enclose it. Return None if no group has a limit."""
    quotas: list[float] = []
    for folder in folders_of("cpu", cgroups, membership):
        quotas += _quota(folder / "cpu.max")
        quotas += _quota(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
    return min(quotas, default=None)


def _quota(*files: Path) -> list[float]:
    """Read a quota as a number of cores; the list is empty if there is no limit. Version 2 of control groups has "quota period" in one
    file, version 1 has one file for each. "max" and -1 mean unlimited."""
    if not all(f.is_file() for f in files):
        return []
    quota, period = " ".join(f.read_text() for f in files).split()
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]
