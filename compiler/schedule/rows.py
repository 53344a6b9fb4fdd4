"""Reductions along rows, and what follows from them: sums, maxima, softmax, norms.

Takes stages that share their leading axes, the *row*: each stage either folds along the row into a number per row, or writes elements of
the row. A thread does all stages of a row while the row is in cache; numbers per row live in registers.

A fold keeps PARTS vectors of partial results, or fewer that hold a whole short row, element `r` in lane `r mod (parts * width)`; at the end
the parts are folded into one another and the lanes by halves. The order depends on the length of the row alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.ir.dims import Dim, DimVar, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops import (
    Allocate,
    Apply,
    Buffer,
    Fn,
    Load,
    PrimFunc,
    Reduce,
    ReduceFn,
    Scalar,
    Scope,
    Stmt,
    Store,
    Tile,
    dtype_of,
    identity,
)
from compiler.ir.visit_loops import loads, map_scalar, replace_loads, rewrite_dims, statements, walk_scalar
from compiler.schedule.matmul import reduces_in
from compiler.schedule.nests import (
    PerfectNest,
    below,
    halves,
    lanes,
    loop,
    named,
    parallel,
    perfect_nest,
    product_of,
    seq,
    unravel,
    unroll,
    when,
    without_allocations,
)
from compiler.schedule.same import same_scalar
from compiler.schedule.spatial import SpatialNest, store_at, vectors

PARTS = 4  # independent chains, so that a fold waits for memory and not for its own additions

_COSTLY = (Fn.EXP, Fn.LOG, Fn.TANH, Fn.ERF, Fn.SIN, Fn.COS, Fn.POW)
_COMBINE = {ReduceFn.SUM: Fn.ADD, ReduceFn.PROD: Fn.MUL, ReduceFn.MAX: Fn.MAX, ReduceFn.MIN: Fn.MIN}


@dataclass(frozen=True, slots=True)
class RowStage:
    nest: PerfectNest
    folds: tuple[Reduce, ...]  # along the row
    inner: tuple[DimVar, Dim] | None  # the axis along which elements are written; None: one number per row
    keeps: Buffer | None = None  # where the folded values are left for the last stage, which needs them again


@dataclass(frozen=True, slots=True)
class RowProgram:
    row: tuple[tuple[DimVar, Dim], ...]  # of the first stage; the others' are renamed to it
    stages: tuple[RowStage, ...]
    temporaries: tuple[Buffer, ...]  # one number per row each


def match_rows(prim: PrimFunc) -> RowProgram | None:
    """The longest common row such that every fold runs along the rest; None when there is no fold or no such row."""
    temporaries, body = without_allocations(prim.body)
    nests = [perfect_nest(s) for s in statements(body)]
    if any(n is None for n in nests):
        return None
    found = [n for n in nests if n is not None]
    folding = [n for n in found if reduces_in(n.store.value)]
    if not folding:
        return None
    rank = len(folding[0].axes)
    if any(len(n.axes) not in (rank, rank + 1) for n in found):
        return None
    if any(len(n.axes) != rank for n in folding if n.store.buffer in temporaries):
        return None
    row = folding[0].axes[:rank]
    program: list[RowStage] = []
    for nest in found:
        if [e for _, e in nest.axes[:rank]] != [e for _, e in row]:
            return None
        folds = tuple(reduces_in(nest.store.value))
        if any(f.fn not in _COMBINE or len(f.axes) != 1 for f in folds):
            return None
        inner = nest.axes[rank] if len(nest.axes) > rank else None
        if folds and inner is not None:
            return None
        if nest.store.buffer in temporaries and [i.var for i in nest.store.indices] != list(nest.vars):
            return None
        program.append(RowStage(nest, folds, inner))
    return RowProgram(row, tuple(program), temporaries)


def schedule_rows(prim: PrimFunc, width: int) -> PrimFunc | None:
    program = match_rows(prim)
    if program is None:
        return None
    return PrimFunc(prim.params, prim.num_outputs, _Rows(_kept(program), width).body(), {**prim.attrs, "schedule": "rows"})


def _kept(program: RowProgram) -> RowProgram:
    """Softmax sums the exponentials that it then divides: a fold leaves such values in the output, and the last stage takes them from
    there instead of computing them again."""
    *before, last = program.stages
    out = last.nest.store.buffer
    at = tuple(Dim.of(v) for v in last.nest.vars)
    if last.inner is None or out.dtype is not DType.F32 or last.nest.store.indices != at:
        return program
    if any(load.buffer is out for stage in program.stages for load in loads(stage.nest.store.value)):
        return program
    for number, stage in enumerate(before):
        if len(stage.folds) != 1 or not any(isinstance(s, Apply) and s.fn in _COSTLY for s in walk_scalar(stage.folds[0].value)):
            continue
        axis = stage.folds[0].axes[0][0]
        names = {**dict(zip(stage.nest.vars, at, strict=False)), axis: at[-1]}
        value = rewrite_dims(stage.folds[0].value, names)
        taken = map_scalar(last.nest.store.value, lambda s, v=value: Load(out, at) if same_scalar(s, v) else s)
        if taken is not last.nest.store.value:
            nest = replace(last.nest, store=Store(out, at, taken))
            done = (*before[:number], replace(stage, keeps=out), *before[number + 1 :], replace(last, nest=nest))
            return replace(program, stages=done)
    return program


@dataclass(frozen=True, slots=True)
class _Rows:
    program: RowProgram
    width: int

    def body(self) -> Stmt:
        row = self.program.row
        axes = [(v.name, e) for v, e in row]
        return parallel("p", product_of([e for _, e in row]), lambda p: unravel(p, axes, self.row_of))

    def row_of(self, point: list[Dim]) -> Stmt:
        """All stages of one row. While elements of the row are written, the next row is fetched: memory does not wait for arithmetic.
        It waits in the second cache, since the first holds this row."""
        if not point or not any(self.row_buffers(stage.nest) for stage in self.program.stages if stage.inner is not None):
            return self.staged(point, point)  # the only row there is, or nothing of the next one that is worth fetching
        extent = self.program.row[-1][1]
        return named("next", dim_min(point[-1] + 1, extent - 1), extent - 1, lambda after: self.staged(point, [*point[:-1], after]))

    def staged(self, point: list[Dim], after: list[Dim]) -> Stmt:
        numbers = {t: Buffer(t.name, (Dim.of(1),), t.dtype, Scope.LOCAL) for t in self.program.temporaries}
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
            spatial = SpatialNest((stage.inner,), (), nest.store)
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
        dtype, combine = dtype_of(reduce), _COMBINE[reduce.fn]
        num_parts = next(n for n in (1, 2, PARTS) if n == PARTS or (length.is_const and length.const <= n * width))
        partial = Buffer("partial", (Dim.of(num_parts), Dim.of(width)), dtype, Scope.LOCAL)

        def add(part: Dim, lane: Dim, index: Dim) -> Stmt:
            value = rewrite_dims(reduce.value, {**point, axis: index})
            if kept is None:
                return Store(partial, (part, lane), Apply(combine, (Load(partial, (part, lane)), value)))
            buffer, row = kept
            leave = Store(buffer, (*row, index), value)
            return seq(leave, Store(partial, (part, lane), Apply(combine, (Load(partial, (part, lane)), Load(buffer, (*row, index))))))

        def parts(start: Dim) -> Stmt:
            return unroll("u", num_parts, lambda u: lanes(width, lambda lane: add(u, lane, start + u * width + lane)))

        step = num_parts * width
        edge = length // step * step

        def last(u: Dim) -> Stmt:
            start = edge + u * width
            masked = lanes(width, lambda lane: when(below(start + lane, length), add(u, lane, start + lane)))
            return when(below(start, length), masked)

        clear = unroll("u", num_parts, lambda u: lanes(width, lambda lane: Store(partial, (u, lane), identity(reduce.fn, dtype))))
        main = loop("c", length // step, lambda c: parts(c * step))
        rest = [] if length.is_const and length.const % step == 0 else [unroll("u", num_parts, last)]
        body = seq(clear, main, *rest, *halves(partial, combine))
        return Allocate(partial, seq(body, Store(result, (Dim.of(0),), Load(partial, (Dim.of(0), Dim.of(0))))))


def _fetch(buffers: list[Buffer], row: list[Dim], start: Dim) -> list[Stmt]:
    return [Tile("prefetch", (Load(b, (*row, start)),), attrs={"far": True}) for b in buffers]


def _replace(value: Scalar, results: dict[Reduce, Buffer]) -> Scalar:
    return map_scalar(value, lambda s: Load(results[s], (Dim.of(0),)) if isinstance(s, Reduce) and s in results else s)
