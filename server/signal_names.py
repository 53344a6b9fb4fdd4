"""Name the signal that has ended a process."""

from __future__ import annotations

import signal


def name_of(number: int) -> str:
    """Return the name of a signal, such as SIGKILL. Most real-time signals have none: return the number of such a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
