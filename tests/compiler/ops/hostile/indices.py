"""Hostile values for operands whose elements are indices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compiler.ir.op import OPS
from compiler.ops.indices import Treatment
from compiler.ops.tables import INDICES, OPERANDS

INT32, INT64 = np.iinfo(np.int32), np.iinfo(np.int64)
REFUSED = 0.2  # probability of a bad index where it is checked: the call is then refused, so it shows nothing about the other operands


def bad(limits: np.iinfo[Any], bound: int) -> list[int]:
    """Return the integers of a type that lie at or beyond the ends of 0 .. `bound` - 1, far outside of it, or at the ends of types."""
    near = [-16, -1, 0, bound - 1, bound, bound + 1]
    far = [-1000, bound + 1000, int(INT32.min), int(INT32.max), 1 << 32, int(limits.min), int(limits.min) + 1, int(limits.max)]
    return [n for n in near + far if limits.min <= n <= limits.max]


def overwrite(array: Any, bound: int, rng: np.random.Generator) -> None:
    """Replace 30 % of the indices in 0 .. `bound` - 1 by numbers of `bad`, and 20 % by any numbers of the type."""
    limits, kind = np.iinfo(array.dtype), rng.random(array.shape)
    wrong = rng.choice(np.array(bad(limits, bound), array.dtype), array.shape)
    strange = rng.integers(limits.min, limits.max, array.shape, array.dtype, endpoint=True)
    array[...] = np.where(kind < 0.3, wrong, np.where(kind < 0.5, strange, array))


def hostile(op: str, values: tuple[Any, ...], attrs: Mapping[str, Any], rng: np.random.Generator) -> tuple[Any, ...]:
    """Return the operands of a call with bad indices in all places that `INDICES` declares."""
    found = dict(zip(OPERANDS[op], values, strict=False))
    shapes = {name: np.shape(value) for name, value in found.items()}
    for name, declared in INDICES[op].items():
        if name not in found:
            continue
        bound = declared.bound_of(shapes, {**OPS[op].attributes, **attrs})
        if declared.treatment is Treatment.CHECKED:
            if rng.random() < REFUSED:
                found[name] = int(rng.choice(bad(INT64, bound)))
            continue
        array = found[name].copy()
        for column, most in bound.items() if isinstance(bound, dict) else [(None, bound)]:
            overwrite(array if column is None else array[:, column], most, rng)
        found[name] = array
    return (*found.values(), *values[len(found) :])
