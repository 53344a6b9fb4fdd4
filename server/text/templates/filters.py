"""Define the filters and tests that a template may use. The meter counts those that may take long or make large values.

The table is closed: a filter of Jinja that is not listed does not exist here. No filter returns `Markup`, whose methods are Python code
that the sandbox could not see; `e` and `escape` return plain text, and `safe` only converts a value to text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import jinja2.filters
import jinja2.tests
import markupsafe
from jinja2.runtime import Context, Undefined
from jinja2.utils import pass_context

from server.text.templates.meter import ITEM_BYTES, Meter, TemplateLimit, check_key, meter_of
from server.text.templates.metered_text import call_text, format_percent, items_of, num_lines

# Jinja's own tables, declared here without exact signatures
FILTERS: Mapping[str, Callable[..., Any]] = jinja2.filters.FILTERS
TESTS: Mapping[str, Callable[..., Any]] = jinja2.tests.TESTS

MAX_ATTRIBUTE_PARTS = 16  # most parts, between dots and commas, of an attribute such as "a.b.c", which is looked up for every item

# fmt: off
SCALAR_FILTERS = ("abs", "count", "d", "default", "float", "int", "length")  # examine a single value
ITEM_FILTERS = ("first", "items", "last", "map", "reject", "rejectattr", "reverse", "select", "selectattr")  # read each item
COMPARING_FILTERS = ("dictsort", "groupby", "max", "min", "sort")  # read each item, and compare items
SHALLOW_TESTS = (  # examine a single value, not those within it
    "boolean", "callable", "defined", "false", "float", "integer", "iterable",
    "mapping", "none", "number", "sameas", "sequence", "string", "true", "undefined",
)
DEEP_TESTS = (  # compare nested values, or convert them to text
    "!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower", "lt", "ne", "upper",
)
# fmt: on


def _jinja(function: Callable[..., Any], *, by_item: bool = False, deep: bool = False) -> Callable[..., Any]:
    """Return Jinja's `function` with metering. `by_item`: the function reads each item of its value. `deep`: the function compares nested
    values or converts them to text. An attribute of the function says which first argument Jinja passes to it, such as the context. The
    metered function always gets the context, and passes on the argument that the original expects."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    def metered(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = meter_of(context)
        meter.step()
        if deep:
            num_keys = 1 + sum(arg.count(",") for arg in (*args, *kwargs.values()) if isinstance(arg, str))  # one per attribute
            meter.charge(num_keys * sum(map(meter.measure, (value, *args, *kwargs.values()))))
        if by_item:
            _check_attributes((*args, *kwargs.values()))
            if deep or not isinstance(value, dict | str | Undefined):
                value = value if isinstance(value, dict) else items_of(meter, value)
        lead = {"context": (context,), "environment": (context.environment,), "eval_context": (context.eval_ctx,)}
        result = function(*lead.get(wanted or "", ()), value, *args, **kwargs)
        if by_item and hasattr(result, "__next__"):
            return items_of(meter, result)  # a list, because a generator cannot be measured before its use
        if by_item or isinstance(result, int):
            meter.charge_value(result)
        return result

    return metered


def _check_attributes(args: tuple[Any, ...]) -> None:
    """Raise TemplateLimit if an argument is an attribute with too many parts."""
    for arg in args:
        if isinstance(arg, str) and arg.count(".") + arg.count(",") >= MAX_ATTRIBUTE_PARTS:
            raise TemplateLimit(f"the attribute {arg!r:.40} has more than {MAX_ATTRIBUTE_PARTS} parts")


# --- text ------------------------------------------------------------------------------------------------------------------


def _text(meter: Meter, value: Any) -> str:
    """Convert a value to text, as Jinja does."""
    if isinstance(value, str):
        return value
    meter.charge(10 * meter.measure(value))  # repr() may write 10 characters for one character
    return str(value)


