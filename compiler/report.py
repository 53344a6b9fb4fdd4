"""Print messages of the compiler for developers, on standard error."""

from __future__ import annotations

import sys

from runtime import flags


def say(level: int, text: str) -> None:
    """Print the text if RELAXSERVE_DEBUG is at least `level`."""
    if flags.current().debug >= level:
        print(text, file=sys.stderr, flush=True)
