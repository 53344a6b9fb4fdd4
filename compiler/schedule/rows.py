"""Reductions along rows, and what follows from them: sums, maxima, softmax, norms.

Takes stages that share their leading axes, the *row*: each stage either folds along the row into a number per row, or writes elements of
the row. A thread does all stages of a row while the row is in cache; numbers per row live in registers.

A fold keeps PARTS vectors of partial results, or fewer that hold a whole short row, element `r` in lane `r mod (parts * width)`; at the end
the parts are folded into one another and the lanes by halves. The order depends on the length of the row alone. The two folds of a softmax
go along the row together (compiler/schedule/softmax.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.dims import Dim, DimVar, dim_min
from compiler.ir.loops import (
    Allocate,
    Apply,
    Buffer,
    Load,
    PrimFunc,
    Reduce,
    Scalar,
    Scope,
    Stmt,
    Store,
    Tile,
    dtype_of,
    identity,
)
from compiler.ir.visit_loops import loads, map_scalar, replace_loads, rewrite_dims
from compiler.schedule.nests import (
    PerfectNest,
    halves,
    lanes,
    named,
    parallel,
    product_of,
    seq,
    sweep,
    unravel,
    unroll,
)
from compiler.schedule.row_form import COMBINE, PARTS, RowProgram, RowStage, keeping, match_rows
from compiler.schedule.softmax import Softmax, match_softmax
from compiler.schedule.spatial import SpatialNest, store_at, vectors


def schedule_rows(prim: PrimFunc, width: int) -> PrimFunc | None:
    program = match_rows(prim)
    if program is None:
        return None
    program = keeping(program)
    rows = _Rows(program, match_softmax(program), width)
    return PrimFunc(prim.params, prim.num_outputs, rows.body(), {**prim.attrs, "schedule": "rows"})


@dataclass(frozen=True, slots=True)
class _Rows:
    program: RowProgram
    softmax: Softmax | None
    width: int

    def body(self) -> Stmt:
        row = self.program.row
        axes = [(v.name, e) for v, e in row]
        return parallel("p", product_of([e for _, e in row]), lambda p: unravel(p, axes, self.row_of))

    def row_of(self, point: list[Dim]) -> Stmt:
        """All stages of one row. While elements of the row are written, the next row is fetched: memory does not wait for arithmetic.
        It waits in the second cache, since the first holds this row."""
        ahead = any(self.row_buffers(stage.nest) for stage in self.program.stages if stage.inner is not None)
        if not point or not ahead or self.softmax is not None:
            return self.staged(point, point)  # the only row there is, or nothing of the next one that is worth fetching
        extent = self.program.row[-1][1]
        return named("next", dim_min(point[-1] + 1, extent - 1), extent - 1, lambda after: self.staged(point, [*point[:-1], after]))

    def staged(self, point: list[Dim], after: list[Dim]) -> Stmt:
        numbers = {t: Buffer(t.name, (Dim.of(1),), t.dtype, Scope.LOCAL) for t in self.program.temporaries}
        if self.softmax is not None:
            body = self.softmax.row(point, self.width, numbers)
        else:
            body = seq(*(self.stage(stage, point, after, numbers) for stage in self.program.stages))
        for temporary, number in numbers.items():
            body = replace_loads(body, temporary, lambda _, n=number: Load(n, (Dim.of(0),)))
        for number in reversed(list(numbers.values())):
            body = Allocate(number, body)
        return body

    def stage(self, stage: RowStage, point: list[Dim], after: list[Dim], numbers: dict[Buffer, Buffer]) -> Stmt:
        nest = stage.nest
        mapping = dict(zip(nest.vars, point, strict=False))
        if stage.inner is not None:
            spatial = SpatialNest(nest.axes, (), nest.store)
            rows = self.row_buffers(nest)
            return vectors(spatial, mapping, Dim.of(0), stage.inner[1], self.width, lambda start: _fetch(rows, after, start))
        results = {fold: Buffer("fold", (Dim.of(1),), dtype_of(fold), Scope.LOCAL) for fold in stage.folds}
        folds = [self.fold(fold, result, mapping, stage.keeps and (stage.keeps, point)) for fold, result in results.items()]
        value = _replace(nest.store.value, results)
        number = numbers.get(nest.store.buffer)
        store = Store(nest.store.buffer, nest.store.indices, value) if number is None else Store(number, (Dim.of(0),), value)
        body = seq(*folds, store_at(store, mapping))
        for result in results.values():
            body = Allocate(result, body)
        return body

    def row_buffers(self, nest: PerfectNest) -> list[Buffer]:
        """What the elements are made of that lies in memory as they do: row by row. What they replace is in the cache already."""
        at = tuple(Dim.of(v) for v in nest.vars)
        read = dict.fromkeys(load.buffer for load in loads(nest.store.value) if load.indices == at)
        return [buffer for buffer in read if buffer is not nest.store.buffer]

    def fold(self, reduce: Reduce, result: Buffer, point: dict[DimVar, Dim], kept: tuple[Buffer, list[Dim]] | None) -> Stmt:
        (axis, length), width = reduce.axes[0], self.width
        length = length.substitute(point)
        dtype, combine = dtype_of(reduce), COMBINE[reduce.fn]
        num_parts = next(n for n in (1, 2, PARTS) if n == PARTS or (length.is_const and length.const <= n * width))
        partial = Buffer("partial", (Dim.of(num_parts), Dim.of(width)), dtype, Scope.LOCAL)

        def add(part: Dim, lane: Dim, index: Dim) -> Stmt:
            value = rewrite_dims(reduce.value, {**point, axis: index})
            if kept is None:
                return Store(partial, (part, lane), Apply(combine, (Load(partial, (part, lane)), value)))
            buffer, row = kept
            leave = Store(buffer, (*row, index), value)
            return seq(leave, Store(partial, (part, lane), Apply(combine, (Load(partial, (part, lane)), Load(buffer, (*row, index))))))

        clear = unroll("u", num_parts, lambda u: lanes(width, lambda lane: Store(partial, (u, lane), identity(reduce.fn, dtype))))
        body = seq(clear, sweep(Dim.of(0), length, num_parts, width, add), *halves(partial, combine))
        return Allocate(partial, seq(body, Store(result, (Dim.of(0),), Load(partial, (Dim.of(0), Dim.of(0))))))


def _fetch(buffers: list[Buffer], row: list[Dim], start: Dim) -> list[Stmt]:
    return [Tile("prefetch", (Load(b, (*row, start)),), attrs={"far": True}) for b in buffers]


def _replace(value: Scalar, results: dict[Reduce, Buffer]) -> Scalar:
    return map_scalar(value, lambda s: Load(results[s], (Dim.of(0),)) if isinstance(s, Reduce) and s in results else s)
