"""Run string methods and format strings for templates. The memory that a call may take is charged before the call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import Formatter
from typing import Any, cast

from server.text.templates.meter import ITEM_BYTES, MAX_ITEMS, SCALARS, Meter, TemplateLimit

# fmt: off
STR_METHODS = frozenset((
    "capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "format", "index", "isalnum", "isalpha", "isascii",
    "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "ljust", "lower", "lstrip",
    "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip",
    "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill",
))
# fmt: on
SEARCHES = frozenset(("count", "find", "index", "partition", "replace", "rfind", "rindex", "rpartition", "rsplit", "split"))
STRIPS = frozenset(("strip", "lstrip", "rstrip"))
PADS = frozenset(("center", "ljust", "rjust", "zfill"))
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def call_text(meter: Meter, name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return `text.name(*args, **kwargs)`, and charge for it. Raise TemplateLimit if the call would take too long or too much memory."""
    if name == "format":
        return format_braces(meter, text, args, kwargs)
    if name == "join":
        args = tuple(items_of(meter, arg) for arg in args)
    meter.step(len(text))
    meter.charge(_most_bytes(meter, name, text, (*args, *kwargs.values())))
    result = getattr(text, name)(*args, **kwargs)
    meter.charge_value(result)
    return result


def _most_bytes(meter: Meter, name: str, text: str, args: tuple[Any, ...]) -> int:
    """Return an upper bound for the bytes that a call creates in addition to the size of the text. Raise TemplateLimit if a search would
    take too long."""
    first = args[0] if args else None
    if isinstance(first, str):
        # In the worst case, searching backwards and stripping compare every position with every character of the argument.
        turns = len(text) - len(first) + 1 if name in SEARCHES else len(text) if name in STRIPS else 0
        work = max(turns, 0) * len(first)
        if work > meter.limits.search_chars:
            raise TemplateLimit(f"str.{name} with {len(first)} characters on a text of {len(text)} characters could take too long")
        meter.step(work)
    if name in PADS or name == "expandtabs":
        width = max((abs(arg) for arg in args if isinstance(arg, int)), default=8)
        return 4 * width * (1 if name in PADS else text.count("\t"))
    if name == "replace" and len(args) > 1 and isinstance(first, str) and isinstance(args[1], str):
        return 4 * text.count(first) * len(args[1])
    if name == "join" and isinstance(first, list):
        return meter.measure(first) + len(text) * len(first)
    if name == "splitlines":
        return _parts_bytes(num_lines(text))
    if name in ("split", "rsplit"):
        return _parts_bytes(text.count(first) if isinstance(first, str) and first else len(text) // 2)
    return 0


def num_lines(text: str) -> int:
    """Return the number of lines of `text`, as `str.splitlines` counts them, or somewhat more."""
    return sum(map(text.count, LINE_ENDS)) + 1


def _parts_bytes(count: int) -> int:
    """Return an upper bound for the bytes that splitting a text at `count` separators takes, in addition to the bytes of the text. There is
    one part more than separators. Raise TemplateLimit if there are too many separators."""
    if count > MAX_ITEMS:
        raise TemplateLimit(f"a text splits into {count} parts; at most {MAX_ITEMS} are allowed")
    return ITEM_BYTES * (count + 1)


def items_of(meter: Meter, values: Any) -> list[Any]:
    """Return the items of an iterable as a list, and charge each item. A list is returned itself, without a charge. Raise TemplateLimit
    beyond MAX_ITEMS items."""
    if type(values) is list:
        return cast(list[Any], values)
    items: list[Any] = []
    size = ITEM_BYTES if isinstance(values, str) else 8
    for value in values:
        meter.charge(size)
        items.append(value)
        if len(items) > MAX_ITEMS:
            raise TemplateLimit(f"a sequence has more than {MAX_ITEMS} items")
    return items


# --- formats ---------------------------------------------------------------------------------------------------------------

MAX_PADDING = 999
_PERCENT = re.compile(r"%(\([^()%]*\))?[#0\- +]*(\d*)(?:\.(\d*))?[hlL]?[diouxXeEfFgGcrsa%]")
_SPEC = re.compile(r"(?:.?[<>=^])?[ +-]?z?#?0?(\d*)[,_]?(?:\.(\d+))?[a-zA-Z%]?", re.DOTALL)
_CONVERSIONS = {None: str, "s": str, "r": repr, "a": ascii}
_MOST_CHARS_OF_ONE = 10  # repr() writes one character as \U0001f600


def format_percent(meter: Meter, text: str, args: Any) -> str:
    """Return `text % args`, and charge for it. Raise TemplateLimit for a width or precision above MAX_PADDING, and ValueError for a format
    that is not supported."""
    args_chars = 0 if isinstance(args, tuple) else _MOST_CHARS_OF_ONE * meter.measure(args)
    start = 0
    while (start := text.find("%", start)) >= 0:
        match = _PERCENT.match(text, start)
        if match is None:
            raise ValueError(f"the format {text[start : start + 20]!r} is not supported; expected a form such as %s, %(name)s, %5d or %.2f")
        meter.charge(_padding(match[2]) + _padding(match[3]) + args_chars)
        start = match.end()
    if isinstance(args, tuple):
        meter.charge(_MOST_CHARS_OF_ONE * meter.measure(args))
    meter.charge(len(text))
    return text % args


def format_braces(meter: Meter, text: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return `text.format(*args, **kwargs)` for plain fields: `{}`, `{0}`, `{name}`, with a conversion and a format, and charge for it.
    Raise ValueError for attributes, items and nested fields, because with them str.format would bypass the sandbox."""
    parts: list[str] = []
    num_automatic = 0
    meter.charge(len(text))
    for literal, field, spec, conversion in Formatter().parse(text):
        meter.step()
        parts.append(literal)
        if field is None:
            continue
        if not field:
            value = args[num_automatic]
            num_automatic += 1
        elif field.isdecimal() and len(field) <= 3:
            value = args[int(field)]
        elif field.isidentifier():
            value = kwargs[field]
        else:
            raise ValueError(f"str.format has the field {field!r:.60}; expected a name or a number")
        parts.append(_formatted(meter, value, spec or "", conversion))
    return "".join(parts)


def _formatted(meter: Meter, value: Any, spec: str, conversion: str | None) -> str:
    """Return one field of `str.format`. Raise ValueError if its format is not supported, or TemplateLimit if it pads too far."""
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ValueError(f"str.format has the format {spec!r:.60}; expected a form such as :>8, :05d or :.2f")
    meter.charge(_MOST_CHARS_OF_ONE * meter.measure(value) + 4 * _padding(match[1]) + _padding(match[2]))
    if conversion is None and type(value) in SCALARS:
        return format(value, spec)
    text: str = _CONVERSIONS[conversion](value)
    return format(text, spec)


def _padding(digits: str | None) -> int:
    """Return a width or precision, 0 if it is absent. Raise TemplateLimit if it has too many digits."""
    if digits and len(digits) > len(str(MAX_PADDING)):
        raise TemplateLimit(f"a format pads to {digits:.20}; at most {MAX_PADDING} are allowed")
    return int(digits or 0)
