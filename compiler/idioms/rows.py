"""Match kernels whose stages, the statements of their bodies, can be computed row by row. Norms and softmax are such kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from compiler.idioms.nest import PerfectNest, is_rectangular, perfect_nest, without_allocations, writes_apart
from compiler.idioms.product import outermost_folds, without_products
from compiler.idioms.same import same_scalar
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.functions import Fn, ReduceFn
from compiler.ir.loops.scalars import Apply, Load, Reduce, Scalar
from compiler.ir.loops.statements import Stmt, Store
from compiler.ir.loops.visit import loads, map_scalar, replace_loads, rewrite_dims, statements, walk_scalar

PARTS = 4  # number of independent accumulators of a fold, so that additions do not wait for each other
LONGEST_LINE = 1 << 14  # maximum number of elements of a row that a thread stores in memory of its own

_COSTLY = (Fn.EXP, Fn.EXP2, Fn.LOG, Fn.TANH, Fn.ERF, Fn.SIN, Fn.COS, Fn.POW)
COMBINE = {ReduceFn.SUM: Fn.ADD, ReduceFn.PROD: Fn.MUL, ReduceFn.MAX: Fn.MAX, ReduceFn.MIN: Fn.MIN}


@dataclass(frozen=True, slots=True)
class RowStage:
    """A stage of a kernel: a nest that writes one number per row, or writes elements along the row."""

    nest: PerfectNest
    folds: tuple[Reduce, ...]  # folds along the row
    inner: tuple[DimVar, Dim] | None  # axis along which elements are written; None: one number per row
    stored_in: Buffer | None = None  # buffer in which the stage stores the values that it folds, for the last stage to read


@dataclass(frozen=True, slots=True)
class RowProgram:
    """A kernel that can be computed row by row: for each row, its stages run in order."""

    row: tuple[tuple[DimVar, Dim], ...]  # row axes of the first stage that folds; the row axes of other stages are renamed to these
    stages: tuple[RowStage, ...]
    temporaries: tuple[Buffer, ...]  # each holds one number per row
    line: Buffer | None = None  # a row of values in each thread's own memory: a stage writes it, and later stages and `parts` read it
    parts: RowProgram | None = None  # stages on parts of each row, which run after `stages`


def match_rows(body: Stmt) -> RowProgram | None:
    """Match a kernel whose stages all iterate over the same rows, and whose folds run along the row. Stages on parts of each row may
    follow. The axes of the first stage that folds are the row axes. Return None for other kernels."""
    temporaries, body = without_allocations(without_products(body))
    nests = [n for s in statements(body) if (n := perfect_nest(s)) is not None]
    if len(nests) != len(statements(body)):
        return None
    whole = _whole_rows(nests, temporaries)
    if whole is not None and _rows_are_independent(nests, len(whole.row)):
        return whole
    return _rows_in_parts(nests, temporaries)


def folds_in(scalar: Scalar) -> tuple[Reduce, ...]:
    """Return the plain folds of an expression that are not inside another fold."""
    return tuple(f for f in outermost_folds(scalar) if isinstance(f, Reduce))


def _whole_rows(nests: Sequence[PerfectNest], temporaries: tuple[Buffer, ...]) -> RowProgram | None:
    """Match stages on whole rows, each of which writes one number per row, or elements along the row. Return None for other stages, and if
    no stage folds. The caller checks that no row depends on elements that other rows write (`_rows_are_independent`)."""
    folding = [n for n in nests if folds_in(n.store.value)]
    if not folding:
        return None
    rank = len(folding[0].axes)
    if any(len(n.axes) not in (rank, rank + 1) or not is_rectangular(n.axes) for n in nests):
        return None
    if any(len(n.axes) != rank for n in folding if n.store.buffer in temporaries):
        return None
    row = folding[0].axes[:rank]
    program: list[RowStage] = []
    for nest in nests:
        if [e for _, e in nest.axes[:rank]] != [e for _, e in row]:
            return None
        folds = folds_in(nest.store.value)
        if any(f.fn not in COMBINE or len(f.axes) != 1 for f in folds):
            return None
        inner = nest.axes[rank] if len(nest.axes) > rank else None
        if folds and inner is not None:
            return None
        if nest.store.buffer in temporaries and (inner is not None or [i.var for i in nest.store.indices] != list(nest.vars)):
            return None
        program.append(RowStage(nest, folds, inner))
    return RowProgram(row, tuple(program), temporaries)


def _rows_are_independent(nests: Sequence[PerfectNest], rank: int) -> bool:
    """Whether no row reads or writes an element that another row writes, and no iteration of a stage reads an element that another
    iteration of the stage writes. The first `rank` axes of each nest number the rows."""
    return all(writes_apart(nest.axes, nest.store.indices) for nest in nests) and all(
        _is_own_element(nest, place.indices, writer, len(nest.axes) if writer is nest else rank)
        for nest in nests
        for place in (nest.store, *loads(nest.store.value))
        for writer in nests
        if writer.store.buffer is place.buffer
    )


def _is_own_element(nest: PerfectNest, indices: Sequence[Dim], writer: PerfectNest, rank: int) -> bool:
    """Whether `writer` never writes the element that `nest` accesses at `indices`, or only while the first `rank` loops of both nests are
    at the same iteration."""
    places, names = [*zip(writer.store.indices, indices, strict=True)], dict(zip(writer.vars[:rank], nest.vars[:rank], strict=True))
    if any(w.is_const and r.is_const and w != r for w, r in places):
        return True  # the writer writes another part of the buffer, such as another plane
    if all(extent == Dim.of(1) or any(w.var is var and r.var is names[var] for w, r in places) for var, extent in writer.axes[:rank]):
        return True
    # Otherwise, the loop along the row must write the element, such as 4 * g + r: element r of part g of a row in parts of 4 elements.
    loops = [*nest.axes[rank:], *(axis for fold in folds_in(nest.store.value) for axis in fold.axes)]
    along = [{var: v} for var, extent in writer.axes[rank:] for v, e in loops if e == extent] if writer.axes[rank:] else [{}]
    return any(all(w.substitute({**names, **loop}) == r for w, r in places) for loop in along)


def _rows_in_parts(nests: Sequence[PerfectNest], temporaries: tuple[Buffer, ...]) -> RowProgram | None:
    """Match stages on whole rows, followed by stages on parts of each row. A stage on whole rows may write a row of values, which later
    stages read. For example, a norm is followed by the rounding of groups."""
    for i in range(1, len(nests)):
        program = _parted(nests[:i], nests[i:], temporaries)
        if program is not None:
            return program
    return None


def _parted(before: Sequence[PerfectNest], after: Sequence[PerfectNest], temporaries: tuple[Buffer, ...]) -> RowProgram | None:
    """Match stages on whole rows (`before`) and stages on parts of rows (`after`). A row of values that both share moves from a temporary
    to each thread's own memory."""
    rank = next((len(nest.axes) for nest in before if folds_in(nest.store.value)), 0)
    lines = [n.store.buffer for n in before if n.store.buffer in temporaries and len(n.axes) > rank]
    if len(lines) > 1 or not all(line.shape[-1].is_const and line.shape[-1].const <= LONGEST_LINE for line in lines):
        return None
    own = {line: Buffer(line.name, line.shape[-1:], line.dtype, Scope.LOCAL) for line in lines}

    def rows_of(nests: Sequence[PerfectNest]) -> RowProgram | None:
        moved = [n for nest in nests if (n := _with_own_line(nest, own)) is not None]
        written = {n.store.buffer for n in moved}
        return _whole_rows(moved, tuple(t for t in temporaries if t in written)) if len(moved) == len(nests) else None

    whole, parts = rows_of(before), rows_of(after)
    if whole is None or parts is None or any(len(line.shape) - 1 != rank for line in lines):
        return None
    same_rows = [extent for _, extent in parts.row[:-1]] == [extent for _, extent in whole.row]
    if not same_rows or not _rows_are_independent([*before, *after], rank) or not _rows_are_independent(after, rank + 1):
        return None
    return replace(whole, line=next(iter(own.values()), None), parts=parts)


