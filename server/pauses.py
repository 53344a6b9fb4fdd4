"""Python stops all threads of a process to switch between them and to collect garbage. These settings keep such pauses short."""

from __future__ import annotations

import gc
import sys

SWITCH_S = 0.001  # CPython's default is 5 ms, and a token passes three threads on its way to the client
YOUNG = 10_000  # objects that make the collector look at the young ones
OLD = 20, 1_000  # collections of the next younger generation that make it look at an older one


def switch_often() -> None:
    """Let a thread that waits for the interpreter have it after 1 ms, while another one parses or tokenizes."""
    sys.setswitchinterval(SWITCH_S)


def collect_in_small_portions() -> None:
    """From now on the collector leaves out what exists already, for example modules and the compiled program, whose 10^6 objects take
    it 0.1 s. What a process keeps for long after this call is freed by counting references, so old objects are rarely looked at."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *OLD)
