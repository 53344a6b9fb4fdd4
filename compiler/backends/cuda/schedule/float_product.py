"""Products that no tile computes, such as that of a router, whose weights are f32. A block reads few rows and few columns, and computes
all elements in which they meet. So each row and each column is read fewer times than if each block computed one element.

    for block b in tiles {
      for thread t { for each element of the tile: sum the products of elements t, t + THREADS, ... along k }
      combine the sums of the threads, first those that are a warp apart, then by halves
    }

With at most FEW rows, a tile has one element, so that many blocks read the weights in parallel. The order of each sum depends only on its
length, not on the tile or on other rows. The number of threads of a block is the largest number in THREADS that divides this length. With
each number in THREADS, the sums fit the shared memory of every GPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce

from compiler.backends.cuda.schedule.hold import at_once
from compiler.backends.cuda.schedule.rows import WARP, combination, folded_warp
from compiler.idioms.product import Product, is_loaded, product_in
from compiler.idioms.spatial import write_element
from compiler.ir.dims import Dim, DimVar, ceil_div, dim_max, dim_min
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Contraction
from compiler.ir.loops.statements import Store
from compiler.ir.loops.visit import map_scalar, rewrite_dims
from compiler.ir.loops.write import Kernel, less
from compiler.ir.prove import prove_le

THREADS = (128, 64, 32)  # numbers of threads of a block, the best first
FEW = 8  # maximum number of rows for which a tile has one element
AT_ONCE = 16  # maximum number of elements of rows, and of columns, that a thread loads at once
TILE = 8  # number of rows and of columns of a tile for more than FEW rows
PITCH = 1  # padding in floats between the sums of two elements in shared memory, so that threads that read them use different banks

Point = dict[DimVar, Dim]


def schedule_float_product(prim: PrimFunc) -> PrimFunc | None:
    """Schedule a product with one sum whose columns are loaded from one matrix, if the length of the sum and the number of columns are
    constant. Return None for any other nest, if the length is 0, and if no number in THREADS divides the length."""
    product = product_in(prim)
    if product is None or product.choice is not None or product.row_axis is None or len(product.nest.axes) != 2:
        return None
    extents = product.extent, product.num_columns
    if len(product.sums) != 1 or not all(e.is_const for e in extents) or not is_loaded(product.sums[0].columns):
        return None
    threads = next((n for n in THREADS if product.extent.const % n == 0), None)
    if not product.extent.const or threads is None:
        return None
    k = Kernel()
    _Blocks(k, product, threads).write()
    return PrimFunc(prim.params, prim.num_outputs, k.body(), {**prim.attrs, "schedule": "float product"})


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Writes the kernel of a product, with blocks of `threads` threads."""

    k: Kernel
    product: Product[Contraction]
    threads: int

    def write(self) -> None:
        """Write the kernel: tiles of one element if there are few rows, otherwise tiles of TILE rows and columns (`is_many` is 0 or 1)."""
        k, ((_, num_rows), (_, num_columns)) = self.k, self.product.nest.axes
        few_only = prove_le(num_rows, FEW)
        is_many = dim_min(1, num_rows // (FEW + 1))
        few_blocks = dim_min(num_rows, FEW) * num_columns * (1 - is_many)
        columns = ceil_div(num_columns, TILE)
        with k.grid("b", few_blocks if few_only else dim_max(few_blocks, ceil_div(num_rows, TILE) * columns)) as b:
            with nullcontext() if few_only else k.when(less(num_rows, FEW + 1) & less(b, few_blocks)):
                row, column = k.unravel(b, [("row", num_rows), ("column", num_columns)])
                self.write_tile(row, column, 1)
            if not few_only:
                with k.when(less(FEW, num_rows) & less(b, ceil_div(num_rows, TILE) * columns)):
                    row, column = k.unravel(b, [("rows", ceil_div(num_rows, TILE)), ("columns", columns)])
                    self.write_tile(row * TILE, column * TILE, TILE)

    def write_tile(self, row: Dim, column: Dim, size: int) -> None:
        """Write code that computes `size` rows and columns. Rows and columns after the last one are not stored."""
        k, (s,), count = self.k, self.product.sums, size * size
        (row_axis, num_rows), (column_axis, num_columns) = self.product.nest.axes
        combine, ((axis, extent),) = combination(s.fold), s.axes
        pitch, trips = self.threads + PITCH, extent.const // self.threads
        group = at_once(trips, AT_ONCE // size)  # number of products of each sum whose factors a thread loads at once
        sums = k.shared("sums", count * pitch)
        rows = [k.let("row", dim_min(row + i, num_rows - 1), num_rows - 1) for i in range(size)]
        columns = [k.let("column", dim_min(column + i, num_columns - 1), num_columns - 1) for i in range(size)]
        with k.threads("t", self.threads) as t:
            found = k.local("found", size, size)
            with k.unroll("i", size) as i, k.unroll("j", size) as j:
                found[i, j] = 0.0
            with k.serial("m", trips // group) as m:
                left, right = k.local("left", group, size), k.local("right", group, size)
                for u in range(group):
                    at = {axis: (m * group + u) * self.threads + t}
                    for n in range(size):
                        left[u, n] = rewrite_dims(s.rows, {**at, row_axis: rows[n]})
                        right[u, n] = rewrite_dims(s.columns, {**at, column_axis: columns[n]})
                with k.unroll("u", group) as u, k.unroll("i", size) as i, k.unroll("j", size) as j:
                    found[i, j] = combine(found[i, j], left[u, i] * right[u, j])
            with k.unroll("i", size) as i, k.unroll("j", size) as j:
                sums[(i * size + j) * pitch + t] = found[i, j]
        if self.threads > WARP:
            with k.threads("t", self.threads) as t, k.serial("m", ceil_div(count * WARP, self.threads)) as m:
                number = m * self.threads + t
                with k.when(less(number, count * WARP)) if count * WARP % self.threads else nullcontext():
                    first = k.let("first", number // WARP * pitch + number % WARP, count * pitch - 1)
                    sums[first] = reduce(combine, (sums[first + n] for n in range(0, self.threads, WARP)))
        with k.threads("t", count) as t:
            i, j = row + t // size, column + t % size
            with k.when(less(i, num_rows) & less(j, num_columns)):
                total = folded_warp(k, (sums[t * pitch + n] for n in range(WARP)), combine)
                point: Point = {row_axis: i, column_axis: j}
                store = self.product.nest.store
                value = map_scalar(store.value, lambda scalar: total if scalar is s else scalar)
                write_element(k, Store(store.buffer, store.indices, value), point)
