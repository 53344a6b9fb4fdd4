"""What the compiler says to the one who develops it: on standard error, from the level of RELAXSERVE_DEBUG at which it is wanted."""

from __future__ import annotations

import sys

from runtime import flags


def say(level: int, text: str) -> None:
    if flags.current().debug >= level:
        print(text, file=sys.stderr, flush=True)