def _with_own_line(nest: PerfectNest, own: Mapping[Buffer, Buffer]) -> PerfectNest | None:
    """Return the nest with accesses to a thread's own row instead of a temporary, or None if it accesses other rows."""
    for line, place in own.items():
        rank = len(line.shape) - 1
        places = [s.indices for s in (nest.store, *loads(nest.store)) if s.buffer is line]
        if any(at[:rank] != tuple(map(Dim.of, nest.vars[:rank])) for at in places):
            return None
        store = replace_loads(nest.store, line, lambda at, place=place, rank=rank: Load(place, at[rank:]))
        assert isinstance(store, Store)
        nest = replace(nest, store=Store(place, store.indices[rank:], store.value) if store.buffer is line else store)
    return nest


def with_own_numbers(program: RowProgram, scope: Scope, outer: Mapping[Buffer, Buffer] = MappingProxyType({})) -> RowProgram:
    """Replace each temporary, which holds one number per row, by a buffer of one number per thread or block, in memory of this scope.
    `outer` maps the temporaries of the whole row to the buffers that already replace them."""
    own = {t: Buffer(t.name, (Dim.of(1),), t.dtype, scope) for t in program.temporaries}
    numbers = {**outer, **own}

    def read(scalar: Scalar) -> Scalar:
        number = numbers.get(scalar.buffer) if isinstance(scalar, Load) else None
        return scalar if number is None else Load(number, (Dim.of(0),))

    def moved(stage: RowStage) -> RowStage:
        store = stage.nest.store
        value, number = map_scalar(store.value, read), numbers.get(store.buffer)
        store = Store(store.buffer, store.indices, value) if number is None else Store(number, (Dim.of(0),), value)
        return replace(stage, nest=replace(stage.nest, store=store), folds=folds_in(value))

    parts = None if program.parts is None else with_own_numbers(program.parts, scope, numbers)
    return replace(program, stages=tuple(map(moved, program.stages)), temporaries=tuple(own.values()), parts=parts)


