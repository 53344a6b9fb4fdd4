"""Values that are computed in parts, between which other work may run."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Generic, TypeVar

T = TypeVar("T")

InParts = Generator[None, None, T]  # yields between two parts, and returns the value


def whole(parts: InParts[T]) -> T:
    """Run all parts, one after another, and return the value."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value


class OneAtATime(Generic[T]):
    """Computes one value at a time. A request for another value drops the unfinished one."""

    def __init__(self) -> None:
        self._of: object = None
        self._parts: InParts[T] | None = None

    def advance(self, of: object, begin: Callable[[], InParts[T]]) -> T | None:
        """Run the next part of the value that belongs to `of`. If no part of this value has run yet, call `begin`, and drop any other
        value that has begun. Return the value after its last part, and None after each earlier part."""
        if self._parts is None or self._of != of:
            if self._parts is not None:
                self._parts.close()
            self._of, self._parts = of, begin()
        try:
            next(self._parts)
        except StopIteration as end:
            self._of = self._parts = None
            return end.value
        return None
