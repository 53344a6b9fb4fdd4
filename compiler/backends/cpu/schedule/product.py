"""Products of matrices: panels of columns beside tiles of rows, summed in the best of four ways.

A product is a nest whose value contains sums over k of rows times columns: one (linear, matmul), or several over the same rows (gate and
up), with any epilogue around and any decode inside the columns (idioms/product.py). Threads claim panels of columns beside blocks of rows,
and take the rows of a block in tiles (panels.py). The ways to sum a tile:

  Floats     any columns: decoded to f32, then multiplied and added in vectors
  Pairs      elements of bf16 that lie in panels of pairs: an instruction of the machine adds two products at a time
  Groups     integers: instructions sum a group exactly in i32; groups are added in order in f32
  Widened    weights of 4 bits for a matrix unit: a part of a panel is widened to 8 bits once, for all rows of a block

Accumulators stay in registers for all of k, or wait in memory while a matrix unit goes through k in parts (blocks.py). Every way adds the
products of a row in one order, whatever tile the row is in. So a row has the same bits in every batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic

from compiler.backends.cpu.schedule.blocks import Blocks, Later, Part, configuring
from compiler.backends.cpu.schedule.nests import below, local, loop, named, seq, when, zero
from compiler.backends.cpu.schedule.panels import BLOCK_ROWS, Claim, Height, Panels
from compiler.backends.cpu.schedule.tile_origin import TileOrigin
from compiler.idioms.nest import allocated, in_bounds
from compiler.idioms.product import GroupedSum, Product, S, grouped_product_in, product_in
from compiler.ir.dims import Dim, DimVar, ceil_div, dim_min, product_of
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import Fn, ReduceFn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Apply, Cast, Const, Contraction, Element, Load, Scalar
from compiler.ir.loops.statements import Stmt, Store, Tile
from compiler.ir.loops.visit import rewrite_dims
from compiler.ir.loops.write import Kernel, fold
from compiler.ir.prove import prove_divisible
from compiler.machine.formats import FOUR
from compiler.machine.products import ProductTile, ProductTiles, TileShape
from compiler.machine.target import LINE_BYTES
from compiler.machine.tiles.prefetch import AHEAD, Prefetch

F32, I32 = DType.F32, DType.I32
ZERO = Dim.of(0)
UNROLLED = 4  # steps of k that Floats write out: they share what they decode
ABREAST = 4  # panels of one of several grouped sums, beside a single row
AT_ONCE = 8  # groups of a single row: half a kilobyte of scales, beside four of weights of 4 bits
WIDENED_ROWS = 512  # of a block: widening a panel costs as much as its product with some sixty rows
PLANES = 2  # of the rows of widened weights

Point = dict[DimVar, Dim]
# total(number, m, v, lane): what stands for a sum in the epilogue.
Total = Callable[[int, Dim, Dim, Dim], Scalar]
# factor(m, v, lane): what the exact sum of a group is multiplied by.
Factor = Callable[[Dim, Dim, Dim], Scalar]


def schedule_product(prim: PrimFunc, tiles: ProductTiles) -> PrimFunc | None:
    way = _way(prim, tiles)
    return None if way is None else PrimFunc(prim.params, prim.num_outputs, way.body(), {**prim.attrs, "schedule": way.name})


def _way(prim: PrimFunc, tiles: ProductTiles) -> _Way[Contraction] | _Way[GroupedSum] | None:
    if (floats := product_in(prim)) is not None:
        if tiles.pairs is not None and pairs_fit(floats, tiles.pairs) and all(_lies_in_pairs(s, tiles.pairs) for s in floats.sums):
            return _Pairs(floats, tiles.pairs.shape, tiles.pairs)
        return _Floats(floats, tiles.floats)
    if (grouped := grouped_product_in(prim)) is not None:
        if tiles.widened is not None and all(_widens(tiles.widened, s) for s in grouped.sums):
            return _Widened(grouped, tiles.widened.shape, tiles.widened)
        for tile in tiles.integers:
            if all(_lies_in_panels(s, tile) and s.group % tile.depth == 0 for s in grouped.sums):
                return _Groups(grouped, tile.shape, tile)
    return None


@dataclass(frozen=True, slots=True)
class _Way(ABC, Generic[S]):
    """How the sums of a product are computed, in tiles of at most `shape`."""

    name: ClassVar[str]
    product: Product[S]
    shape: TileShape

    @property
    def rows(self) -> int:
        """Of a tile, at most. Without a row axis one row is all there is."""
        return 1 if self.product.row_axis is None else self.shape.rows

    @property
    def abreast(self) -> int:
        """Panels that a single row takes together."""
        return 1

    @property
    def blocks(self) -> Blocks | None:
        """The parts of k through which blocks of rows go; None: accumulators stay in registers."""
        return None

    def body(self) -> Stmt:
        p, blocks = self.product, self.blocks
        together = 1 if blocks is None else blocks.together
        panels = Panels(p.nest, p.row_axis, self.shape.columns, self.rows, together=together, abreast=self.abreast)
        return panels.walk(self.one, None if blocks is None else self.several, self.across if self.abreast > 1 else None)

    def origin(self, point: Point, panel: Dim, first: Dim, rows: int) -> TileOrigin:
        return TileOrigin(self.product.nest, self.product.row_axis, replace(self.shape, rows=rows), point, panel, first)

    def one(self, point: Point, panel: Dim, first: Dim, rows: int) -> Stmt:
        return self.in_registers(self.origin(point, panel, first, rows))

    def several(self, claim: Claim, first: Dim, rows: int, count: Dim) -> Stmt:
        """A block of rows, where there are blocks."""
        raise NotImplementedError

    def across(self, point: Point, panel: Dim, row: Dim) -> Stmt:
        """A single row beside `abreast` panels, where there are more than one."""
        raise NotImplementedError

    @abstractmethod
    def summed(self, origin: TileOrigin, accs: Sequence[Buffer]) -> list[Stmt]:
        """Sum all of k into accumulators [rows, vectors, lanes]."""

    def in_registers(self, origin: TileOrigin) -> Stmt:
        accs = self.locals("acc", origin.shape.rows, origin.shape.vectors)
        finish = origin.each(lambda *at: self.stored(origin, at, lambda number, *place: Load(accs[number], place)))
        return allocated(accs, seq(*self.summed(origin, accs), finish))

    def stored(self, origin: TileOrigin, at: tuple[Dim, Dim, Dim], total: Total) -> Stmt:
        """The epilogue at a row, vector and lane of the tile."""
        return origin.store(*at, lambda s: s if (number := self.product.number_of(s)) is None else total(number, *at))

    def locals(self, name: str, *shape: int, dtype: DType = F32) -> list[Buffer]:
        """Buffers with lanes, one for each sum."""
        return [local(f"{name}{i}", *shape, self.shape.lanes, dtype=dtype) for i in range(len(self.product.sums))]


def _cleared(origin: TileOrigin, accs: Sequence[Buffer]) -> Stmt:
    return origin.each(lambda *at: seq(*(Store(acc, at, zero(F32)) for acc in accs)))


# --- floats --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Floats(_Way[Contraction]):
    """Columns go to the lanes of vectors. An accumulator adds its products one after another with one rounding each, so the bits are the
    same on every instruction set with a fused multiply-add."""

    name: ClassVar[str] = "matmul"

    @property
    def rows(self) -> int:
        """Several sums share the registers."""
        return 1 if self.product.row_axis is None else max(1, self.shape.rows // (1 << (len(self.product.sums) - 1).bit_length()))

    @property
    def abreast(self) -> int:
        """Two panels of one sum, as if there were two sums: then additions wait for each other no longer than for memory, and scales beside
        the sums still fit into 16 registers."""
        return 2 if self.rows > 1 and len(self.product.sums) == 1 else 1

    def across(self, point: Point, panel: Dim, row: Dim) -> Stmt:
        wide = TileShape(1, self.shape.vectors * self.abreast, self.shape.lanes)
        return self.in_registers(TileOrigin(self.product.nest, self.product.row_axis, wide, point, panel // self.abreast, row))

    def summed(self, origin: TileOrigin, accs: Sequence[Buffer]) -> list[Stmt]:
        sums = self.product.sums
        columns = self.locals("w", origin.shape.vectors)

        def step(r: Dim) -> Stmt:
            def at(m: Dim, v: Dim, lane: Dim, scalar: Scalar) -> Scalar:
                return rewrite_dims(scalar, {**origin.at(m, v, lane), **{s.axes[0][0]: r for s in sums}})

            def fetch(v: Dim, lane: Dim) -> Stmt:
                stores: list[Stmt] = []
                for w, s in zip(columns, sums, strict=True):
                    value = at(ZERO, v, lane, s.columns)
                    put = Store(w, (v, lane), value)
                    stores.append(put if origin.whole or in_bounds(value) else when(origin.inside(v, lane), put))
                return seq(*stores)

            def multiply(m: Dim, v: Dim, lane: Dim) -> Stmt:
                updates: list[Stmt] = []
                for acc, w, s in zip(accs, columns, sums, strict=True):
                    place = (m, v, lane)
                    product = (at(m, v, lane, s.rows), Load(w, (v, lane)), Load(acc, place))
                    updates.append(Store(acc, place, Apply(Fn.FMA, product)))
                return seq(*updates)

            return allocated(columns, seq(origin.vectors(fetch), origin.each(multiply)))

        extent = sums[0].extent
        stride = next(n for n in (UNROLLED, 2, 1) if prove_divisible(extent, n))

        def prefetched(first: Dim) -> list[Stmt]:
            """A single row waits for memory with or without."""
            return [t for s in sums for t in _prefetch(s, origin, first, stride)] if origin.shape.rows > 1 else []

        steps = loop("r", extent // stride, lambda r: seq(*prefetched(r * stride), *(step(r * stride + u) for u in range(stride))))
        return [_cleared(origin, accs), steps]


def _prefetch(s: Contraction, origin: TileOrigin, first: Dim, stride: int) -> list[Tile]:
    """What is read of a packed panel, further ahead than machines prefetch by themselves."""
    load, columns = s.columns.value if isinstance(s.columns, Cast) else s.columns, origin.shape.columns
    if not isinstance(load, Load) or load.buffer.shape[-1] != Dim.of(columns):
        return []
    corner = {**origin.at(ZERO, ZERO, ZERO), s.axes[0][0]: first}
    place = Load(load.buffer, tuple(d.substitute(corner) for d in load.indices))
    num_lines = stride * columns * load.buffer.dtype.num_bytes // LINE_BYTES
    return [Tile(Prefetch(far=True, ahead=AHEAD, lines=max(num_lines, 1)), (place,))]


# --- pairs of bf16 -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pairs(_Way[Contraction]):
    name: ClassVar[str] = "pairs"
    tile: ProductTile

    @property
    def blocks(self) -> Blocks | None:
        if self.tile.block is None:
            return None
        p = self.product
        columns = p.nest.axes[-1][1]
        return Blocks(p.extent, self.tile.block, self.tile.depth, self.tile.format.depth, columns, self.shape.columns, len(p.sums))

    def one(self, point: Point, panel: Dim, first: Dim, rows: int) -> Stmt:
        """On a matrix unit: a rest of rows, through all of k at once."""
        if self.blocks is None:
            return self.in_registers(self.origin(point, panel, first, rows))
        return self.in_memory(self.blocks, Claim(point, panel, Dim.of(1)), first, rows, None)

    def several(self, claim: Claim, first: Dim, rows: int, count: Dim) -> Stmt:
        assert self.blocks is not None
        return self.in_memory(self.blocks, claim, first, rows, count)

    def summed(self, origin: TileOrigin, accs: Sequence[Buffer]) -> list[Stmt]:
        whole = Part(ZERO, self.product.extent, Dim.of(1))
        tiles = [self.added(s, Load(acc, (ZERO,) * 3), origin, whole) for s, acc in zip(self.product.sums, accs, strict=True)]
        return [_cleared(origin, accs), *tiles]

    def in_memory(self, blocks: Blocks, claim: Claim, first: Dim, rows: int, count: Dim | None) -> Stmt:
        """`count` tiles of rows, through k in parts; or one tile, through all of k."""
        most, together = (rows, 1) if count is None else (BLOCK_ROWS, blocks.together)
        accs = self.locals("acc", together, most, self.shape.vectors)

        def tiles(panel: Dim, io: Dim, part: Part) -> list[Tile]:
            origin = self.origin(claim.point, panel, first + io * rows, rows)
            place = (panel - claim.panel, io * rows, ZERO, ZERO)
            return [self.added(s, Load(acc, place), origin, part) for s, acc in zip(self.product.sums, accs, strict=True)]

        def finish(m: Dim, panel: Dim) -> Stmt:
            """The epilogue is long: written once, not once per row."""
            line, beside = self.origin(claim.point, panel, first + m, 1), panel - claim.panel
            return line.vectors(
                lambda *at: self.stored(line, (ZERO, *at), lambda number, _, v, lane: Load(accs[number], (beside, m, v, lane)))
            )

        summed = seq(*tiles(claim.panel, ZERO, blocks.whole)) if count is None else blocks.walk(claim, count, tiles)
        done = loop("m", rows if count is None else count * rows, lambda m: claim.each(lambda panel: finish(m, panel)))
        return allocated(accs, seq(*configuring(self.tile, rows), summed, done))

    def added(self, s: Contraction, acc: Load, origin: TileOrigin, part: Part) -> Tile:
        """Add a part of k to the accumulators; where they wait in memory, the first part finds nothing in them."""
        place = {**origin.at(ZERO, ZERO, ZERO), s.axes[0][0]: part.begin}
        rows, columns = (_bf16_element(x) for x in (s.rows, s.columns))
        assert rows is not None and columns is not None, s
        left, right = (rewrite_dims(x, place) for x in (rows, columns))
        assert isinstance(left, Load) and isinstance(right, Load)
        op = self.tile.product(origin.shape.rows, fresh=part.is_first)
        return Tile(op, (acc, left, right), (part.depth, self.stride(rows)))

    def stride(self, rows: Load) -> Dim:
        """Elements from one row to the next."""
        place = next((i for i, d in enumerate(rows.indices) if d.var is self.product.row_axis), len(rows.indices) - 1)
        return product_of(rows.buffer.shape[place + 1 :])


def pairs_fit(product: Product[Contraction], tile: ProductTile) -> bool:
    """Whether the tile can take the product, once its columns are packed."""
    return prove_divisible(product.extent, tile.depth) and all(_are_bf16(product, s) for s in product.sums)


def _are_bf16(product: Product[Contraction], s: Contraction) -> bool:
    rows, columns, axis = _bf16_element(s.rows), _bf16_element(s.columns), s.axes[0][0]
    if rows is None or columns is None or rows.indices[-1].var is not axis:
        return False
    before = rows.indices[:-1]
    if any(axis in d.vars() for d in before):
        return False
    along = [d for d in before if product.row_axis in d.vars()]
    return product.row_axis is None or [d.var for d in along] == [product.row_axis]


def _bf16_element(scalar: Scalar) -> Load | None:
    """A number of bf16 as it lies in memory."""
    scalar = scalar.value if isinstance(scalar, Cast) else scalar
    load = scalar.stored[0] if isinstance(scalar, Element) else scalar
    return load if isinstance(load, Load) and load.buffer.dtype is DType.BF16 else None


def _lies_in_pairs(s: Contraction, tile: ProductTile) -> bool:
    element = s.columns.value if isinstance(s.columns, Cast) else s.columns
    if not isinstance(element, Element) or element.format is not tile.format:
        return False
    return element.buffers[0].shape[-1] == Dim.of(tile.shape.columns * tile.format.depth)


# --- groups of integers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Groups(_Way[GroupedSum]):
    """The exact sum of a group has the same bits in any tile. The rows of all planes are rows of the tile: they share what it reads of
    the panel.

    A single row waits for memory, and cores read one dense stream best. So the scales of several groups are read at once, before their
    panels: their factors wait in the first cache. And of several sums some panels of one are gone through before those of the next."""

    name: ClassVar[str] = "integer"
    tile: ProductTile

    @property
    def blocks(self) -> Blocks | None:
        """Where one group is all of k: its exact sums wait in memory."""
        p = self.product
        if self.tile.block is None or any(s.num_groups != Dim.of(1) for s in p.sums):
            return None
        columns, group, accumulators = p.nest.axes[-1][1], Dim.of(p.sums[0].group), sum(s.num_planes for s in p.sums)
        return Blocks(group, self.tile.block, self.tile.depth, FOUR, columns, self.shape.columns, accumulators)

    @property
    def abreast(self) -> int:
        return ABREAST if self.blocks is None and len(self.product.sums) > 1 and self.product.row_axis is not None else 1

    def configured(self, rows: int) -> list[Tile]:
        return configuring(self.tile, rows * self.product.sums[0].num_planes)

    def across(self, point: Point, panel: Dim, row: Dim) -> Stmt:
        """Some panels of a sum, then those of the next."""
        held = self.locals("held", ABREAST, self.shape.vectors)
        acc = local("acc", 1, self.shape.vectors, self.shape.lanes)

        def each(body: Callable[[Dim, TileOrigin], Stmt]) -> Stmt:
            return loop("beside", ABREAST, lambda i: body(i, self.origin(point, panel + i, row, 1)))

        def summed(s: GroupedSum, hold: Buffer) -> Stmt:
            def one(i: Dim, origin: TileOrigin) -> Stmt:
                keep = origin.vectors(lambda v, lane: Store(hold, (i, v, lane), Load(acc, (ZERO, v, lane))))
                return allocated([acc], seq(self.sum(origin, s, acc), keep))

            return each(one)

        def finish(i: Dim, origin: TileOrigin) -> Stmt:
            return origin.each(lambda *at: self.stored(origin, at, lambda number, _, v, lane: Load(held[number], (i, v, lane))))

        return allocated(held, seq(*self.configured(1), *map(summed, self.product.sums, held), each(finish)))

    def summed(self, origin: TileOrigin, accs: Sequence[Buffer]) -> list[Stmt]:
        """Each sum is done for all of k before the next begins."""
        done = [self.sum(origin, s, acc) for s, acc in zip(self.product.sums, accs, strict=True)]
        return [*self.configured(origin.shape.rows), *done]

    def sum(self, origin: TileOrigin, s: GroupedSum, acc: Buffer) -> Stmt:
        if origin.shape.rows == 1 and s.num_groups != Dim.of(1):
            groups = self.runs(origin, s, acc)
        else:
            groups = loop("g", s.num_groups, lambda g: self.group(origin, s, acc, g, self.factor(origin, s, g)))
        return seq(origin.each(lambda *at: Store(acc, at, zero(F32))), groups)

    def runs(self, origin: TileOrigin, s: GroupedSum, acc: Buffer) -> Stmt:
        """Of a single row: some factors, and then their groups."""
        num_groups, factors = s.num_groups, local("factors", AT_ONCE, self.shape.vectors, self.shape.lanes)

        def run(first: Dim, count: Dim) -> Stmt:
            def fill(i: Dim) -> Stmt:
                factor = self.factor(origin, s, first + i)
                return origin.each(lambda m, v, lane: Store(factors, (i, v, lane), factor(m, v, lane)))

            def group(i: Dim) -> Stmt:
                return self.group(origin, s, acc, first + i, lambda _, v, lane: Load(factors, (i, v, lane)))

            return allocated([factors], seq(loop("i", count, fill), loop("i", count, group)))

        def some(r: Dim) -> Stmt:
            return named("count", dim_min(AT_ONCE, num_groups - r * AT_ONCE), AT_ONCE, lambda count: run(r * AT_ONCE, count))

        if prove_divisible(num_groups, AT_ONCE):
            return loop("run", num_groups // AT_ONCE, lambda r: run(r * AT_ONCE, Dim.of(AT_ONCE)))
        return loop("run", ceil_div(num_groups, AT_ONCE), some)

    def factor(self, origin: TileOrigin, s: GroupedSum, g: Dim) -> Factor:
        return lambda m, v, lane: rewrite_dims(s.node.factor, {**origin.at(m, v, lane), s.axis: g})

    def group(self, origin: TileOrigin, s: GroupedSum, acc: Buffer, g: Dim, factor: Factor) -> Stmt:
        exact = local("exact", origin.shape.rows * s.num_planes, self.shape.vectors, self.shape.lanes, dtype=I32)

        def exacts(m: Dim, v: Dim, lane: Dim) -> list[Load]:
            return [Load(exact, (m * s.num_planes + i, v, lane)) for i in range(s.num_planes)]

        def begin(*at: Dim) -> Stmt:
            return seq(*_begun(s, exacts(*at), {**origin.at(*at), s.axis: g}))

        def add(*at: Dim) -> Stmt:
            total = rewrite_dims(s.node.exact(exacts(*at)), {**origin.at(*at), s.axis: g})
            return Store(acc, at, Apply(Fn.FMA, (total, factor(*at), Load(acc, at))))

        part = s.first.substitute({s.axis: g}), Dim.of(s.group)
        return allocated([exact], seq(origin.each(begin), self.added(s, Load(exact, (ZERO,) * 3), origin, part), origin.each(add)))

    def several(self, claim: Claim, first: Dim, rows: int, count: Dim) -> Stmt:
        blocks, sums, planes = self.blocks, self.product.sums, self.product.sums[0].num_planes
        assert blocks is not None
        exact = self.locals("exact", blocks.together, BLOCK_ROWS * planes, self.shape.vectors, dtype=I32)

        def each_row(body: Callable[[TileOrigin, list[list[Load]], Dim, Dim], Stmt]) -> Stmt:
            def at(m: Dim, panel: Dim) -> Stmt:
                line = self.origin(claim.point, panel, first + m, 1)

                def one(v: Dim, lane: Dim) -> Stmt:
                    places = [(panel - claim.panel, m * planes + i, v, lane) for i in range(planes)]
                    return body(line, [[Load(e, place) for place in places] for e in exact], v, lane)

                return line.vectors(one)

            return loop("m", count * rows, lambda m: claim.each(lambda panel: at(m, panel)))

        def place(line: TileOrigin, s: GroupedSum, v: Dim, lane: Dim) -> Point:
            return {**line.at(ZERO, v, lane), s.axis: ZERO}

        def begin(line: TileOrigin, exacts: list[list[Load]], v: Dim, lane: Dim) -> Stmt:
            return seq(*(put for s, loads in zip(sums, exacts, strict=True) for put in _begun(s, loads, place(line, s, v, lane))))

        def finish(line: TileOrigin, exacts: list[list[Load]], v: Dim, lane: Dim) -> Stmt:
            def total(number: int, *_: Dim) -> Scalar:
                s, at = sums[number], place(line, sums[number], v, lane)
                exact_sum, factor = (rewrite_dims(x, at) for x in (s.node.exact(exacts[number]), s.node.factor))
                return Apply(Fn.FMA, (exact_sum, factor, zero(F32)))

            return self.stored(line, (ZERO, v, lane), total)

        def tiles(panel: Dim, io: Dim, part: Part) -> list[Tile]:
            corner, below = (
                (panel - claim.panel, io * (rows * planes), ZERO, ZERO),
                self.origin(claim.point, panel, first + io * rows, rows),
            )
            return [self.added(s, Load(e, corner), below, (part.begin, part.depth)) for s, e in zip(sums, exact, strict=True)]

        walk = blocks.walk(claim, count, tiles)
        return allocated(exact, seq(each_row(begin), *self.configured(rows), walk, each_row(finish)))

    def added(self, s: GroupedSum, exact: Load, origin: TileOrigin, part: tuple[Dim, Dim]) -> Tile:
        """Add a part (begin, depth) of k to exact sums."""
        q, (begin, depth) = s.q, part
        row = tuple(d.substitute(origin.at(ZERO, ZERO, ZERO)) for d in q.indices[:-2])
        left = Load(q.buffer, (*row, ZERO, begin))
        right = Load(s.panels, (origin.panel, begin // s.format.depth, ZERO))
        return Tile(self.tile.product(origin.shape.rows * s.num_planes), (exact, left, right), (depth, q.buffer.shape[-1]))


def _begun(s: GroupedSum, exacts: Sequence[Load], place: Point) -> list[Store]:
    """What exact sums begin with."""
    begins = s.node.begins or [zero(I32)] * len(exacts)
    return [Store(e.buffer, e.indices, rewrite_dims(begin, place)) for e, begin in zip(exacts, begins, strict=True)]


def _lies_in_panels(s: GroupedSum, tile: ProductTile) -> bool:
    return s.format is tile.format and s.panels.shape[-1] == Dim.of(tile.shape.columns * FOUR)


# --- widened weights -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Widened(_Way[GroupedSum]):
    """A part of a panel is widened into memory that stays in the first cache, and all rows of the block multiply it from there. Sums of a
    channel are exact and wait in memory. Tiles without a row that needs two planes leave the second one out. Its sums are read for rows
    that need it only, so the other rows of a tile do not matter."""

    name: ClassVar[str] = "widened"
    tile: ProductTile

    def body(self) -> Stmt:
        p, tile, shape = self.product, self.tile, self.shape
        extent, columns = Dim.of(p.sums[0].group), p.nest.axes[-1][1]
        assert tile.block is not None, tile
        wide_size = tile.block * shape.columns
        blocks = Blocks(extent, tile.block, tile.depth, tile.format.depth, columns, shape.columns, len(p.sums))
        panels = Panels(p.nest, p.row_axis, shape.columns, self.rows, together=blocks.together, block_rows=WIDENED_ROWS)
        block_rows = 1 if p.row_axis is None else WIDENED_ROWS

        def memory(s: GroupedSum, number: int) -> _WidenedSum:
            exact = local(f"exact{number}", PLANES, blocks.together, block_rows, shape.vectors, shape.lanes, dtype=I32)
            num_planes = local(f"planes{number}", block_rows, dtype=I32)
            return _WidenedSum(s, exact, local(f"wide{number}", wide_size, dtype=DType.I8), num_planes)

        sums = tuple(memory(s, number) for number, s in enumerate(p.sums))
        return panels.blocks(
            lambda claim, first, end: _WidenedBlock(self, sums, claim, first, end, panels.heights(first, end)).body(blocks)
        )

    def summed(self, origin: TileOrigin, accs: Sequence[Buffer]) -> list[Stmt]:
        raise NotImplementedError("sums of widened weights wait in memory")


@dataclass(frozen=True, slots=True)
class _WidenedSum:
    """A sum, and a thread's own memory for that of a block of rows."""

    grouped: GroupedSum
    exact: Buffer  # by plane, panel, row, vector and lane
    wide: Buffer  # a part of a panel
    num_planes: Buffer  # of a tile, at its first row

    def two_planes(self, place: Point) -> Scalar:
        assert self.grouped.node.two_planes is not None, self.grouped
        return self.at(self.grouped.node.two_planes, place)

    def at(self, scalar: Scalar, place: Point) -> Scalar:
        """Its one group is all of k."""
        return rewrite_dims(scalar, {**place, self.grouped.axis: ZERO})


