"""Parse arguments of benchmarks. Each function raises ArgumentTypeError for a text that is no such argument."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from contextlib import suppress

from runtime.device.registry import NAME as DEVICE_NAME
from server.load_settings import MOST_SEQUENCES


def number(text: str) -> float:
    """Parse a finite number above 0."""
    with suppress(ValueError):
        if 0 < (found := float(text)) < float("inf"):
            return found
    raise argparse.ArgumentTypeError(f"{text} is not a number above 0")


def temperature(text: str) -> float:
    """Parse a finite number of at least 0."""
    with suppress(ValueError):
        if 0 <= (found := float(text)) < float("inf"):
            return found
    raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")


def device_name(text: str) -> str:
    """Return the name of a device. Whether the machine has it is not checked."""
    if not re.fullmatch(DEVICE_NAME, text):
        raise argparse.ArgumentTypeError(f"{text} is no device; expected cpu, cuda, or one of several GPUs as cuda:1")
    return text


def whole(text: str) -> int:
    """Parse a whole number above 0."""
    return at_least(1)(text)


def at_least(least: int) -> Callable[[str], int]:
    """Return a function that parses a whole number of at least `least`."""

    def parsed(text: str) -> int:
        with suppress(ValueError):
            if (found := int(text)) >= least:
                return found
        expected = "above 0" if least == 1 else f"of at least {least}"
        raise argparse.ArgumentTypeError(f"{text} is not a whole number {expected}")

    return parsed


def clients(text: str) -> int:
    """Parse a number of clients, at most MOST_SEQUENCES, because each is a sequence of the batch."""
    if (found := whole(text)) > MOST_SEQUENCES:
        raise argparse.ArgumentTypeError(f"{text} clients are more than the {MOST_SEQUENCES} sequences of the largest batch")
    return found