def _method(name: str) -> Callable[..., Any]:
    """Return a filter that calls the method `name` of `str`."""

    @pass_context
    def metered(context: Context, value: Any, /, *args: Any) -> Any:
        meter = meter_of(context)
        return call_text(meter, name, _text(meter, value), tuple(arg for arg in args if arg is not None), {})

    return metered


@pass_context
def _string(context: Context, value: Any, /) -> str:
    """The filters `string` and `safe`: return the value as text."""
    return _text(meter_of(context), value)


@pass_context
def _escape(context: Context, value: Any, /) -> str:
    """The filter `escape`: return the text with HTML's special characters escaped."""
    meter = meter_of(context)
    text = _text(meter, value)
    meter.charge(5 * len(text))  # the longest escape, &#39;, has 5 characters
    return str(markupsafe.escape(text))


@pass_context
def _title(context: Context, value: Any, /) -> str:
    """The filter `title`: let each word begin with a capital letter."""
    meter = meter_of(context)
    text = _text(meter, value)
    meter.charge(50 * len(text))  # Jinja's filter makes a string of each word
    return FILTERS["title"](text)


@pass_context
def _trim(context: Context, value: Any, /, chars: str | None = None) -> str:
    """The filter `trim`: remove white space, or the characters in `chars`, at both ends."""
    meter = meter_of(context)
    return call_text(meter, "strip", _text(meter, value), () if chars is None else (chars,), {})


@pass_context
def _replace(context: Context, value: Any, /, old: Any, new: Any, count: int | None = None) -> str:
    """The filter `replace`: replace `old` by `new`, at most `count` times."""
    meter = meter_of(context)
    args = (_text(meter, old), _text(meter, new), *(() if count is None else (count,)))
    return call_text(meter, "replace", _text(meter, value), args, {})


