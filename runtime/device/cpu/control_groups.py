"""Find the control groups of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def folders_of(controller: str, cgroups: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders of the groups whose limits apply to this process: its own group, and all groups that enclose it. `controller` is
    "cpu" or "memory". A container sees its own group as the root, so folders of outer groups may be missing. Version 2 of control groups
    has one folder per group for all controllers, version 1 has one for each controller."""
    for line in membership.read_text().splitlines() if membership.is_file() else []:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        path = Path(group.lstrip("/"))
        yield from ((cgroups / controller if controllers else cgroups) / part for part in (path, *path.parents))
