"""Settings that keep Python's pauses short. Python stops all threads of a process to switch between them and to collect garbage."""

from __future__ import annotations

import gc
import sys

SWITCH_S = 0.001  # CPython's default is 5 ms, and a token passes through three threads on its way to the client
YOUNG = 10_000  # allocated objects after which the collector examines the young generation
OLD = 4, 5_000  # collections of a generation after which the collector examines the next older generation


def switch_often() -> None:
    """Let a waiting thread get the interpreter after 1 ms while another thread parses or tokenizes."""
    sys.setswitchinterval(SWITCH_S)


def collect_in_small_portions() -> None:
    """Exclude the objects that exist now, for example modules and the compiled program, from garbage collection: examining these 10^6
    objects takes 0.1 s, and only 1,500 of them are garbage. Let the collector examine old generations rarely, because reference counts free
    most objects that are created later."""
    gc.freeze()
    gc.set_threshold(YOUNG, *OLD)