@pass_context
def _truncate(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> str:
    """The filter `truncate`: shorten the text."""
    meter = meter_of(context)
    text = _text(meter, value)
    meter.charge(2 * len(text))
    return FILTERS["truncate"](context.environment, text, *args, **kwargs)


@pass_context
def _indent(context: Context, value: Any, /, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """The filter `indent`: put `width` spaces, or the text `width`, before each line."""
    meter = meter_of(context)
    text = _text(meter, value)
    one = len(width) if isinstance(width, str) else int(width)
    meter.charge(4 * len(text) + num_lines(text) * (ITEM_BYTES + 4 * max(one, 0)))
    return FILTERS["indent"](text, width, first, blank)


@pass_context
def _format(context: Context, value: Any, /, *args: Any, **kwargs: Any) -> str:
    """The filter `format`: return `value % args`."""
    meter = meter_of(context)
    return format_percent(meter, _text(meter, value), kwargs or args)


@pass_context
def _join(context: Context, value: Any, /, d: Any = "", attribute: str | int | None = None) -> str:
    """The filter `join`: return the items, or an attribute of each, with `d` between them."""
    meter = meter_of(context)
    if attribute is not None:
        value = context.environment.call_filter("map", value, kwargs={"attribute": attribute}, context=context)
    texts = [_text(meter, item) for item in items_of(meter, value)]
    return call_text(meter, "join", _text(meter, d), (texts,), {})


@pass_context
def _tojson(
    context: Context,
    value: Any,
    /,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`: return JSON in the form that models were trained on. Jinja's own filter escapes JSON for HTML. Raise
    TemplateLimit if the indentation or the separators are too long."""
    meter = meter_of(context)
    meter.charge(meter.measure(value))
    if indent is not None and not 0 <= indent <= 16:
        raise TemplateLimit(f"tojson indents by {indent}; 0 to 16 are allowed")
    if separators is not None:
        meter.measure(separators)
        if sum(map(len, separators)) > 16:
            raise TemplateLimit("tojson has separators of more than 16 characters")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, allow_nan=True)
    if indent is None:
        text = encoder.encode(value)
        meter.charge(len(text))
        return text
    parts: list[str] = []
    # the indentation of a deep value can exceed everything else, so each part is counted as it is made
    for part in encoder.iterencode(value):
        meter.charge(len(part))
        parts.append(part)
    return "".join(parts)


# --- values ----------------------------------------------------------------------------------------------------------------


@pass_context
def _attr(context: Context, value: Any, /, name: str) -> Any:
    """The filter `attr`: return an attribute, or an undefined value if the environment does not allow it."""
    return context.environment.attribute(value, name)  # type: ignore[attr-defined]  # defined by our environment


@pass_context
def _list(context: Context, value: Any, /) -> list[Any]:
    """The filter `list`: return the items as a list."""
    meter = meter_of(context)
    items = items_of(meter, value)
    meter.charge_value(items)
    return list(items)


@pass_context
def _unique(context: Context, value: Any, /, case_sensitive: bool = False, attribute: str | int | None = None) -> list[Any]:
    """The filter `unique`: return the items without repetitions, compared by an attribute if one is given."""
    meter = meter_of(context)
    items = items_of(meter, value)
    keys = items if attribute is None else context.environment.call_filter("map", items, kwargs={"attribute": attribute}, context=context)
    for key in keys:
        meter.charge(meter.measure(key))
        if not isinstance(key, Undefined):
            check_key(key)
    return items_of(meter, FILTERS["unique"](context.environment, items, case_sensitive, attribute))


@pass_context
def _sum(context: Context, value: Any, /, attribute: str | int | None = None, start: Any = 0) -> Any:
    """The filter `sum`: add the items, or an attribute of each. Raise TemplateLimit if `start` is no number."""
    if not isinstance(start, int | float):
        raise TemplateLimit("sum adds numbers only")
    _check_attributes((attribute,))
    meter = meter_of(context)
    result = FILTERS["sum"](context.environment, items_of(meter, value), attribute, start)
    meter.charge_value(result)
    return result


@pass_context
def _round(context: Context, value: float, /, precision: int = 0, method: Any = "common") -> float:
    """The filter `round`. Raise TypeError if the value is no number, or TemplateLimit for more than 100 digits."""
    value = _number(value)
    if abs(precision) > 100:
        raise TemplateLimit(f"round() to {precision} digits; at most 100 are allowed")
    return FILTERS["round"](value, precision, method)


def metered_filters() -> dict[str, Callable[..., Any]]:
    """Return all filters by name."""
    table = {name: _jinja(FILTERS[name]) for name in SCALAR_FILTERS}
    table |= {name: _jinja(FILTERS[name], by_item=True) for name in ITEM_FILTERS}
    table |= {name: _jinja(FILTERS[name], by_item=True, deep=True) for name in COMPARING_FILTERS}
    table |= {name: _method(name) for name in ("capitalize", "lower", "upper")}
    table |= {"e": _escape, "escape": _escape, "forceescape": _escape, "safe": _string, "string": _string, "title": _title}
    table |= {"trim": _trim, "replace": _replace, "truncate": _truncate, "indent": _indent, "format": _format, "join": _join}
    return table | {"tojson": _tojson, "attr": _attr, "list": _list, "unique": _unique, "sum": _sum, "round": _round}


def _number(value: Any) -> Any:
    """Return a number or an undefined value; raise TypeError for others. With a string, `%` could format to any width, and `*` could repeat
    to any length."""
    if isinstance(value, int | float | Undefined):
        return value
    raise TypeError(f"a {type(value).__name__} is given where a number is expected")


def metered_tests() -> dict[str, Callable[..., Any]]:
    """Return all tests by name."""
    table = {name: _jinja(TESTS[name]) for name in SHALLOW_TESTS}
    table |= {name: _jinja(TESTS[name], deep=True) for name in DEEP_TESTS}
    table |= {"even": lambda value: _number(value) % 2 == 0, "odd": lambda value: _number(value) % 2 == 1}
    return table | {"divisibleby": lambda value, num: _number(value) % _number(num) == 0}
