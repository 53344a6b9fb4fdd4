"""How threads of one process share the interpreter."""

from __future__ import annotations

import sys

SWITCH_S = 0.001  # CPython's default is 5 ms, and a token passes three threads on its way to the client


def switch_often() -> None:
    """Let a thread that waits for the interpreter have it after 1 ms, while another one parses or tokenizes."""
    sys.setswitchinterval(SWITCH_S)
