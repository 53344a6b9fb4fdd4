"""Reductions of arrays: across rows of vectors, and across the lanes of a vector. The numbers of rows and of lanes are powers of two, and
determine the order of a reduction."""

from __future__ import annotations

from collections.abc import Callable

from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, halvings, select


def fold_halves(k: Kernel, array: Array, combine: Callable[[Scalar, Scalar], Scalar]) -> None:
    """Reduce a local array to its first element, by combining its upper half with its lower half again and again: first whole rows, then
    the lanes of the first row. The array has one or two axes, and its elements are overwritten."""
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
    """Put the largest element of a vector into every lane. Each step compares each element with the one `distance` lanes after it,
    cyclically."""
    width = array.shape[0].const
    for distance in halvings(width):
        with k.vector(width) as lane:
            array[lane] = larger(array[lane], array[(lane + distance) % width])


def larger(a: Scalar, b: Scalar) -> Scalar:
    """Return the larger number, with one instruction where `maximum` needs several. The comparison may drop a NaN x, but in a softmax exp(x
    - maximum) is NaN again."""
    return select(a < b, b, a)
