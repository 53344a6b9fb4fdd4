"""Find out how much memory the machine has, and how much this process may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime.device.cpu.control_groups import CGROUPS, MEMBERSHIP, folders_of

# For versions 2 and 1 of control groups: the file with a group's limit, the file with its memory use, and the fields of memory.stat that
# count its pages of files.
_VERSIONS = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


@dataclass(frozen=True, slots=True)
class SystemMemory:
    """The memory of the machine, and the part of it that this process may use."""

    total_bytes: int
    available_bytes: int  # memory that can be allocated without swapping, within the limits of the control groups
    limit_bytes: int | None  # the least limit of the control groups; None: no limit


def system_memory(meminfo: Path = Path("/proc/meminfo"), cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> SystemMemory:
    """Return the memory of the machine. Linux states it in `meminfo`, the limits of control groups in files below `cgroups`, and the groups
    of this process in `membership`."""
    fields = dict(line.split(":") for line in _text(meminfo).splitlines())
    total, available = (int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit = total
    for folder in folders_of("memory", cgroups, membership):
        for limit_file, use_file, names in _VERSIONS:
            most, used = _text(folder / limit_file).strip(), _text(folder / use_file).strip()
            if most.isdigit() and used.isdigit() and int(most) < total:  # version 1 writes a huge number if there is no limit
                limit = min(limit, int(most))
                available = min(available, max(0, int(most) - int(used) + _file_bytes(folder, names)))
    return SystemMemory(total, available, limit if limit < total else None)


def _file_bytes(folder: Path, names: tuple[str, ...]) -> int:
    """Return the bytes of files that a group has in memory. The group's use includes these bytes, but Linux frees them when other memory is
    needed, so they are available, as in MemAvailable. Otherwise the cached files of a model that was downloaded, or served by a worker that
    has ended, could keep the model from being loaded."""
    words = [line.split() for line in _text(folder / "memory.stat").splitlines()]
    return sum(int(value) for name, value in words if name in names)


def _text(path: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
