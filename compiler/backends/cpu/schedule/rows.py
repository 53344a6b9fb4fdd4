"""Reductions along rows, and what follows from them: sums, maxima, softmax, norms.

Takes stages that share their leading axes, the *row*: each stage either folds along the row into a number per row, or writes elements of
the row. A thread does all stages of a row while the row is in cache; numbers per row live in registers. What the stages leave of a row may
itself be taken in parts, each a row of its own: a norm, and then the rounding of groups of what it gives.

A fold keeps PARTS vectors of partial results, or fewer that hold a whole short row, element `r` in lane `r mod (parts * width)`; at the end
the parts are folded into one another and the lanes by halves. The order depends on the length of the row alone. The two folds of a softmax
go along the row together (compiler/backends/cpu/schedule/softmax.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.nests import halves, lanes, loop, named, parallel, seq, sweep, unravel, unroll, when
from compiler.backends.cpu.schedule.softmax import Softmax, match_softmax
from compiler.backends.cpu.schedule.spatial import SpatialNest, store_at, vectors
from compiler.forms.nest import allocated
from compiler.forms.rows import COMBINE, PARTS, RowProgram, RowStage, keeping, match_rows
from compiler.ir.dims import Dim, DimVar, dim_min, product_of
from compiler.ir.loops import (
    Allocate,
    Apply,
    Buffer,
    Fn,
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
from compiler.ir.visit_loops import free_dims, loads, map_scalar, replace_loads, rewrite_dims


def schedule_rows(prim: PrimFunc, width: int) -> PrimFunc | None:
    program = match_rows(prim.body)
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
        """All stages of one row. Meanwhile the next row is fetched: memory does not wait for arithmetic. It waits in the second cache,
        since the first holds this row. Every stage that reads it asks for all of it: a core drops requests while it has many."""
        written = [stage for stage in self.program.stages if stage.inner is not None]
        if self.softmax is not None or not point or not any(self.row_by_row(s.nest.store.value, s.nest.vars) for s in written):
            return self.staged(point, None)  # it is in memory's way already, or there is nothing that is worth fetching
        extent = self.program.row[-1][1]
        return named("next", dim_min(point[-1] + 1, extent - 1), extent - 1, lambda after: self.staged(point, [*point[:-1], after]))

    def staged(self, point: list[Dim], after: list[Dim] | None) -> Stmt:
        numbers = {t: Buffer(t.name, (Dim.of(1),), t.dtype, Scope.LOCAL) for t in self.program.temporaries}
        if self.softmax is not None:
            body = self.softmax.row(point, self.width, numbers)
        else:
            body = seq(*(self.stage(stage, point, after, numbers) for stage in self.program.stages), *self.parts(point))
        for temporary, number in numbers.items():
            body = replace_loads(body, temporary, lambda _, n=number: Load(n, (Dim.of(0),)))
        line = self.program.line
        return allocated([*([] if line is None else [line]), *numbers.values()], body)

    def parts(self, point: list[Dim]) -> list[Stmt]:
        parts = self.program.parts
        if parts is None:
            return []
        rows = _Rows(parts, None, self.width)
        return [loop("part", parts.row[-1][1], lambda part: rows.staged([*point, part], None))]

    def stage(self, stage: RowStage, point: list[Dim], after: list[Dim] | None, numbers: dict[Buffer, Buffer]) -> Stmt:
        nest = stage.nest
        mapping = dict(zip(nest.vars, point, strict=False))
        if stage.inner is not None:
            return self.written(nest.store, stage, point, after)
        results = {fold: Buffer("fold", (Dim.of(1),), dtype_of(fold), Scope.LOCAL) for fold in stage.folds}
        kept = stage.keeps and (stage.keeps, point)
        folds = [
            self.fold(fold, result, mapping, kept, self.fetch(fold.value, (*nest.vars, fold.axes[0][0]), after))
            for fold, result in results.items()
        ]
        value = _replace(nest.store.value, results)
        number = numbers.get(nest.store.buffer)
        store = Store(nest.store.buffer, nest.store.indices, value) if number is None else Store(number, (Dim.of(0),), value)
        body = seq(*folds, store_at(store, mapping))
        for result in results.values():
            body = Allocate(result, body)
        return body

    def written(self, store: Store, stage: RowStage, point: list[Dim], after: list[Dim] | None) -> Stmt:
        """Elements of a row; a choice that is the same for all of them is made once."""
        nest, value, mapping = stage.nest, store.value, dict(zip(stage.nest.vars, point, strict=False))
        assert stage.inner is not None
        if isinstance(value, Apply) and value.fn is Fn.SELECT and stage.inner[0] not in free_dims(value.args[0]):
            cond, *sides = value.args
            return when(rewrite_dims(cond, mapping), *(self.written(replace(store, value=side), stage, point, after) for side in sides))
        own = store.buffer is self.program.line
        again = own or any(load.buffer is store.buffer for other in self.program.stages for load in loads(other.nest.store.value))
        fetch = self.fetch(value, nest.vars, after)
        return vectors(SpatialNest(nest.axes, (), store), mapping, Dim.of(0), stage.inner[1], self.width, fetch, read_again=again)

    def fetch(self, value: Scalar, axes: Sequence[DimVar], after: list[Dim] | None) -> Callable[[Dim], list[Stmt]]:
        """What the value is made of, of the next row, a vector from the given element on."""
        buffers = self.row_by_row(value, axes) if after is not None else []
        return lambda start: [Tile("prefetch", (Load(b, (*(after or ()), start)),), attrs={"far": True}) for b in buffers]

    def row_by_row(self, value: Scalar, axes: Sequence[DimVar]) -> list[Buffer]:
        """What lies in memory as it is gone through. What the kernel writes needs no reading."""
        at, written = tuple(map(Dim.of, axes)), {stage.nest.store.buffer for stage in self.program.stages}
        return [buffer for buffer in dict.fromkeys(s.buffer for s in loads(value) if s.indices == at) if buffer not in written]

    def fold(
        self,
        reduce: Reduce,
        result: Buffer,
        point: dict[DimVar, Dim],
        kept: tuple[Buffer, list[Dim]] | None,
        fetch: Callable[[Dim], list[Stmt]],
    ) -> Stmt:
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
        body = seq(clear, sweep(Dim.of(0), length, num_parts, width, add, fetch), *halves(partial, combine))
        return Allocate(partial, seq(body, Store(result, (Dim.of(0),), Load(partial, (Dim.of(0), Dim.of(0))))))


def _replace(value: Scalar, results: dict[Reduce, Buffer]) -> Scalar:
    return map_scalar(value, lambda s: Load(results[s], (Dim.of(0),)) if isinstance(s, Reduce) and s in results else s)