@dataclass(frozen=True, slots=True)
class _WidenedBlock:
    """Rows first .. end - 1 beside the panels of a claim."""

    way: _Widened
    sums: tuple[_WidenedSum, ...]
    claim: Claim
    first: Dim
    end: Dim
    heights: list[Height]

    def body(self, blocks: Blocks) -> Stmt:
        counted = [h.when_any(h.each(lambda row, h=h: self.counted(row, h.rows))) for h in self.heights]
        configured = [h.when_any(self.configured(h.rows)) for h in self.heights]
        finished = loop("m", self.end - self.first, lambda m: self.claim.each(lambda panel: self.finished(panel, m)))
        buffers = [b for s in self.sums for b in (s.exact, s.wide, s.num_planes)]
        return allocated(buffers, seq(*counted, *configured, blocks.parts(self.claim, self.through), finished))

    def origin(self, panel: Dim, row: Dim, rows: int) -> TileOrigin:
        return self.way.origin(self.claim.point, panel, row, rows)

    def configured(self, rows: int) -> Stmt:
        return seq(*configuring(self.way.tile, rows))

    def counted(self, row: Dim, rows: int) -> Stmt:
        """The number of planes of a tile: two where one of its rows needs them."""

        def number(s: _WidenedSum) -> Scalar:
            origin = self.origin(self.claim.panel, row, rows)
            some = fold(ReduceFn.ANY, (rows,), lambda m: s.two_planes(origin.at(m, ZERO, ZERO)))
            return Apply(Fn.ADD, (Cast(some, I32), Const(1, I32)))

        return seq(*(Store(s.num_planes, (row - self.first,), number(s)) for s in self.sums))

    def through(self, panel: Dim, part: Part, later: Later) -> Stmt:
        """A part of a panel: widened, then multiplied by all rows."""
        num_heights = sum((dim_min(h.count, 1) for h in self.heights), ZERO)

        def tiles(h: Height) -> Stmt:
            configured_again = when(below(1, num_heights), self.configured(h.rows))  # others came between
            return seq(
                configured_again, h.each(lambda row: seq(*(self.planes(s, self.origin(panel, row, h.rows), part) for s in self.sums)))
            )

        return seq(*(self.widened(s, panel, part, later) for s in self.sums), *(h.when_any(tiles(h)) for h in self.heights))

    def widened(self, s: _WidenedSum, panel: Dim, part: Part, later: Later) -> Tile:
        panels, multipliers = s.grouped.element.buffers
        group = _shared_multiplier(s.grouped)

        def places(panel: Dim, begin: Dim) -> tuple[Load, Load]:
            return Load(panels, (panel, begin // s.grouped.format.depth, ZERO)), Load(multipliers, (panel, begin // group, ZERO))

        operands = (Load(s.wide, (ZERO,)), *places(panel, part.begin), *places(later.panel, later.begin))
        assert self.way.tile.widen is not None, self.way
        return Tile(replace(self.way.tile.widen, group=group), operands, (part.depth,))

    def planes(self, s: _WidenedSum, origin: TileOrigin, part: Part) -> Stmt:
        """The first part finds nothing in the exact sums."""
        q, place = s.grouped.q, (origin.panel - self.claim.panel, origin.first - self.first)
        row = tuple(d.substitute(origin.at(ZERO, ZERO, ZERO)) for d in q.indices[:-2])
        stride = q.buffer.shape[-2] * q.buffer.shape[-1]
        op = self.way.tile.product(origin.shape.rows, fresh=part.is_first)

        def tile(plane: Dim) -> Tile:
            operands = (Load(s.exact, (plane, *place, ZERO, ZERO)), Load(q.buffer, (*row, plane, part.begin)), Load(s.wide, (ZERO,)))
            return Tile(op, operands, (part.depth, stride))

        k = Kernel()
        k.add(loop("plane", k.let("planes", Load(s.num_planes, place[1:]), PLANES, lower=1), tile))
        return k.body()

    def finished(self, panel: Dim, m: Dim) -> Stmt:
        line, place = self.origin(panel, self.first + m, 1), (panel - self.claim.panel, m)
        seconds = self.way.locals("second", line.shape.vectors)

        def second(s: _WidenedSum, added: Buffer) -> Stmt:
            """What the second plane of the row adds: only then it is read."""
            some = line.vectors(lambda *at: Store(added, at, Cast(Load(s.exact, (Dim.of(1), *place, *at)), F32)))
            return when(s.two_planes(line.at(ZERO, ZERO, ZERO)), some, line.vectors(lambda *at: Store(added, at, zero(F32))))

        def total(number: int, _: Dim, *at: Dim) -> Scalar:
            """The one term of the sum of groups, added to nothing."""
            s, node = self.sums[number], self.sums[number].grouped.node
            exact = node.joined(Cast(Load(s.exact, (ZERO, *place, *at)), F32), Load(seconds[number], at))
            return Apply(Fn.FMA, (exact, s.at(node.factor, line.at(ZERO, *at)), zero(F32)))

        finish = line.vectors(lambda *at: self.way.stored(line, (ZERO, *at), total))
        return allocated(seconds, seq(*map(second, self.sums, seconds), finish))


def _widens(tile: ProductTile, s: GroupedSum) -> bool:
    """One group as long as the channel, and a second plane that only some rows have."""
    if not _lies_in_panels(s, tile) or not tile.widens(s.group, _shared_multiplier(s)):
        return False
    return s.num_groups == Dim.of(1) and s.node.two_planes is not None and not s.node.begins


def _shared_multiplier(s: GroupedSum) -> int:
    """Neighbours along k that share a multiplier."""
    return s.group // s.element.buffers[1].shape[-2].const
