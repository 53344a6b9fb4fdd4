"""Where a tile lies in the result of a product: what its rows and columns are in the axes of the nest, and how its results are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiler.backends.cpu.schedule.nests import below, lanes, unroll, when
from compiler.idioms.nest import PerfectNest
from compiler.ir.dims import Dim, DimVar
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import Stmt, Store
from compiler.ir.loops.visit import map_scalar, rewrite_dims
from compiler.ir.prove import prove_divisible
from compiler.machine.products import TileShape


@dataclass(frozen=True, slots=True)
class TileOrigin:
    """`shape.rows` rows from `first` on and the columns of `panel`; the other axes are at `point`."""

    nest: PerfectNest
    row_axis: DimVar | None
    shape: TileShape
    point: dict[DimVar, Dim]
    panel: Dim
    first: Dim

    def column(self, v: Dim, lane: Dim) -> Dim:
        return self.panel * self.shape.columns + v * self.shape.lanes + lane

    def at(self, m: Dim, v: Dim, lane: Dim) -> dict[DimVar, Dim]:
        place = {**self.point, self.nest.vars[-1]: self.column(v, lane)}
        return place if self.row_axis is None else {**place, self.row_axis: self.first + m}

    def vectors(self, body: Callable[[Dim, Dim], Stmt]) -> Stmt:
        return unroll("v", self.shape.vectors, lambda v: lanes(self.shape.lanes, lambda lane: body(v, lane)))

    def each(self, body: Callable[[Dim, Dim, Dim], Stmt]) -> Stmt:
        return unroll("m", self.shape.rows, lambda m: self.vectors(lambda v, lane: body(m, v, lane)))

    @property
    def whole(self) -> bool:
        """No panel reaches beyond the last column."""
        return prove_divisible(self.num_columns, self.shape.columns)

    @property
    def num_columns(self) -> Dim:
        return self.nest.axes[-1][1]

    def inside(self, v: Dim, lane: Dim) -> Scalar:
        return below(self.column(v, lane), self.num_columns)

    def store(self, m: Dim, v: Dim, lane: Dim, sums: Callable[[Scalar], Scalar]) -> Stmt:
        """The nest's store, where `sums` puts the accumulators in the place of reductions."""
        store, place = self.nest.store, self.at(m, v, lane)
        value = rewrite_dims(map_scalar(store.value, sums), place)
        put = Store(store.buffer, tuple(d.substitute(place) for d in store.indices), value)
        return put if self.whole else when(self.inside(v, lane), put)
