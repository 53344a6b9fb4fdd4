"""Read what the kernel reports about a process in /proc/PID/stat."""

from __future__ import annotations

from pathlib import Path

TIMES = slice(11, 15)  # places of the fields of processor time, in ticks: user, system, and both times of descendants that have ended


def fields_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the program's name; the first of them is the state. Raise OSError if the process has
    ended, or on systems without /proc."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode("ascii").split()
