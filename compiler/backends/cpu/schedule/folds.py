"""Folds of what vector lanes hold. Extents are powers of two, and nothing else decides the order of a fold."""

from __future__ import annotations

from collections.abc import Callable

from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, halvings, select


def fold_halves(k: Kernel, array: Array, combine: Callable[[Scalar, Scalar], Scalar]) -> None:
    """Fold a local array into its first element, upper halves onto lower ones: its rows, if it has any, then lanes of the first row."""
    *rows, width = (extent.const for extent in array.shape)
    for half in halvings(rows[0] if rows else 1):
        for row in range(half):
            with k.vector(width) as lane:
                array[row, lane] = combine(array[row, lane], array[row + half, lane])
    first_row = (0,) * len(rows)
    for half in halvings(width):
        with k.vector(half) as lane:
            array[*first_row, lane] = combine(array[*first_row, lane], array[*first_row, lane + half])


def spread_largest(k: Kernel, array: Array) -> None:
    """Put the largest element into every lane: each step compares an element with the one `distance` lanes on, around the end."""
    width = array.shape[0].const
    for distance in halvings(width):
        with k.vector(width) as lane:
            array[lane] = larger(array[lane], array[(lane + distance) % width])


def larger(a: Scalar, b: Scalar) -> Scalar:
    """The maximum in one instruction, unlike `maximum`. It may lose a NaN; exp(NaN - maximum) brings the NaN back."""
    return select(a < b, b, a)
