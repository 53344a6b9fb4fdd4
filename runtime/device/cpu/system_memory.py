"""Find out how much memory the machine has, and how much this process may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SystemMemory:
    total_bytes: int
    available_bytes: int  # memory that can be allocated without swapping, within the limit of the control group
    limit_bytes: int | None  # limit of the control group; None: no limit


def system_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> SystemMemory:
    """Return the memory of the machine. Linux states it in `meminfo`, and the limit of the control group in files below `cgroup`."""
    fields = dict(line.split(":") for line in _text(meminfo).splitlines())
    total, available = (int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit, used = _text(cgroup / "memory.max").strip(), _text(cgroup / "memory.current").strip()
    if not limit.isdigit() or not used.isdigit():
        return SystemMemory(total, available, None)
    return SystemMemory(total, max(0, min(available, int(limit) - int(used))), int(limit))


def _text(path: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
