"""What rendering a template may take, and the account of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import cast

from jinja2.runtime import Context, Undefined

MAX_ITEMS = 1_000_000  # of one list
MAX_INT_BITS = 64

STEPS_PER_LOOK = 16  # asking for the time of a thread costs as much as a few steps

METER = "the meter"  # not an identifier: a template has no way to name it


class TemplateLimit(Exception):
    """A template went beyond what rendering may take."""


class TemplateRaise(Exception):
    """A template called raise_exception: it does not accept these messages."""


class Meter:
    """What one rendering may still take. Its time is that of the processor, on the thread that renders: a busy machine
    makes no template too slow."""

    def __init__(self, *, time_limit_s: float, memory_limit_bytes: int) -> None:
        self._time_limit_s = time_limit_s
        self._deadline = time.thread_time() + time_limit_s
        self._steps = 0
        self._limit_bytes = memory_limit_bytes
        self._left_bytes = memory_limit_bytes

    def step(self) -> None:
        self._steps += 1
        if self._steps % STEPS_PER_LOOK == 0:
            self._look()

    def _look(self) -> None:
        if time.thread_time() > self._deadline:
            raise TemplateLimit(f"rendering takes longer than {self._time_limit_s} s")

    def charge(self, num_bytes: int) -> None:
        self._left_bytes -= num_bytes
        if self._left_bytes < 0:
            raise TemplateLimit(f"rendering handles more than {self._limit_bytes} bytes")
        self.step()

    def charge_value(self, value: object) -> None:
        """Count a value that was just made; its parts were counted when they were."""
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise TemplateLimit(f"an integer has {value.bit_length()} bits; at most {MAX_INT_BITS} are allowed")
        self.charge(sys.getsizeof(value) if isinstance(value, str | bytes | list | tuple | dict) else 16)

    def measure(self, value: object) -> int:
        """How many characters `str(value)` has, about. A list may hold another one twice, and so on: writing it out can take
        exponentially more than building it, which is why it is walked under the budget before anything else touches it."""
        if type(value) is str:
            return len(value)
        size = steps = 0
        stack = [value]
        while stack:
            item = stack.pop()
            steps += 1
            if isinstance(item, str):
                size += len(item) + 4
            elif isinstance(item, Mapping):
                stack += item.keys()
                stack += item.values()
                size += 2
            elif isinstance(item, Sequence) or type(item).__name__ in ("dict_keys", "dict_values", "dict_items"):
                stack += cast(Sequence[object], item)
                size += 2
            elif item is None or isinstance(item, int | float | Undefined):
                size += 24
            else:
                raise TemplateLimit(f"a {type(item).__name__} cannot be written or compared")
            if steps % 1024 == 0:
                self._look()
            if size > self._left_bytes or len(stack) > MAX_ITEMS:
                raise TemplateLimit(f"a value unfolds to more than {self._limit_bytes} bytes or {MAX_ITEMS} items")
        return size


def meter_of(context: Context) -> Meter:
    return context.parent[METER]