def with_stored_values(program: RowProgram) -> RowProgram:
    """Let a fold store its costly values in the output, and let the last stage read them there instead of computing them again. For
    example, softmax computes each exponential once, for the sum and for the division. Return the program itself if no fold computes costly
    values that the last stage needs, or if the output cannot hold such values."""
    *before, last = program.stages
    out = last.nest.store.buffer
    at = tuple(Dim.of(v) for v in last.nest.vars)
    if program.parts is not None or last.inner is None or out.dtype is not DType.F32 or last.nest.store.indices != at:
        return program
    if any(load.buffer is out for stage in program.stages for load in loads(stage.nest.store.value)):
        return program
    for number, stage in enumerate(before):
        if len(stage.folds) != 1 or not any(isinstance(s, Apply) and s.fn in _COSTLY for s in walk_scalar(stage.folds[0].value)):
            continue
        (axis, length), changed = stage.folds[0].axes[0], {s.nest.store.buffer for s in before[number:]}
        if length != last.inner[1] or out in changed or any(load.buffer in changed for load in loads(stage.folds[0].value)):
            continue  # the stored values would not be those that the last stage needs
        names = {**dict(zip(stage.nest.vars, at, strict=False)), axis: at[-1]}
        value = rewrite_dims(stage.folds[0].value, names)
        taken = map_scalar(last.nest.store.value, lambda s, v=value: Load(out, at) if same_scalar(s, v) else s)
        if taken is not last.nest.store.value:
            nest = replace(last.nest, store=Store(out, at, taken))
            done = (*before[:number], replace(stage, stored_in=out), *before[number + 1 :], replace(last, nest=nest))
            return replace(program, stages=done)
    return program
