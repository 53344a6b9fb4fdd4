"""The printer of what both levels share: annotations, ranges, numbers, attributes, and the wrapping of long lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.text.names import DimNames
from compiler.ir.text.syntax import LINE_WIDTH, is_word
from compiler.ir.types import FuncType, ObjectType, ScalarType, ShapeType, TensorType, TupleType, Type

INDENT = "  "


# --- annotations -------------------------------------------------------------------------------------------------------


def type_text(type_: Type, dims: DimNames | None = None) -> str:
    """Print an annotation. `dims` names the symbolic variables; a function type names its own variables."""
    dims = dims or DimNames()
    match type_:
        case ObjectType():
            return "object"
        case ScalarType(dtype=dtype, value=value):
            known = "" if value is None else f", {dims.text(value)}"
            return f"scalar[{dtype or 'any'}{known}]"
        case ShapeType(dims=shape, ndim=ndim):
            return f"shape[{_shape(shape, ndim, dims)}]"
        case TensorType(shape=shape, dtype=dtype, ndim=ndim):
            return f"{dtype or 'any'}[{_shape(shape, ndim, dims)}]"
        case TupleType(fields=fields):
            return f"tuple[{', '.join(type_text(f, dims) for f in fields)}]"
        case FuncType(params=params, result=result, pure=pure):
            own = DimNames(dims.canonical)
            listed = "..." if params is None else ", ".join(type_text(p, own) for p in params)
            result_text = type_text(result, own)
            ranges = ranges_text(own)
            return f"{'' if pure else 'impure '}fn{f'[{ranges}]' if ranges else ''}({listed}) -> {result_text}"


def _shape(shape: tuple[Dim, ...] | None, ndim: int | None, dims: DimNames) -> str:
    if shape is not None:
        return dims_text(shape, dims)
    return "..." if ndim is None else f"ndim={ndim}"


def dims_text(shape: Sequence[Dim], dims: DimNames) -> str:
    return ", ".join(dims.text(d) for d in shape)


def ranges_text(dims: DimNames) -> str:
    """Print the ranges of the free variables that declare one: `n in 1..128, m in 0.. by 16`. The range of a variable comes after the
    ranges of variables that it mentions."""
    done: dict[DimVar, str] = {}

    def visit(var: DimVar) -> None:
        if var in done or is_plain(var):
            return
        if isinstance(var.upper, Dim):
            for other in var.upper.vars():
                visit(other)
        done[var] = f"{dims.variable(var)} in {range_text(var, dims)}"

    for var in dims.free:  # the list grows when an upper end mentions a new variable
        visit(var)
    return ", ".join(done.values())


def is_plain(var: DimVar) -> bool:
    """Return whether the variable has the range that the text need not state: all integers from 0."""
    return var.lower == 0 and var.upper is None and var.multiple_of == 1


def range_text(var: DimVar, dims: DimNames) -> str:
    upper = "" if var.upper is None else dims.text(Dim.of(var.upper))
    return f"{var.lower}..{upper}" + (f" by {var.multiple_of}" if var.multiple_of > 1 else "")


# --- literals and attributes -------------------------------------------------------------------------------------------


def canonical_number(value: float | int | bool, dtype: DType) -> float | int | bool:
    """Return the number as a Python bool, float or int, as its element type demands. A number for an integer type that is not an integer is
    returned unchanged, and an integer may be outside the range of its type; the verifier reports both."""
    if dtype is DType.BOOL:
        return bool(value)
    if dtype.is_float:
        return float(value)
    return int(value) if value == value and abs(value) != float("inf") and value == int(value) else value


def number_text(value: float | int | bool, dtype: DType) -> str:
    number = canonical_number(value, dtype)
    if isinstance(number, bool):
        return "true" if number else "false"
    return repr(number) if dtype in (DType.F32, DType.I64) else f"{number!r}:{dtype}"


def attribute_text(name: str, value: Any, dims: DimNames) -> str:
    return f"{name if is_word(name) else json.dumps(name)}={_value_text(name, value, dims)}"


def attributes_text(attrs: Mapping[str, Any], dims: DimNames) -> str:
    return ", ".join(attribute_text(name, attrs[name], dims) for name in sorted(attrs))


def _value_text(name: str, value: Any, dims: DimNames) -> str:
    """Print the value of an attribute. `name` names the attribute in the TypeError for a value that the text cannot express."""
    match value:
        case None:
            return "none"
        case np.generic():
            return _value_text(name, value.item(), dims)
        case bool():
            return "true" if value else "false"
        case DType():
            return value.value
        case str():
            return json.dumps(str(value))
        case int():
            return repr(int(value))  # a member of an IntEnum prints as a number, too
        case float():
            return repr(float(value))
        case Dim() | DimVar():
            return f"dim({dims.text(Dim.of(value))})"
        case list() | tuple():
            return f"[{', '.join(_value_text(name, v, dims) for v in value)}]"
        case _:
            raise TypeError(
                f"attribute {name} is {value!r}, a {type(value).__name__}; expected None, bool, int, float, str, DType, Dim, "
                "or a list of these"
            )


def function_name(name: str) -> str:
    """Print the name of a function, in quotes if it is not a word."""
    return name if is_word(name) else json.dumps(name)


# --- lines -------------------------------------------------------------------------------------------------------------


def wrap(line: str, depth: int) -> list[str]:
    """Indent the line, and break it at spaces if it has more than LINE_WIDTH columns. A break is never inside a string, and inside as few
    brackets as possible if the line is at least half full. A line without a space to break at stays too long. The lines after a break are
    indented by two more levels."""
    indent = INDENT * depth
    lines: list[str] = []
    room = LINE_WIDTH - len(indent)
    while len(line) > room and (cut := _cut(line, room)):
        lines.append(indent + line[:cut])
        line = line[cut + 1 :]
        indent = INDENT * (depth + 2)
        room = LINE_WIDTH - len(indent)
    return [*lines, indent + line]


def _cut(line: str, room: int) -> int:
    """Return the index of the space at which to break, or 0 if there is none. If no space is within `room`, return the first space
    beyond."""
    best, best_key = 0, (0, 0, 0)
    depth, in_string, escaped = 0, False, False
    for i, char in enumerate(line):
        if i > room and best:
            break
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == " " and i:
            # Prefer a filled line, then few enclosing brackets, then a preceding comma, then the last place.
            key = (int(i > room // 2), -depth, int(line[i - 1] == ","))
            if not best or key >= best_key:
                best, best_key = i, key
    return best
