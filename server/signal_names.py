"""Say in words how a process has ended, with the name of the signal that killed it."""

from __future__ import annotations

import signal


def name_of(number: int) -> str:
    """Return the name of a signal, such as SIGKILL. Return `signal NUMBER` for a number without a name, as most real-time signals have."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_status(returncode: int | None) -> str:
    """Return in words how a process has ended."""
    if returncode is None:
        return "still running"
    if returncode < 0:
        return f"killed by {name_of(-returncode)}"
    return f"exit status {returncode}"
