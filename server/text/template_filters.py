"""Filters, tests and methods of text that a template may use, each under the meter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import islice
from typing import Any, cast

import jinja2.filters
import jinja2.tests
from jinja2.runtime import Context
from jinja2.utils import pass_context

from server.text.meter import MAX_ITEMS, Meter, TemplateLimit, meter_of

MAX_PADDING_DIGITS = 3  # of a width in a format string

# Jinja's own, without their exact signatures.
FILTERS: Mapping[str, Callable[..., Any]] = jinja2.filters.FILTERS
TESTS: Mapping[str, Callable[..., Any]] = jinja2.tests.TESTS

# Work in proportion to the length of their input, whatever lies inside.
# fmt: off
SHALLOW_FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "first", "float", "int", "items", "last", "length", "lower",
    "map", "reject", "rejectattr", "reverse", "safe", "select", "selectattr", "title", "upper", "wordcount",
)
# Look at, compare or write out what lies inside.
DEEP_FILTERS = (
    "dictsort", "e", "escape", "groupby", "max", "min", "sort", "string", "truncate", "unique",
)
SHALLOW_TESTS = (
    "boolean", "callable", "defined", "divisibleby", "even", "false", "float", "integer", "iterable", "lower",
    "mapping", "none", "number", "odd", "sameas", "sequence", "string", "true", "undefined", "upper",
)
DEEP_TESTS = (
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lt", "ne",
)
# fmt: on


def _materialised(value: object) -> object:
    """Lazy results become lists, so that they can be measured and then used."""
    if not isinstance(value, Iterator):
        return value
    items = list(islice(cast(Iterator[object], value), MAX_ITEMS + 1))
    if len(items) > MAX_ITEMS:
        raise TemplateLimit(f"a sequence has more than {MAX_ITEMS} items")
    return items


def _metered(function: Callable[..., Any], *, deep: bool) -> Callable[..., Any]:
    """`function` under the meter. Jinja says by an attribute what a filter wants as its first argument; here it always gets
    the context, and passes on what the original asks for."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    @wraps(function)
    def wrapper(context: Context, value: object, *args: Any, **kwargs: Any) -> Any:
        meter = meter_of(context)
        value = _materialised(value)
        if deep:
            for part in (value, *args, *kwargs.values()):
                meter.charge(meter.measure(part))
        elif isinstance(value, str):
            meter.charge(len(value))
        lead = {"context": (context,), "environment": (context.environment,), "eval_context": (context.eval_ctx,)}
        result = function(*lead.get(wanted or "", ()), value, *args, **kwargs)
        meter.charge_value(result)
        return result

    wrapper.jinja_pass_arg = pass_context(lambda: None).jinja_pass_arg  # type: ignore[attr-defined]  # wraps() copied the original's
    return wrapper


@pass_context
def _list(context: Context, value: Any) -> list[Any]:
    if isinstance(value, str) and len(value) > MAX_ITEMS:
        raise TemplateLimit(f"a text of {len(value)} characters becomes a list; at most {MAX_ITEMS} items are allowed")
    items = list(cast(list[Any], _materialised(value)))
    meter_of(context).charge_value(items)
    return items


@pass_context
def _join(context: Context, value: Any, d: object = "", attribute: str | int | None = None) -> Any:
    meter = meter_of(context)
    items = _list(context, value)
    meter.charge(meter.measure(items) + meter.measure(d) * len(items))
    return FILTERS["join"](context.eval_ctx, items, d, attribute)


@pass_context
def _sum(context: Context, value: Any, attribute: str | int | None = None, start: object = 0) -> Any:
    if not isinstance(start, int | float):
        raise TemplateLimit("sum adds numbers only")
    result = FILTERS["sum"](context.environment, _list(context, value), attribute, start)
    meter_of(context).charge_value(result)
    return result


