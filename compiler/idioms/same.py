"""Compare expressions of one function, up to the names of reduction axes."""

from __future__ import annotations

from typing import Any

from compiler.ir.dims import Dim, DimVar
from compiler.ir.fields import Holds, all_names, items, parts
from compiler.ir.loops.scalars import Const, Scalar, ScalarParam


def same_scalar(a: Scalar, b: Scalar) -> bool:
    """Whether both expressions are equal, up to the names of reduction axes. Buffers and other variables must be the same objects."""
    return a is b or _same(a, b, {}, set())


def _same(a: Scalar, b: Scalar, renamed: dict[DimVar, Dim], known: set[tuple[Scalar, Scalar]]) -> bool:
    """Compare two scalars. `renamed` maps axes of `b` to axes of `a`. `known` holds the pairs that were compared before under the same
    mapping. These pairs are equal, because the first difference ends the whole comparison."""
    if (a, b) in known:
        return True
    known.add((a, b))
    if type(a) is not type(b) or isinstance(a, ScalarParam):
        return a is b
    if isinstance(a, Const) and isinstance(b, Const):
        return repr(a.value) == repr(b.value) and a.dtype is b.dtype  # -0.0 differs from 0.0, and a NaN equals itself

    def dims(x: tuple[Dim, ...], y: tuple[Dim, ...]) -> bool:
        return len(x) == len(y) and all(d == (e.substitute(renamed) if renamed else e) for d, e in zip(x, y, strict=True))

    axes, others = items(a, Holds.NEW_AXES), items(b, Holds.NEW_AXES)
    if not (_data(a) == _data(b) and items(a, Holds.BUFFER) == items(b, Holds.BUFFER) and dims(items(a, Holds.DIM), items(b, Holds.DIM))):
        return False
    if not dims(tuple(e for _, e in axes), tuple(e for _, e in others)):
        return False
    if axes:
        renamed = {**renamed, **{w: Dim.of(v) for (v, _), (w, _) in zip(axes, others, strict=True)}}
        known = set()
    inner, theirs = items(a, Holds.SCALAR), items(b, Holds.SCALAR)
    return len(inner) == len(theirs) and all(_same(x, y, renamed, known) for x, y in zip(inner, theirs, strict=True))


def _data(scalar: Scalar) -> list[Any]:
    """Return the fields that are plain data: functions and element types."""
    named = {p.name for p in parts(type(scalar))}
    return [getattr(scalar, name) for name in all_names(type(scalar)) if name not in named]
