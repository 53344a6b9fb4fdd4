"""Wait for the threads that flush used files to the disk (deploy/use.py)."""

from __future__ import annotations

import threading


def join_flush() -> None:
    for thread in threading.enumerate():
        if thread.name == "flush":
            thread.join()
