"""Ask Linux for the state of a process."""

from __future__ import annotations

from pathlib import Path


def state_of(pid: int) -> str:
    """Return the letter that Linux gives the main thread: R if it computes or could, S if it waits, T if it is stopped, Z if it has ended
    and nobody has asked for its status. Return "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it may end between opening and reading
        return ""


def is_running(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")
