"""Compute several values before any of them is used, so that their loads from global memory are in flight together. The assembler does not
move a load over a store, and often not over the use of another load."""

from __future__ import annotations

from collections.abc import Iterable

from compiler.ir.loops.scalars import Scalar, dtype_of
from compiler.ir.loops.write import Kernel

AT_ONCE = 8  # maximum number of values for which a thread is given registers, unless a schedule states another number


def hold(k: Kernel, values: Iterable[Scalar]) -> list[Scalar]:
    """Compute values of one type, at least one, and return loads of the registers that hold them."""
    found = list(values)
    held = k.local("held", len(found), dtype=dtype_of(found[0]))
    for number, value in enumerate(found):
        held[number] = value
    return [held[number] for number in range(len(found))]


def at_once(count: int, most: int = AT_ONCE) -> int:
    """Return the largest number up to `most` that divides `count`."""
    return next(n for n in range(min(count, most), 0, -1) if count % n == 0)
