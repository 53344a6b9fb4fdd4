"""Products of quantised numbers: sums of a group on the machine's integer units, groups added in order in f32.

Takes a nest whose value contains `sum(g) dots * factor` as ops/integer.py writes it, where a dot is the sum of one group of k, or two of
them (planes of the rows); any epilogue around, and several such sums over the same rows (gate and up).

A tile sums a group exactly in i32, so its shape cannot change a bit; f32 accumulators take the groups one after another. The rows of all
planes are rows of the tile: they share what it reads of the panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Cast, Fn, Load, PrimFunc, Reduce, ReduceFn, Scalar, Scope, Stmt, Store, Tile, dtype_of
from compiler.ir.visit_loops import loads, map_scalar, rewrite_dims
from compiler.ops.integer import FOUR, panel_element
from compiler.schedule.matmul import distinct, reduces_in
from compiler.schedule.nests import PerfectNest, allocated, loop, perfect_nest, seq, zero
from compiler.schedule.panels import Panels
from compiler.schedule.same import same_scalar
from compiler.schedule.spot import Spot, TileShape


@dataclass(frozen=True, slots=True)
class Plane:
    """`sum(r in group) q[.., row, plane, k] * panels[k, column]`, in i32, and what is added to it."""

    reduce: Reduce
    q: Load
    panels: Buffer
    bits: int

    @property
    def group(self) -> int:
        return self.reduce.axes[0][1].const

    @property
    def first(self) -> Dim:
        """k where the group begins."""
        return self.q.indices[-1].substitute({self.reduce.axes[0][0]: 0})


@dataclass(frozen=True, slots=True)
class GroupedSum:
    """`sum(g) dot * factor`."""

    reduce: Reduce
    planes: tuple[Plane, ...]

    @property
    def num_groups(self) -> Dim:
        return self.reduce.axes[0][1]

    @property
    def bits(self) -> int:
        return self.planes[0].bits


@dataclass(frozen=True, slots=True)
class IntegerProduct:
    nest: PerfectNest
    sums: tuple[GroupedSum, ...]
    row_axis: DimVar | None

    @property
    def column_axis(self) -> DimVar:
        return self.nest.vars[-1]

    @property
    def columns(self) -> int:
        """Of a panel, as the weights are laid out."""
        return self.sums[0].planes[0].panels.shape[-1].const // FOUR


@dataclass(frozen=True, slots=True)
class IntegerTile:
    """An intrinsic for sums of groups that are multiples of `depth`, of weights of such `bits`."""

    intrinsic: str
    shape: TileShape
    bits: tuple[int, ...]
    depth: int = FOUR
    configure: str | None = None  # the intrinsic that tells the unit the height of tiles

    def fits(self, product: IntegerProduct) -> bool:
        planes = [p for s in product.sums for p in s.planes]
        return product.columns == self.shape.columns and all(p.bits in self.bits and p.group % self.depth == 0 for p in planes)


def match_integer(prim: PrimFunc) -> IntegerProduct | None:
    nest = perfect_nest(prim.body)
    if nest is None or not nest.axes or nest.store.indices[-1].var is not nest.vars[-1]:
        return None
    found = [_grouped(r, nest) for r in distinct(reduces_in(nest.store.value))]
    sums = tuple(s for s in found if s is not None)
    if not sums or len(sums) != len(found) or len({(s.num_groups, len(s.planes), s.planes[0].panels.shape[-1]) for s in sums}) > 1:
        return None
    rows = sums[0].planes[0].q.indices[:-2]
    if any(list(p.q.indices[:-2]) != list(rows) for s in sums for p in s.planes):
        return None
    return IntegerProduct(nest, sums, rows[-1].var if rows else None)


def _grouped(reduce: Reduce, nest: PerfectNest) -> GroupedSum | None:
    value = reduce.value
    if reduce.fn is not ReduceFn.SUM or len(reduce.axes) != 1 or not (isinstance(value, Apply) and value.fn is Fn.MUL):
        return None
    found = [_plane(r, nest) for r in reduces_in(value)]
    planes = tuple(p for p in found if p is not None)
    if not planes or len(planes) != len(found):
        return None
    first = planes[0]
    alike = all((p.q.buffer, p.panels, p.group, p.first) == (first.q.buffer, first.panels, first.group, first.first) for p in planes)
    in_order = [p.q.indices[-2] for p in planes] == [Dim.of(i) for i in range(len(planes))]
    return GroupedSum(reduce, planes) if alike and in_order and first.q.buffer.shape[-2] == Dim.of(len(planes)) else None


def _plane(reduce: Reduce, nest: PerfectNest) -> Plane | None:
    value = reduce.value
    if reduce.fn is not ReduceFn.SUM or len(reduce.axes) != 1 or dtype_of(value) is not DType.I32 or not reduce.axes[0][1].is_const:
        return None
    if not (isinstance(value, Apply) and value.fn is Fn.MUL and isinstance(value.args[0], Cast) and isinstance(value.args[0].value, Load)):
        return None
    q, panels = value.args[0].value, {load.buffer for load in loads(value.args[1])}
    if (
        len(panels) != 1
        or q.buffer.dtype is not DType.I8
        or len(q.indices) < 2
        or not set(q.indices[:-2]) <= {Dim.of(v) for v in nest.vars[:-1]}
    ):
        return None
    (panel,) = panels
    for bits in (8, 4):
        if same_scalar(value.args[1], panel_element(panel, bits, Dim.of(nest.vars[-1]), q.indices[-1])):
            return Plane(reduce, q, panel, bits)
    return None


def schedule_integer(prim: PrimFunc, tiles: Sequence[IntegerTile]) -> PrimFunc | None:
    """By the first tile that fits."""
    product = match_integer(prim)
    tile = next((t for t in tiles if product is not None and t.fits(product)), None)
    if product is None or tile is None:
        return None
    return PrimFunc(prim.params, prim.num_outputs, _Schedule(product, tile).body(), {**prim.attrs, "schedule": "integer"})


@dataclass(frozen=True, slots=True)
class _Schedule:
    product: IntegerProduct
    tile: IntegerTile

    def body(self) -> Stmt:
        p, shape = self.product, self.tile.shape
        return Panels(p.nest, p.row_axis, shape.columns, 1 if p.row_axis is None else shape.rows).walk(self.kernel)

    def kernel(self, point: dict[DimVar, Dim], panel: Dim, first: Dim, rows: int) -> Stmt:
        p = self.product
        return _Kernel(p.sums, Spot(p.nest, p.row_axis, replace(self.tile.shape, rows=rows), point, panel, first), self.tile).body()


@dataclass(frozen=True, slots=True)
class _Kernel:
    """One panel and some rows: each sum is done for all of k before the next begins."""

    sums: tuple[GroupedSum, ...]
    spot: Spot
    tile: IntegerTile

    def body(self) -> Stmt:
        accs = [self.local(f"acc{i}", DType.F32) for i in range(len(self.sums))]

        def finish(m: Dim, v: Dim, lane: Dim) -> Stmt:
            def result(scalar: Scalar) -> Scalar:
                found = [a for s, a in zip(self.sums, accs, strict=True) if isinstance(scalar, Reduce) and same_scalar(scalar, s.reduce)]
                return Load(found[0], (m, v, lane)) if found else scalar

            return self.spot.store(m, v, lane, result)

        done = [self.sum(s, acc) for s, acc in zip(self.sums, accs, strict=True)]
        rows = self.spot.shape.rows * len(self.sums[0].planes)
        told = [Tile(self.tile.configure, (), (), {"rows": rows})] if self.tile.configure else []
        return allocated(accs, seq(*told, *done, self.spot.each(finish)))

    def sum(self, grouped: GroupedSum, acc: Buffer) -> Stmt:
        clear = self.spot.each(lambda m, v, lane: Store(acc, (m, v, lane), zero(DType.F32)))
        return seq(clear, loop("g", grouped.num_groups, lambda g: self.group(grouped, acc, g)))

    def group(self, grouped: GroupedSum, acc: Buffer, g: Dim) -> Stmt:
        planes, axis = grouped.planes, grouped.reduce.axes[0][0]
        exact = self.local("exact", DType.I32, len(planes))
        begins: dict[Reduce, Scalar] = {}

        def dot(scalar: Scalar, m: Dim, v: Dim, lane: Dim) -> Scalar:
            """A sum with what is added to it: that is what its accumulator begins with."""
            if isinstance(scalar, Apply) and scalar.fn is Fn.ADD and isinstance(scalar.args[0], Reduce):
                number = next((i for i, p in enumerate(planes) if same_scalar(p.reduce, scalar.args[0])), None)
                if number is not None:
                    begins[planes[number].reduce] = scalar.args[1]
                    return Load(exact, (m * len(planes) + number, v, lane))
            return scalar

        def add(m: Dim, v: Dim, lane: Dim) -> Stmt:
            value = map_scalar(grouped.reduce.value, lambda s: dot(s, m, v, lane))
            assert isinstance(value, Apply) and value.fn is Fn.MUL, value
            a, b = (rewrite_dims(arg, {**self.spot.at(m, v, lane), axis: g}) for arg in value.args)
            return Store(acc, (m, v, lane), Apply(Fn.FMA, (a, b, Load(acc, (m, v, lane)))))

        def begin(m: Dim, v: Dim, lane: Dim) -> Stmt:
            values = [rewrite_dims(begins[p.reduce], {**self.spot.at(m, v, lane), axis: g}) for p in planes]
            return seq(*(Store(exact, (m * len(planes) + i, v, lane), value) for i, value in enumerate(values)))

        added = self.spot.each(add)  # finds what the sums begin with
        return allocated([exact], seq(self.spot.each(begin), self.dot(grouped, exact, g), added))

    def dot(self, grouped: GroupedSum, exact: Buffer, g: Dim) -> Stmt:
        plane, zero_dim = grouped.planes[0], Dim.of(0)
        start = plane.first.substitute({grouped.reduce.axes[0][0]: g})
        row = tuple(d.substitute(self.spot.at(zero_dim, zero_dim, zero_dim)) for d in plane.q.indices[:-2])
        operands = (
            Load(exact, (zero_dim, zero_dim, zero_dim)),
            Load(plane.q.buffer, (*row, zero_dim, start)),
            Load(plane.panels, (self.spot.panel, start // (FOUR * 8 // plane.bits), zero_dim)),
        )
        attrs = {"rows": self.spot.shape.rows * len(grouped.planes), "columns": self.spot.shape.columns, "bits": plane.bits}
        return Tile(self.tile.intrinsic, operands, (Dim.of(plane.group), plane.q.buffer.shape[-1]), attrs)

    def local(self, name: str, dtype: DType, planes: int = 1) -> Buffer:
        shape = self.spot.shape
        return Buffer(name, (Dim.of(shape.rows * planes), Dim.of(shape.vectors), Dim.of(shape.lanes)), dtype, Scope.LOCAL)
