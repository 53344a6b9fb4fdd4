"""What stages of a kernel must look like to be done row by row."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Fn, Load, PrimFunc, Reduce, ReduceFn, Store
from compiler.ir.visit_loops import loads, map_scalar, rewrite_dims, statements, walk_scalar
from compiler.schedule.matmul import reduces_in
from compiler.schedule.nests import PerfectNest, perfect_nest, without_allocations
from compiler.schedule.same import same_scalar

PARTS = 4  # independent chains, so that a fold waits for memory and not for its own additions

_COSTLY = (Fn.EXP, Fn.LOG, Fn.TANH, Fn.ERF, Fn.SIN, Fn.COS, Fn.POW)
COMBINE = {ReduceFn.SUM: Fn.ADD, ReduceFn.PROD: Fn.MUL, ReduceFn.MAX: Fn.MAX, ReduceFn.MIN: Fn.MIN}


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
        if any(f.fn not in COMBINE or len(f.axes) != 1 for f in folds):
            return None
        inner = nest.axes[rank] if len(nest.axes) > rank else None
        if folds and inner is not None:
            return None
        if nest.store.buffer in temporaries and [i.var for i in nest.store.indices] != list(nest.vars):
            return None
        program.append(RowStage(nest, folds, inner))
    return RowProgram(row, tuple(program), temporaries)


def keeping(program: RowProgram) -> RowProgram:
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