@pass_context
def _round(context: Context, value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > 100:
        raise TemplateLimit(f"round to {precision} digits; at most 100 are allowed")
    return FILTERS["round"](value, precision, method)


@pass_context
def _replace(context: Context, value: object, old: object, new: object, count: int | None = None) -> str:
    return call_text(meter_of(context), "replace", _text(context, value), _text(context, old), _text(context, new), count)


@pass_context
def _trim(context: Context, value: object, chars: str | None = None) -> str:
    return call_text(meter_of(context), "strip", _text(context, value), chars)


@pass_context
def _indent(context: Context, value: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = _text(context, value)
    one = len(width) if isinstance(width, str) else int(width)
    meter_of(context).charge(len(text) + (text.count("\n") + 1) * max(one, 0))
    return FILTERS["indent"](text, width, first, blank)


@pass_context
def _format(context: Context, value: object, *args: Any, **kwargs: Any) -> str:
    return format_percent(meter_of(context), _text(context, value), kwargs or args)


@pass_context
def _tojson(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: Jinja's own filter escapes for HTML."""
    meter = meter_of(context)
    value = _materialised(value)
    meter.charge(meter.measure(value))
    if indent is not None and not 0 <= indent <= 16:
        raise TemplateLimit(f"tojson indents by {indent}; 0 to 16 are allowed")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, allow_nan=True)
    if indent is None:
        text = encoder.encode(value)
        meter.charge(len(text))
        return text
    parts: list[str] = []
    for part in encoder.iterencode(value):  # the indentation of a deep value can outweigh all else, so count as it comes
        meter.charge(len(part))
        parts.append(part)
    return "".join(parts)


def metered_filters() -> dict[str, Callable[..., Any]]:
    table = {name: _metered(FILTERS[name], deep=False) for name in SHALLOW_FILTERS}
    table |= {name: _metered(FILTERS[name], deep=True) for name in DEEP_FILTERS}
    table |= {"list": _list, "join": _join, "sum": _sum, "round": _round, "replace": _replace, "indent": _indent, "trim": _trim}
    return table | {"format": _format, "tojson": _tojson}


def metered_tests() -> dict[str, Callable[..., Any]]:
    table = {name: _metered(TESTS[name], deep=False) for name in SHALLOW_TESTS}
    return table | {name: _metered(TESTS[name], deep=True) for name in DEEP_TESTS}


# --- text ----------------------------------------------------------------------------------------------------------------

# Methods of str that a template may call. Missing on purpose: padding (center, ljust, zfill, expandtabs), tables (translate),
# and what leaves text (encode).
# fmt: off
STR_METHODS = frozenset((
    "capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isascii",
    "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip",
    "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip",
    "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
))
# fmt: on
# Methods of the containers; all of them read only.
CONTAINER_METHODS = {
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
SEARCHES = frozenset(("count", "find", "index", "partition", "replace", "rfind", "rindex", "rpartition", "rsplit", "split"))
STRIPS = frozenset(("strip", "lstrip", "rstrip"))
MAX_SEARCH_WORK = 1 << 30  # character comparisons: about a second in the worst case


def _text(context: Context, value: object) -> str:
    meter = meter_of(context)
    if not isinstance(value, str):
        meter.charge(meter.measure(value))
    return str(value)


def call_text(meter: Meter, method: str, text: str, *args: Any, **kwargs: Any) -> Any:
    """A method of str, with what it can cost checked first."""
    meter.charge(len(text))
    first = args[0] if args else next(iter(kwargs.values()), None)
    if isinstance(first, str):
        # Searching backwards and stripping compare, at worst, every position with every character sought.
        turns = len(text) - len(first) + 1 if method in SEARCHES else len(text) if method in STRIPS else 0
        if turns > 0 and turns * len(first) > MAX_SEARCH_WORK:
            raise TemplateLimit(f"str.{method} of {len(first)} characters in {len(text)} takes too long")
    if method == "replace":
        old, new = args[0], args[1]
        args = tuple(arg for arg in args if arg is not None)
        meter.charge(len(text) + text.count(old) * len(new))
    elif method == "join":
        args = (_materialised(first),)
        items = cast(Sequence[object], args[0])
        meter.charge(meter.measure(items) + len(text) * len(items))
    elif method == "splitlines":
        _check_items(sum(map(text.count, LINE_ENDS)))
    elif method in ("split", "rsplit"):
        parts = getattr(text, method)(first if isinstance(first, str) else None, MAX_ITEMS)
        _check_items(len(parts))
        if len(args) + len(kwargs) > (1 if isinstance(first, str) else 0):
            parts = getattr(text, method)(*args, **kwargs)
        meter.charge(80 * len(parts))
        return parts
    result = getattr(text, method)(*args, **kwargs)
    meter.charge_value(result)
    return result


def _check_items(count: int) -> None:
    if count > MAX_ITEMS:
        raise TemplateLimit(f"a text falls into {count} parts; at most {MAX_ITEMS} are allowed")


def format_percent(meter: Meter, text: str, args: Any) -> str:
    if re.search(rf"%[^%a-zA-Z]*(\d{{{MAX_PADDING_DIGITS + 1}}}|\*)", text):
        raise TemplateLimit("a format string pads to more than 999 characters or to a width from its arguments")
    meter.charge(len(text) + text.count("%") * (10**MAX_PADDING_DIGITS + meter.measure(args)))
    return text % args


def format_braces(meter: Meter, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """str.format for plain fields: `{}`, `{0}`, `{name}` and a short format; no attributes, nested fields or conversions, which
    would reach past the sandbox."""
    if re.search(rf"\{{[^{{}}]*([.\[!]|\{{|\d{{{MAX_PADDING_DIGITS + 1}}})", text.replace("{{", "").replace("}}", "")):
        raise TemplateLimit("str.format takes plain fields with a width of at most 999 only")
    meter.charge(len(text) + text.count("{") * (10**MAX_PADDING_DIGITS + meter.measure(args) + meter.measure(kwargs)))
    return text.format(*args, **kwargs)
