"""Products of quantised numbers: sums of a group on the machine's integer units, groups added in order in f32.

Takes integer products of weights in a format that a tile of the machine reads. A tile sums a group exactly in i32, so its shape cannot
change a bit; f32 accumulators take the groups one after another. The rows of all planes are rows of the tile: they share what it reads of
the panel.

A single row waits for memory, and cores read one dense stream best. So the scales of several groups are read at once, before their panels:
their factors wait in the first cache. And of several sums (gate and up) some panels of one are gone through before those of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.blocks import Blocks, Part, configuring
from compiler.backends.cpu.schedule.nests import loop, named, seq, zero
from compiler.backends.cpu.schedule.panels import BLOCK_ROWS, Claim, Panels
from compiler.backends.cpu.schedule.pieces import local
from compiler.backends.cpu.schedule.tile_origin import TileOrigin
from compiler.idioms.nest import allocated
from compiler.idioms.product import GroupedSum, IntegerProduct, integer_product_in
from compiler.ir.dims import Dim, DimVar, ceil_div, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Fn, Load, PrimFunc, Scalar, Stmt, Store, Tile
from compiler.ir.prove import prove_divisible
from compiler.ir.visit_loops import rewrite_dims
from compiler.machine.formats import FOUR
from compiler.machine.products import ProductTile

ABREAST = 4  # panels of a sum, beside a single row
AT_ONCE = 8  # groups of a single row: half a kilobyte of scales, beside four of weights of 4 bits

# factor(m, v, lane): what the exact sum of a group is multiplied by.
Factor = Callable[[Dim, Dim, Dim], Scalar]


def _fits(product: IntegerProduct, tile: ProductTile) -> bool:
    return all(
        s.format is tile.format and s.panels.shape[-1] == Dim.of(tile.shape.columns * FOUR) and s.group % tile.depth == 0
        for s in product.sums
    )


def schedule_integer(prim: PrimFunc, tiles: Sequence[ProductTile]) -> PrimFunc | None:
    """By the first tile that fits."""
    product = integer_product_in(prim)
    tile = next((t for t in tiles if product is not None and _fits(product, t)), None)
    if product is None or tile is None:
        return None
    return PrimFunc(prim.params, prim.num_outputs, _Schedule(product, tile).body(), {**prim.attrs, "schedule": "integer"})


@dataclass(frozen=True, slots=True)
class _Schedule:
    product: IntegerProduct
    tile: ProductTile

    def body(self) -> Stmt:
        p, shape = self.product, self.tile.shape
        panels = Panels(p.nest, p.row_axis, shape.columns, 1 if p.row_axis is None else shape.rows)
        if self.tile.block is None or any(s.num_groups != Dim.of(1) for s in p.sums):
            several = len(p.sums) > 1 and p.row_axis is not None
            return replace(panels, abreast=ABREAST).walk(self.one, across=self.across) if several else panels.walk(self.one)
        accumulators = sum(s.num_planes for s in p.sums)
        columns, group = p.nest.axes[-1][1], Dim.of(p.sums[0].group)
        blocks = Blocks(group, self.tile.block, self.tile.depth, FOUR, columns, shape.columns, accumulators)
        return replace(panels, together=blocks.together).walk(self.one, _Rows(p, self.tile, blocks).body)

    def kernel(self, point: dict[DimVar, Dim], panel: Dim, first: Dim, rows: int) -> _Kernel:
        p = self.product
        return _Kernel(p, TileOrigin(p.nest, p.row_axis, replace(self.tile.shape, rows=rows), point, panel, first), self.tile)

    def one(self, point: dict[DimVar, Dim], panel: Dim, first: Dim, rows: int) -> Stmt:
        return self.kernel(point, panel, first, rows).body()

    def across(self, point: dict[DimVar, Dim], panel: Dim, row: Dim) -> Stmt:
        """Some panels of a sum, then those of the next."""
        sums, shape = self.product.sums, self.tile.shape
        held = [local(f"held{number}", ABREAST, shape.vectors, shape.lanes) for number in range(len(sums))]
        acc = local("acc", 1, shape.vectors, shape.lanes)

        def each(body: Callable[[Dim, _Kernel], Stmt]) -> Stmt:
            return loop("beside", ABREAST, lambda i: body(i, self.kernel(point, panel + i, row, 1)))

        def summed(grouped: GroupedSum, hold: Buffer) -> Stmt:
            def one(i: Dim, kernel: _Kernel) -> Stmt:
                keep = kernel.origin.vectors(lambda v, lane: Store(hold, (i, v, lane), Load(acc, (Dim.of(0), v, lane))))
                return allocated([acc], seq(kernel.sum(grouped, acc), keep))

            return each(one)

        finish = each(lambda i, kernel: kernel.finish(lambda number, _, v, lane: Load(held[number], (i, v, lane))))
        return allocated(held, seq(*_configuring(self.tile, sums[0], 1), *map(summed, sums, held), finish))


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One panel and some rows: each sum is done for all of k before the next begins."""

    product: IntegerProduct
    origin: TileOrigin
    tile: ProductTile

    def body(self) -> Stmt:
        shape, sums = self.origin.shape, self.product.sums
        accs = [local(f"acc{i}", shape.rows, shape.vectors, shape.lanes) for i in range(len(sums))]
        done = [self.sum(s, acc) for s, acc in zip(sums, accs, strict=True)]
        finish = self.finish(lambda number, *at: Load(accs[number], at))
        return allocated(accs, seq(*_configuring(self.tile, sums[0], shape.rows), *done, finish))

    def finish(self, summed: Callable[[int, Dim, Dim, Dim], Load]) -> Stmt:
        def store(m: Dim, v: Dim, lane: Dim) -> Stmt:
            return self.origin.store(m, v, lane, lambda s: s if (i := self.product.number_of(s)) is None else summed(i, m, v, lane))

        return self.origin.each(store)

    def sum(self, grouped: GroupedSum, acc: Buffer) -> Stmt:
        def group(g: Dim) -> Stmt:
            return self.group(grouped, acc, g, self.factor(grouped, g))

        several = self.origin.shape.rows == 1 and grouped.num_groups != Dim.of(1)
        clear = self.origin.each(lambda m, v, lane: Store(acc, (m, v, lane), zero(DType.F32)))
        return seq(clear, self.runs(grouped, acc) if several else loop("g", grouped.num_groups, group))

    def runs(self, grouped: GroupedSum, acc: Buffer) -> Stmt:
        """Of a single row: some factors, and then their groups."""
        shape, num_groups = self.origin.shape, grouped.num_groups
        factors = local("factors", AT_ONCE, shape.vectors, shape.lanes)

        def run(first: Dim, count: Dim) -> Stmt:
            def fill(i: Dim) -> Stmt:
                factor = self.factor(grouped, first + i)
                return self.origin.each(lambda m, v, lane: Store(factors, (i, v, lane), factor(m, v, lane)))

            def group(i: Dim) -> Stmt:
                return self.group(grouped, acc, first + i, lambda _, v, lane: Load(factors, (i, v, lane)))

            return allocated([factors], seq(loop("i", count, fill), loop("i", count, group)))

        def some(r: Dim) -> Stmt:
            return named("count", dim_min(AT_ONCE, num_groups - r * AT_ONCE), AT_ONCE, lambda count: run(r * AT_ONCE, count))

        if prove_divisible(num_groups, AT_ONCE):
            return loop("run", num_groups // AT_ONCE, lambda r: run(r * AT_ONCE, Dim.of(AT_ONCE)))
        return loop("run", ceil_div(num_groups, AT_ONCE), some)

    def factor(self, grouped: GroupedSum, g: Dim) -> Factor:
        return lambda m, v, lane: rewrite_dims(grouped.node.factor, {**self.origin.at(m, v, lane), grouped.axis: g})

    def group(self, grouped: GroupedSum, acc: Buffer, g: Dim, factor: Factor) -> Stmt:
        planes, axis, shape = grouped.num_planes, grouped.axis, self.origin.shape
        exact = local("exact", shape.rows * planes, shape.vectors, shape.lanes, dtype=DType.I32)

        def term(m: Dim, v: Dim, lane: Dim) -> _Term:
            return _term(grouped, lambda i: Load(exact, (m * planes + i, v, lane)), {**self.origin.at(m, v, lane), axis: g})

        def begin(m: Dim, v: Dim, lane: Dim) -> Stmt:
            return seq(*(Store(place.buffer, place.indices, value) for place, value in term(m, v, lane).begins))

        def add(m: Dim, v: Dim, lane: Dim) -> Stmt:
            value = Apply(Fn.FMA, (term(m, v, lane).exact, factor(m, v, lane), Load(acc, (m, v, lane))))
            return Store(acc, (m, v, lane), value)

        start = grouped.first.substitute({axis: g})
        dot = _dot(self.tile, grouped, self.origin, Load(exact, _CORNER[1:]), (start, Dim.of(grouped.group)))
        return allocated([exact], seq(self.origin.each(begin), dot, self.origin.each(add)))


@dataclass(frozen=True, slots=True)
class _Rows:
    """A block of rows where one group is all of k: its exact sums wait in memory while a matrix unit goes through parts of it."""

    product: IntegerProduct
    tile: ProductTile
    blocks: Blocks

    def body(self, claim: Claim, first: Dim, rows: int, count: Dim) -> Stmt:
        sums, shape = self.product.sums, self.tile.shape
        planes = sums[0].num_planes
        size = (self.blocks.together, BLOCK_ROWS * planes, shape.vectors, shape.lanes)
        exact = [local(f"exact{i}", *size, dtype=DType.I32) for i in range(len(sums))]

        def origin(panel: Dim, row: Dim, height: int) -> TileOrigin:
            return TileOrigin(self.product.nest, self.product.row_axis, replace(shape, rows=height), claim.point, panel, row)

        def each_row(body: Callable[[TileOrigin, list[_Term], Dim, Dim], Stmt]) -> Stmt:
            def at(m: Dim, panel: Dim) -> Stmt:
                line = origin(panel, first + m, 1)

                def one(v: Dim, lane: Dim) -> Stmt:
                    def term(grouped: GroupedSum, sum_: Buffer) -> _Term:
                        place = {**line.at(Dim.of(0), v, lane), grouped.axis: Dim.of(0)}
                        return _term(grouped, lambda i: Load(sum_, (panel - claim.panel, m * planes + i, v, lane)), place)

                    return body(line, [term(s, e) for s, e in zip(sums, exact, strict=True)], v, lane)

                return line.vectors(one)

            return loop("m", count * rows, lambda m: claim.each(lambda panel: at(m, panel)))

        def begin(_: TileOrigin, terms: list[_Term], v: Dim, lane: Dim) -> Stmt:
            return seq(*(Store(place.buffer, place.indices, value) for t in terms for place, value in t.begins))

        def finish(line: TileOrigin, terms: list[_Term], v: Dim, lane: Dim) -> Stmt:
            def result(scalar: Scalar) -> Scalar:
                number = self.product.number_of(scalar)
                return scalar if number is None else Apply(Fn.FMA, (terms[number].exact, terms[number].factor, zero(DType.F32)))

            return line.store(Dim.of(0), v, lane, result)

        def tiles(panel: Dim, io: Dim, part: Part) -> list[Tile]:
            place, below = (panel - claim.panel, io * (rows * planes), *_CORNER[2:]), origin(panel, first + io * rows, rows)
            return [_dot(self.tile, s, below, Load(e, place), (part.begin, part.depth)) for s, e in zip(sums, exact, strict=True)]

        configured = _configuring(self.tile, sums[0], rows)
        return allocated(exact, seq(each_row(begin), *configured, self.blocks.walk(claim, count, tiles), each_row(finish)))


# --- pieces ------------------------------------------------------------------------------------------------------------

_CORNER = (Dim.of(0), Dim.of(0), Dim.of(0), Dim.of(0))  # of exact sums by panel, row and plane, vector and lane


@dataclass(frozen=True, slots=True)
class _Term:
    """What a group adds: exact sums times a factor; and what each of those begins with."""

    exact: Scalar
    factor: Scalar
    begins: tuple[tuple[Load, Scalar], ...]


def _term(grouped: GroupedSum, exact: Callable[[int], Load], place: dict[DimVar, Dim]) -> _Term:
    node, sums = grouped.node, [exact(i) for i in range(grouped.num_planes)]
    begins = node.begins or [zero(DType.I32)] * len(sums)
    found = tuple((total, rewrite_dims(begin, place)) for total, begin in zip(sums, begins, strict=True))
    return _Term(rewrite_dims(node.exact(sums), place), rewrite_dims(node.factor, place), found)


def _configuring(tile: ProductTile, grouped: GroupedSum, rows: int) -> list[Tile]:
    return configuring(tile, rows * grouped.num_planes)


def _dot(tile: ProductTile, grouped: GroupedSum, origin: TileOrigin, exact: Load, part: tuple[Dim, Dim]) -> Tile:
    """Add a part (begin, depth) of k to exact sums."""
    q, (begin, depth) = grouped.q, part
    row = tuple(d.substitute(origin.at(*_CORNER[1:])) for d in q.indices[:-2])
    left = Load(q.buffer, (*row, Dim.of(0), begin))
    right = Load(grouped.panels, (origin.panel, begin // grouped.format.depth, Dim.of(0)))
    op = tile.product(origin.shape.rows * grouped.num_planes)
    return Tile(op, (exact, left, right), (depth, q.buffer.shape[-1]))
