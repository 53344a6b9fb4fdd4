"""Products of matrices on tensor cores.

    for block b {
      shared c
      the block multiplies its columns by its rows: tile -> c
      for thread t { the epilogue of its elements of c }
    }

For few rows, a block computes all rows and few columns (a narrow tile, which has NARROW columns), so that many blocks read the weights in
parallel. The block uses the tile with the fewest rows that suffice. For more rows, a block computes a wide tile of many rows and, where
registers allow, more columns. Wide tiles may be computed in clusters, whose blocks compute the same columns for adjacent rows. Products
with very few or very many columns have a tile of their own for few rows (`thin`, `lone_size`). Every tile sums in the same order, so the
bits of a row do not depend on other rows. The tiles of a target, their heights and the formats of weights are in
compiler/machine/products.py.

If each row chooses one of several matrices, a block computes runs: adjacent rows with the same choice. A run does not cross a multiple of
the height of the highest tile. A block gets some adjacent rows, and computes the runs that begin at these rows. It gets one row if there
are few rows, otherwise the average number of rows that choose the same matrix, so that few blocks have nothing to do. The number of runs is
smallest if rows with equal choices are adjacent.

If further stages read the product's elements (branches.py), these stages replace the epilogue.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from compiler.backends.cuda.schedule.branches import Branch, read_branches
from compiler.backends.cuda.schedule.epilogue import BranchWriter, Rows, StoreWriter, Writer
from compiler.backends.cuda.schedule.hold import at_once
from compiler.backends.cuda.schedule.rows import fold_threads
from compiler.idioms.nest import without_allocations
from compiler.idioms.product import Choice, Product, product_in
from compiler.idioms.scaled import scaled_numbers
from compiler.idioms.spatial import stages
from compiler.ir.dims import Dim, DimVar, ceil_div, dim_max, dim_min, product_of
from compiler.ir.dtypes import DType
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Contraction, Element, Load, Scalar, without_cast
from compiler.ir.loops.visit import map_scalar, rewrite_dims
from compiler.ir.loops.write import Array, Kernel, cast, const, equal, index, less, minimum, not_equal, select
from compiler.ir.prove import prove_divisible, prove_le
from compiler.machine.intrinsics.block_product import EIGHT, NARROW, BlockProduct
from compiler.machine.products import ProductTile, ProductTiles

MOST_SUMS = 2  # maximum number of sums of a product
MANY_COLUMNS = 264 * NARROW  # number of columns of all matrices above which narrow tiles are too many blocks to run at once
FEW_COLUMNS = 66 * NARROW  # maximum number of columns of a product whose narrow tiles occupy at most half of the multiprocessors
# The same for weights of 16 bits, in kernels with wide tiles: with more columns, thin tiles, which copy rows twice as often as narrow
# tiles, are slower.
FEW_BF16_COLUMNS = FEW_COLUMNS // 2
# Maximum number of arguments of a kernel, of two registers each, that leave registers for the values that all tiles compute from a thread's
# number.
MOST_ARGUMENTS = 8
ALIGNED = 8  # number of elements of a row that a lane copies at once
ZERO = Dim.of(0)

Point = Mapping[DimVar, Dim]


def schedule_product(prim: PrimFunc, tiles: ProductTiles) -> PrimFunc | None:
    """Schedule a product of matrices, with the stages that read its elements. Return None for any other nest, if no tile fits the product,
    and if a further stage is not a branch of the product, or reads pairs of columns that no tile has together."""
    first, *others = stages(without_allocations(prim.body)[1])
    product = product_in(replace(prim, body=first))
    if product is None or product.row_axis is None or len(product.sums) > MOST_SUMS:
        return None
    branches = read_branches(product, others) if others else ()
    if branches is None:
        return None
    for tile in tiles.tiles:
        operands = [_operands(s, product.row_axis, tile) for s in product.sums]
        found = [o for o in operands if o is not None]
        if len(found) == len(operands) and len({o.alike for o in found}) == 1:
            k, blocks = Kernel(), _Blocks(product, tile, tuple(found), branches, len(prim.buffers) + len(prim.dim_vars))
            if not blocks.fit_pairs:
                return None
            if product.choice is None:
                blocks.write(k)
            else:
                blocks.write_chosen(k, product.choice)
            return PrimFunc(prim.params, prim.num_outputs, k.body(), {**prim.attrs, "schedule": "product"})
    return None


@dataclass(frozen=True, slots=True)
class _Operands:
    """The operands of one sum, each as the load of an element."""

    rows: Load
    weights: Load  # weights in packed panels
    scale: Load | None  # None: weights have no scales
    group: int  # number of elements along k that share a scale; without scales, the length of the sum

    @property
    def alike(self) -> Hashable:
        """The properties that must be equal for all sums of a product."""
        scale = None if self.scale is None else self.scale.buffer.dtype
        return self.rows.buffer, self.rows.indices[:-1], self.group, scale


def _operands(s: Contraction, row_axis: DimVar, tile: ProductTile) -> _Operands | None:
    """Return the operands of a sum. Return None if its length is not constant, if its columns are not packed for the tile, or if the tile
    cannot copy its rows."""
    if not s.extent.is_const or not tile.takes_rows(s, row_axis):
        return None
    rows = without_cast(s.rows)
    if not isinstance(rows, Load) or not prove_divisible(rows.buffer.shape[-1], ALIGNED):
        return None
    if (scaled := scaled_numbers(s)) is not None:
        element, scale, group = scaled.number, scaled.scale, scaled.group
    else:
        element, scale, group = without_cast(s.columns), None, s.extent.const
    if not isinstance(element, Element) or element.format is not tile.format or (scale is None) != (tile.format.bits == 16):
        return None
    (weights,) = element.stored
    return _Operands(rows, weights, scale, group) if isinstance(weights, Load) else None


@dataclass(frozen=True, slots=True)
class _Blocks:
    """A product, the kind of tile that multiplies it, and the branches that read its elements."""

    product: Product[Contraction]
    tile: ProductTile
    operands: tuple[_Operands, ...]
    branches: tuple[Branch, ...]
    num_arguments: int  # number of arguments of the kernel

    @property
    def apart(self) -> int:
        """The distance in columns between the two columns of a pair that a branch reads; 0 if no branch reads pairs."""
        return max((b.apart for b in self.branches), default=0)

    @property
    def widest(self) -> tuple[int, int]:
        """The numbers of rows and columns of a block of a product with many rows."""
        return self.shallow(EIGHT, NARROW).widest(in_groups=self.in_groups)

    @property
    def heights(self) -> tuple[int, ...]:
        """The numbers of rows of the narrow tiles."""
        return self.shallow(EIGHT, NARROW).heights(in_groups=self.in_groups)

    @property
    def num_rows(self) -> Dim:
        assert self.product.row_axis is not None
        return dict(self.product.nest.axes)[self.product.row_axis]

    @property
    def in_groups(self) -> bool:
        """Whether a column of weights has several scales, one per group."""
        return self.operands[0].group != self.product.extent.const

    @property
    def fit_pairs(self) -> bool:
        """Whether tiles of every width contain both columns of each pair, or no branch reads pairs. The columns must be whole periods of
        2 * `apart` columns, and each width a multiple or a divisor of a period. A tile that is narrower than a period has two ranges of
        columns, `apart` columns from each other (branches.py)."""
        pair = 2 * self.apart
        whole = self.product.num_columns.is_const and not self.product.num_columns.const % max(1, pair)
        widths = [NARROW, self.widest[1], *([] if self.lone_size is None else self.lone_size[1:])]
        return not pair or (whole and all(not max(w, pair) % min(w, pair) for w in widths))

    @property
    def lone_size(self) -> tuple[int, int] | None:
        """The numbers of rows and columns of the tile that computes few rows, in a product whose narrow tiles would make more blocks than
        can run at once. None for other products. A kernel with this tile needs so many registers that only one of its blocks fits a
        multiprocessor, also while it computes narrow tiles. So this tile is faster than narrow ones even for 9 rows."""
        columns, size = self.product.num_columns, self.shallow(EIGHT, NARROW).lone_size
        is_wide = self.product.choice is None and columns.is_const and columns.const * self.num_sums > MANY_COLUMNS
        return size if is_wide and size is not None and not prove_le(self.num_rows, EIGHT) else None

    @property
    def thin(self) -> BlockProduct | None:
        """The tile with fewer than NARROW columns for up to EIGHT rows of a product whose other tiles would leave at least half of the
        multiprocessors without work. None for other products, and if there is no such tile."""
        p, (operands, *_) = self.product, self.operands
        most = FEW_BF16_COLUMNS if operands.scale is None and self.fills else FEW_COLUMNS
        if self.apart or self.num_sums > 1 or not p.num_columns.is_const or p.num_columns.const > most:
            return None
        return self.op(EIGHT, NARROW).thin(p.extent.const, operands.group)

    def column(self, number: Dim, width: int) -> Dim:
        """Return the first column of the tile with this number."""
        if 2 * self.apart <= width:
            return number * width
        tiles = 2 * self.apart // width
        return number // tiles * (2 * self.apart) + number % tiles * (width // 2)

    @property
    def num_sums(self) -> int:
        return len(self.product.sums)

    @property
    def fills(self) -> bool:
        """Whether a block's registers leave no room for another block: kernels with wide tiles, and those of experts, need too many."""
        return self.product.choice is not None or self.lone_size is not None or not prove_le(self.num_rows, self.heights[-1])

    def op(self, rows: int, columns: int, *, lone: bool = False) -> BlockProduct:
        """Return the tile of this size, with as many steps in a stage as is best. `lone` says whether the size is `lone_size`."""
        return self.shallow(rows, columns).deepened(self.product.extent.const, self.operands[0].group, fills=self.fills, lone=lone)

    def shallow(self, rows: int, columns: int) -> BlockProduct:
        """Return a tile whose stages hold one step each."""
        assert isinstance(self.tile.op, BlockProduct)
        scale = self.operands[0].scale
        wide = scale is not None and scale.buffer.dtype is DType.F32
        apart = self.apart // self.tile.op.panel_columns if 2 * self.apart > columns else 0
        op = replace(self.tile.op, rows=rows, columns=columns, sums=self.num_sums, wide_scales=wide, apart=apart)
        # In products of experts by `mma.sync` with weights of 16 bits, the loop around the tiles needs registers, too.
        is_around = self.product.choice is not None and op.one_shape and op.bits == 16
        return replace(op, hides_thread=is_around or self.num_arguments > MOST_ARGUMENTS)

    def write(self, k: Kernel) -> None:
        """Write the kernel of a product whose rows all have the same matrix. The kernel has the code of every tile that some number of rows
        needs, and chooses by the number of rows."""
        p = self.product
        num_rows, others = self.num_rows, [(v, e) for v, e in p.nest.axes[:-1] if v is not p.row_axis]
        batch = product_of([e for _, e in others])
        heights, (tall, wide) = self.heights, self.widest
        most = heights[-1]
        narrow_blocks = batch * ceil_div(p.num_columns, NARROW)
        few_only = prove_le(num_rows, most)
        cluster = 1 if few_only else self.op(tall, wide).cluster
        row_tiles = ceil_div(num_rows, tall * cluster) * cluster  # number of tiles for all rows, rounded up to whole clusters
        wide_blocks = batch * ceil_div(p.num_columns, wide) * row_tiles
        # Products of more than `few` rows use the widest tile. If this tile is no wider than the narrow tiles, it replaces the highest of
        # them.
        few = most if few_only or wide > NARROW else (0, *heights)[-2]
        thin, size = self.thin, self.lone_size
        lone = None if size is None else self.op(*size, lone=True)
        if lone is not None and not few_only and tall == lone.rows:
            few = tall  # the lone tile computes up to `tall` rows, and the widest tile more
        # Narrow tiles compute these ranges of numbers of rows: more than the first number, and up to the second one.
        least = 0 if thin is None else EIGHT
        ranges = [(least, few)] if lone is None else [(least, EIGHT), (lone.rows, few)]
        ranges = [(low, high) for low, high in ranges if low < high and not prove_le(num_rows, low)]
        narrow = [self.op(h, NARROW) for low, high in ranges for h in heights if low < h <= high]
        tiles = [*([] if thin is None else [thin]), *narrow, *([] if lone is None else [lone])]
        tiles += [] if few_only else [self.op(tall, wide)]
        thin_blocks = ZERO if thin is None else batch * ceil_div(p.num_columns, thin.columns)
        few_blocks = narrow_blocks if thin is None else dim_max(narrow_blocks, thin_blocks * (EIGHT + 1 - dim_max(num_rows, EIGHT)))
        with k.grid("b", few_blocks if few_only else dim_max(ceil_div(few_blocks, cluster) * cluster, wide_blocks)) as b:
            c = k.shared("c", max(tile.shared_bytes for tile in tiles) // 4)
            if thin is not None:
                with k.when(less(num_rows, EIGHT + 1) & less(b, thin_blocks)):
                    at, number = self.unravel(k, b, others, thin.columns)
                    _Place(self, c, at, number * thin.columns, ZERO, num_rows).write(k, thin)
            for low, high in ranges:
                fits = less(num_rows, high + 1) if low == 0 else less(low, num_rows) & less(num_rows, high + 1)
                with k.when(fits & less(b, narrow_blocks)):
                    at, number = self.unravel(k, b, others, NARROW)
                    _Place(self, c, at, self.column(number, NARROW), ZERO, num_rows).write_lowest(k, high, low)
            if lone is not None:
                fits = less(EIGHT, num_rows) & less(num_rows, lone.rows + 1)
                with k.when(fits & less(b, batch * ceil_div(p.num_columns, lone.columns))):
                    at, number = self.unravel(k, b, others, lone.columns)
                    _Place(self, c, at, self.column(number, lone.columns), ZERO, num_rows).write(k, lone)
            if not few_only:
                with k.when(less(few, num_rows) & less(b, wide_blocks)):
                    axes = [("columns", ceil_div(p.num_columns, wide)), ("rows", row_tiles)]
                    *point, number, row_tile = k.unravel(b, [*((v.name, e) for v, e in others), *axes])
                    # In 32 bits, the number takes one register instead of two until the result is written.
                    row_tile = k.let("row_tile", cast(cast(index(row_tile), DType.I32), DType.I64), row_tiles - 1)
                    # A block after the last row tile copies weights for its cluster. It computes the last tile again, without writing it.
                    row = row_tile if cluster == 1 else k.let("row", dim_min(row_tile, ceil_div(num_rows, tall) - 1))
                    left = dim_min(num_rows - row * tall, tall)
                    first, at = self.column(number, wide), dict(zip((v for v, _ in others), point, strict=True))
                    place = _Place(self, c, at, first, row * tall, left, None if cluster == 1 else equal(index(row), index(row_tile)))
                    place.write(k, self.op(tall, wide))

    def unravel(self, k: Kernel, block: Dim, others: Sequence[tuple[DimVar, Dim]], width: int) -> tuple[Point, Dim]:
        """Return, for a block of a product with few rows, its point on the other axes, and the number of its tile along the columns."""
        *point, number = k.unravel(block, [*((v.name, e) for v, e in others), ("columns", ceil_div(self.product.num_columns, width))])
        return dict(zip((v for v, _ in others), point, strict=True)), number

    def write_chosen(self, k: Kernel, choice: Choice) -> None:
        """Write the kernel of a product whose rows choose among matrices. A block looks at some adjacent rows, and computes the runs that
        begin at them."""
        p, most = self.product, self.heights[-1]
        (_, num_rows), _ = p.nest.axes
        tiles, matrices = ceil_div(p.num_columns, NARROW), self.operands[0].weights.buffer.shape[0]
        of_block = dim_max(num_rows // matrices, 1)  # number of rows of a block
        groups = ceil_div(num_rows, of_block)
        with k.grid("b", groups * tiles) as b, k.serial("n", of_block) as n:
            group, number = k.unravel(b, [("group", groups), ("columns", tiles)])
            first = k.let("first", dim_min(group * of_block + n, num_rows - 1), num_rows - 1)
            before = self.chosen(choice, dim_max(first - 1, 0))
            begins = equal(index(first % most), 0) | not_equal(self.chosen(choice, first), before)
            with k.when(less(group * of_block + n, num_rows) & begins):
                self.write_run(k, choice, first, number)

    def write_run(self, k: Kernel, choice: Choice, first: Dim, number: Dim) -> None:
        """Write code that computes a tile of the run that begins with the row `first`."""
        p, most = self.product, self.heights[-1]
        (_, num_rows), _ = p.nest.axes
        c = k.shared("c", max(self.op(height, NARROW).shared_bytes for height in self.heights) // 4)
        ends = k.shared("ends", most, dtype=DType.I32)
        with k.threads("u", most) as u:
            near = dim_min(first + u, num_rows - 1)
            goes_on = (
                less(first % most + u, most) & less(first + u, num_rows) & equal(self.chosen(choice, near), self.chosen(choice, first))
            )
            ends[u] = select(goes_on, const(most, DType.I32), cast(index(u), DType.I32))
        fold_threads(k, ends, most, minimum)
        count = k.let("count", cast(ends[0], DType.I64), most)
        matrix = k.let("matrix", self.chosen(choice, first), choice.names[0].upper)
        place = _Place(self, c, dict.fromkeys(choice.names, matrix), self.column(number, NARROW), first, count)
        place.write_lowest(k, most)

    def chosen(self, choice: Choice, row: Dim) -> Scalar:
        """Return the number of the matrix that a row chooses."""
        assert self.product.row_axis is not None
        return cast(rewrite_dims(choice.index, {self.product.row_axis: row}), DType.I64)


@dataclass(frozen=True, slots=True)
class _Place:
    """The part of the product that a block computes: columns from `column`, and `num_rows` rows from row `first`."""

    blocks: _Blocks
    c: Array
    point: Point
    column: Dim
    first: Dim
    num_rows: Dim
    writes: Scalar | None = None  # whether the block writes its result; None: always

    def write_lowest(self, k: Kernel, most: int, least: int = 0) -> None:
        """Write code that computes the part with the lowest tile that has enough rows, if there are more than `least` and at most `most`
        rows."""
        for lower, height in zip((0, *self.blocks.heights), self.blocks.heights, strict=False):
            if least < height <= most and not prove_le(self.num_rows, lower):
                with k.when(less(lower, self.num_rows) & less(self.num_rows, height + 1)):
                    self.write(k, self.blocks.op(height, NARROW))

    def write(self, k: Kernel, op: BlockProduct) -> None:
        """Write code that computes the part with one tile, and stores the elements."""
        p, operands = self.blocks.product, self.blocks.operands
        rows, group = operands[0].rows, operands[0].group
        assert p.row_axis is not None
        at = {**self.point, p.row_axis: self.first}
        row = Load(rows.buffer, (*(d.substitute(at) for d in rows.indices[:-1]), ZERO))
        stride = p.stride(rows)
        panel = self.column // op.panel_columns
        packed = [*(o.weights for o in operands), *(o.scale for o in operands if o.scale is not None)]
        panels = [Load(w.buffer, (*(d.substitute(at) for d in w.indices[:-3]), panel, ZERO, ZERO)) for w in packed]
        num_panels = ceil_div(p.num_columns, op.panel_columns) - panel
        groups = [group] if op.has_scales else []
        k.tile(op, self.c[0], row, *panels, dims=(p.extent, stride, self.num_rows, num_panels, *groups))
        with nullcontext() if self.writes is None else k.when(self.writes):
            self.write_elements(k, op)

    def write_elements(self, k: Kernel, op: BlockProduct) -> None:
        """Write code that computes the elements of the result from the sums of the tile, and stores them: several rows at a time, or row by
        row if the tile leaves no registers for more."""
        p = self.blocks.product
        with k.threads("t", op.writers) as t:
            column = k.let("column", t % op.columns, op.columns - 1)
            in_step = op.writers // op.columns
            count = op.rows // in_step  # number of rows of a thread
            group = at_once(count, op.rows_at_once)
            if group == 1:
                self.write_single_rows(k, op, t, column)
                return
            num_groups = ceil_div(self.num_rows, in_step * group) if count > group else Dim.of(1)
            with k.when(less(self.column + column, p.num_columns)):
                for writer in self.writers(k, op, column):
                    with writer.where_it_applies(k), k.serial("m", num_groups) as m:
                        rows = (k.let("i", (m * group + u) * in_step + t // op.columns, op.rows - 1) for u in range(group))
                        writer.write(k, Rows(tuple(rows), self.first, self.num_rows))

    def write_single_rows(self, k: Kernel, op: BlockProduct, t: Dim, column: Dim) -> None:
        """Write a column row by row, which needs the fewest registers."""
        in_step = op.writers // op.columns
        with k.serial("m", op.rows // in_step) as m:
            i = k.let("i", m * in_step + t // op.columns, op.rows - 1)
            with k.when(less(i, self.num_rows) & less(self.column + column, self.blocks.product.num_columns)):
                for writer in self.writers(k, op, column):
                    with writer.where_it_applies(k):
                        writer.write_row(k, self.first, i)

    def own_column(self, k: Kernel, op: BlockProduct, column: Dim) -> Dim:
        """Return the column of the product that the tile has as its column `column`. If the tile has two ranges of columns, the second half
        of its columns is the second range."""
        own, half = self.column + column, op.columns // 2
        if not op.apart:
            return own
        return k.let("own", own + column // half * (op.apart * op.panel_columns - half), self.blocks.product.num_columns - 1)

    def writers(self, k: Kernel, op: BlockProduct, column: Dim) -> list[Writer]:
        """Return the writers of the elements of a column: one for each branch, or one for the nest's store. They use the tile's results in
        place of the sums."""
        p, half, own = self.blocks.product, op.columns // 2, self.own_column(k, op, column)

        def element(i: Dim, offset: int) -> Scalar:
            """Return the element in row `i` of the tile, `offset` columns after `own`."""
            assert p.row_axis is not None
            near = offset * half // (op.apart * op.panel_columns) if op.apart else offset
            at = {**self.point, p.row_axis: self.first + i, p.column_axis: own + offset}
            return rewrite_dims(self.element(op, i, column + near), at)

        if self.blocks.branches:
            return [BranchWriter(branch, own, element) for branch in self.blocks.branches]
        assert p.row_axis is not None
        return [StoreWriter(p.nest.store, p.row_axis, {**self.point, p.column_axis: own}, element)]

    def element(self, op: BlockProduct, i: Dim, column: Dim) -> Scalar:
        """Return an element of the product, computed from the sums that the tile wrote to shared memory."""
        p = self.blocks.product

        def total(scalar: Scalar) -> Scalar:
            number = p.number_of(scalar)
            return scalar if number is None else self.c[(number * op.rows + i) * op.pitch + column]

        return map_scalar(p.nest.store.value, total)
