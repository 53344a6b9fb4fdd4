"""The meter that counts what one rendering of a template uses."""

from __future__ import annotations

import sys
import time
from types import NoneType
from typing import Any, cast

from jinja2.filters import _GroupTuple as GroupTuple  # pyright: ignore[reportPrivateUsage]  # returned by groupby
from jinja2.runtime import Context, Undefined

from server.text.templates.limits import Limits

MAX_ITEMS = 1_000_000  # items of one list
MAX_INT_BITS = 64

STEPS_PER_LOOK = 16  # steps between two looks at the thread's clock, because a look costs as much as a few steps
CHARS_PER_STEP = 1 << 12  # scanning this many characters takes about as long as a step
ITEM_BYTES = 80  # bytes counted for a list item: its slot, and a short text

SCALARS = frozenset((NoneType, bool, int, float))
KEYS = SCALARS | {str}
SEQUENCES = frozenset((list, tuple, range, GroupTuple, type({}.keys()), type({}.values()), type({}.items())))


class TemplateLimit(Exception):
    """Raised when a template or its rendering exceeds a limit, or does what the meter cannot measure."""


class TemplateRaise(Exception):
    """Raised when a template calls raise_exception: the template does not accept these messages."""


class Meter:
    """Counts what one rendering uses, and raises TemplateLimit beyond its limits. The time is CPU time of the rendering thread, so no
    template fails only because the machine is busy."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._deadline = time.thread_time() + limits.time_s
        self._steps = 0
        self._left_bytes = limits.memory_bytes

    def step(self, num_chars: int = 0) -> None:
        """Count an operation that scans `num_chars` characters. Raise TemplateLimit if the time is over; the clock is read only after
        several steps."""
        _check_count(num_chars)
        self._steps += 1 + num_chars // CHARS_PER_STEP
        if self._steps >= STEPS_PER_LOOK:
            self._steps = 0
            self._look()

    def _look(self) -> None:
        """Raise TemplateLimit if the time is over."""
        if time.thread_time() > self._deadline:
            raise TemplateLimit(f"rendering takes longer than {self.limits.time_s:g} s")

    def charge(self, num_bytes: int) -> None:
        """Count memory that is about to be used, and a step that scans as many characters. Raise TemplateLimit if the memory or the time is
        used up."""
        _check_count(num_bytes)
        self._left_bytes -= num_bytes
        if self._left_bytes < 0:
            raise TemplateLimit(f"rendering handles more than {self.limits.memory_bytes} bytes")
        self.step(num_bytes)

    def charge_value(self, value: object) -> None:
        """Count a value that was just made. Its parts were counted when they were made. Raise TemplateLimit if an integer is too large, or
        if the memory is used up."""
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise TemplateLimit(f"an integer has {value.bit_length()} bits; at most {MAX_INT_BITS} are allowed")
        self.charge(sys.getsizeof(value) if isinstance(value, str | list | tuple | dict) else 16)

    def measure(self, value: object) -> int:
        """Return the approximate length of `str(value)`. Nested lists may share items, so their text can be exponentially longer than the
        lists. So this method stops once the length exceeds the memory that is left, and values are measured before they are compared or
        converted to text. Raise TemplateLimit if the value is too large, or contains an object that cannot be measured."""
        if type(value) is str:
            return len(value)
        size = steps = 0
        stack = [value]
        while stack:
            item = stack.pop()
            steps += 1
            kind = type(item)
            if kind is str:
                size += len(cast(str, item)) + 4
            elif kind is dict:
                for key, part in cast(dict[object, object], item).items():
                    stack += (key, part)
                size += 2
            elif kind in SEQUENCES:
                stack += cast(Any, item)
                size += 2
            elif kind in SCALARS or isinstance(item, Undefined):
                size += 24
            else:
                raise TemplateLimit(f"a {kind.__name__} cannot be converted to text or compared")
            if steps % 1024 == 0:
                self._look()
            if size > self._left_bytes or len(stack) > MAX_ITEMS:
                raise TemplateLimit(f"a value has more than {MAX_ITEMS} items, or its text has more than {self.limits.memory_bytes} bytes")
        return size


def _check_count(number: int) -> None:
    """Raise TemplateLimit for a number that is negative, or not an integer. A negative number would give back memory or time, and NaN would
    exceed no limit."""
    if type(number) is not int or number < 0:
        raise TemplateLimit(f"the meter is charged {number!r}; expected a count, 0 or more")


def check_key(value: object) -> None:
    """Raise TypeError for a key of another type than KEYS, such as a tuple. Since -1 and -2 have the same hash, a template could make any
    number of tuples with one hash, and each look-up would compare with all of them."""
    if type(value) not in KEYS:
        raise TypeError(f"a {type(value).__name__} cannot be a key")


class MeteredContext(Context):
    """The variables of one rendering, and its meter."""

    meter: Meter


def meter_of(context: Context) -> Meter:
    """Return the meter of a rendering."""
    return cast(MeteredContext, context).meter
