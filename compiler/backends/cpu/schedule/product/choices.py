"""Blocks of adjacent rows that choose the same matrix, such as tokens with the same expert.

One thread cuts the rows into blocks before the product begins. A row has the same bits wherever the cuts are, so rows may be in any order.
The number of blocks is smallest if rows with equal choices are adjacent.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from compiler.backends.cpu.schedule.product.tile_origin import Point
from compiler.idioms.product import AnyProduct, Choice
from compiler.ir.dims import Dim, DimVar, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.visit import rewrite_dims
from compiler.ir.loops.write import Array, Kernel, cast, equal, guard, index, less

I64, I32, BOOL = DType.I64, DType.I32, DType.BOOL


@contextmanager
def chosen_blocks(k: Kernel, product: AnyProduct, most_rows: int, groups: Dim) -> Generator[tuple[Point, Dim, Dim, Dim]]:
    """Loop over blocks of at most `most_rows` rows with the same choice, and over all groups of panels for each block. Yield the choice of
    the block, its first row, the end of its rows, and the number of a group."""
    assert product.choice is not None and product.row_axis is not None
    row, names = product.row_axis, product.choice.names
    num_rows = dict(product.nest.axes)[row]
    begins = k.workspace("begins", num_rows + 1, dtype=I32)
    count = k.workspace("count", 1, dtype=I32)
    _cut(k, product.choice, row, num_rows, most_rows, begins, count)
    # If equal choices are adjacent, there are at most `usual` blocks. If there are more blocks, an iteration computes several of them.
    usual = dim_max(dim_min(num_rows, num_rows // most_rows + _num_matrices(names[0], num_rows)), 1)
    with k.parallel("p", usual * groups) as p:
        start, group = k.unravel(p, [("start", usual), ("group", groups)])
        num_blocks = k.let("blocks", cast(count[0], I64), num_rows)
        with k.serial("again", ceil_div(dim_max(num_blocks - start, 0), usual)) as again:
            block = k.let("block", start + again * usual, num_rows - 1)
            first = k.let("first", cast(begins[block], I64), num_rows - 1)
            end = k.let("end", cast(begins[block + 1], I64), num_rows)
            chosen = rewrite_dims(product.choice.index, {row: first})
            chosen = k.let(names[0].name, chosen, names[0].upper, lower=names[0].lower)
            yield dict.fromkeys(names, chosen), first, end, group


def _num_matrices(name: DimVar, num_rows: Dim) -> Dim:
    """Return how many different choices there can be: the number of matrices, or the number of rows if the number of matrices is not
    known."""
    return num_rows if name.upper is None else Dim.of(name.upper) + 1


def _cut(k: Kernel, choice: Choice, row: DimVar, num_rows: Dim, most_rows: int, begins: Array, count: Array) -> None:
    """Cut the rows into blocks of equal choice. Write the first row of each block to `begins`, followed by the number of rows, where the
    last block ends. Write the number of blocks to `count`."""

    def chosen(j: Dim) -> Scalar:
        return cast(rewrite_dims(choice.index, {row: j}), I64)

    with k.serial("once", 1):
        count[0] = 0
        with k.serial("j", num_rows) as j:
            found = k.let("found", cast(count[0], I64), num_rows)
            begun = k.let("begun", guard(1, found, num_rows + 1, cast(begins[found - 1], I64), 0), num_rows)
            goes_on = guard(1, j, num_rows, equal(chosen(j), chosen(j - 1)), False)
            with k.when(~goes_on | less(most_rows - 1, j - begun)):
                begins[found] = cast(index(j), I32)
                count[0] = cast(index(found + 1), I32)
        found = k.let("found", cast(count[0], I64), num_rows)
        begins[found] = cast(index(num_rows), I32)
