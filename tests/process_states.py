"""Ask Linux for the state and the memory of a process."""

from __future__ import annotations

import os
from pathlib import Path

from server.process_state import fields_of


def state_of(pid: int) -> str:
    """Return the letter that Linux gives the main thread: R if it computes or could, S if it waits, T if it is stopped, Z if it has ended
    and nobody has asked for its status. Return "" if there is no such process."""
    try:
        return fields_of(pid)[0]
    except (FileNotFoundError, ProcessLookupError):  # it may end between opening and reading
        return ""


def is_running(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
