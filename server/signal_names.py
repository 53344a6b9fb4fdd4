"""Give the names of signals, for example of one that has ended a process."""

from __future__ import annotations

import signal


def name_of(number: int) -> str:
    """Return the name of a signal, such as SIGKILL. Return `signal NUMBER` for a number without a name, as most real-time signals have."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
