"""Print a compiler message for developers on standard error if RELAXSERVE_DEBUG is at least its level."""

from __future__ import annotations

import sys

from runtime import flags


def say(level: int, text: str) -> None:
    if flags.current().debug >= level:
        print(text, file=sys.stderr, flush=True)
