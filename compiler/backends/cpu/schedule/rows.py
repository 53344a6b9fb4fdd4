"""Reductions along rows, with the stages that follow them: sums, maxima, softmax, norms.

All stages have the same leading axes, which number the rows. A stage computes either a number for each row, usually by reductions along the
row, or the elements of each row. A thread runs all stages of a row while the row is in cache, and keeps in registers the numbers that only
later stages read. Further stages may divide a row into parts and treat these as rows, for example to round the result of a norm in groups.

A reduction has PARTS vectors of partial results, or fewer for a short row. With n vectors of w lanes, element `r` of a row is combined with
lane `r mod (n * w)`. At the end, the vectors are combined by halves into one vector, and then its lanes are combined by halves. The order
of a reduction depends only on the length of the row. Softmax computes its two reductions in one loop
(compiler/backends/cpu/schedule/softmax.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.folds import fold_halves
from compiler.backends.cpu.schedule.prefetch import NO_PREFETCH, Prefetch
from compiler.backends.cpu.schedule.softmax import is_softmax, write_softmax
from compiler.backends.cpu.schedule.spatial import write_vectors
from compiler.idioms.rows import COMBINE, PARTS, RowProgram, RowStage, match_rows, with_own_numbers, with_stored_values
from compiler.idioms.spatial import SpatialNest, write_element
from compiler.ir.dims import Dim, DimVar, dim_min, product_of
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.functions import Fn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Apply, Reduce, Scalar, dtype_of, identity
from compiler.ir.loops.statements import Store
from compiler.ir.loops.sweep import sweep
from compiler.ir.loops.visit import free_dims, loads, map_scalar, rewrite_dims
from compiler.ir.loops.write import Array, Kernel


def schedule_rows(prim: PrimFunc, width: int) -> PrimFunc | None:
    """Schedule a nest of stages along rows, with vectors of `width` lanes. Return None for any other nest."""
    program = match_rows(prim.body)
    if program is None:
        return None
    program = with_stored_values(program)
    softmax, program = is_softmax(program), with_own_numbers(program, Scope.LOCAL)
    k, axes = Kernel(), [(var.name, extent) for var, extent in program.row]
    with k.parallel("p", product_of([extent for _, extent in axes])) as p:
        point = list(k.unravel(p, axes))
        rows = _Rows(program, width)
        if softmax:
            rows.declare(k)
            write_softmax(k, program, point, width)
        elif point and rows.worth_prefetching:
            last = axes[-1][1] - 1
            rows.write(k, point, [*point[:-1], k.let("next", dim_min(point[-1] + 1, last), last)])
        else:
            rows.write(k, point)
    return PrimFunc(prim.params, prim.num_outputs, k.body(), {**prim.attrs, "schedule": "rows"})


@dataclass(frozen=True, slots=True)
class _Rows:
    """Writes the code of a program's stages, with vectors of `width` lanes."""

    program: RowProgram
    width: int

    @property
    def worth_prefetching(self) -> bool:
        """Whether a stage that writes elements reads rows in order. Such a stage computes between its reads, so prefetches have time to
        arrive. Reductions do little besides reading, so prefetches do not help them."""
        return any(self.read_in_order(s.nest.store.value, s.nest.vars) for s in self.program.stages if s.inner is not None)

    def declare(self, k: Kernel) -> None:
        """Allocate memory for what later stages of a row read: values that a reduction stores, and the numbers that stages compute for the
        row."""
        if self.program.line is not None:
            k.allocate(self.program.line)
        for number in self.program.temporaries:
            k.allocate(number)

    def write(self, k: Kernel, point: list[Dim], next_row: list[Dim] | None = None) -> None:
        """Write all stages of one row, and then those of its parts. If there is a `next_row`, every stage that reads rows in order
        prefetches the whole next row, even if an earlier stage has prefetched it: a core drops prefetches while many are pending."""
        self.declare(k)
        for stage in self.program.stages:
            if stage.inner is None:
                self.write_number(k, stage, point, next_row)
            else:
                self.write_elements(k, stage, stage.nest.store, point, next_row)
        if self.program.parts is not None:
            parts = _Rows(self.program.parts, self.width)
            with k.serial("part", parts.program.row[-1][1]) as part:
                parts.write(k, [*point, part])

    def write_number(self, k: Kernel, stage: RowStage, point: list[Dim], next_row: list[Dim] | None) -> None:
        """Compute the reductions of a stage along the row, and write the number that the stage computes from them."""
        store, mapping = stage.nest.store, dict(zip(stage.nest.vars, point, strict=False))
        with k.scope():
            results = {fold: k.local("fold", 1, dtype=dtype_of(fold)) for fold in reversed(stage.folds)}
            for fold in stage.folds:
                prefetch = self.prefetch(fold.value, (*stage.nest.vars, fold.axes[0][0]), next_row)
                self.write_fold(k, stage, fold, results[fold], point, prefetch)
            value = map_scalar(store.value, lambda s: results[s][0] if isinstance(s, Reduce) and s in results else s)
            write_element(k, Store(store.buffer, store.indices, value), mapping)

    def write_fold(self, k: Kernel, stage: RowStage, fold: Reduce, result: Array, point: list[Dim], prefetch: Prefetch) -> None:
        """Compute a reduction along the row at `point`, and put it into `result`. Meanwhile, prefetch the next row. If a later stage reads
        the values that are combined, store them."""
        (axis, length), mapping = fold.axes[0], dict(zip(stage.nest.vars, point, strict=False))
        length = length.substitute(mapping)

        def combine(a: Scalar, b: Scalar) -> Scalar:
            return Apply(COMBINE[fold.fn], (a, b))

        dtype, width = dtype_of(fold), self.width
        num_parts = next(n for n in (1, 2, PARTS) if n == PARTS or (length.is_const and length.const <= n * width))
        with k.scope():
            partial = k.local("partial", num_parts, width, dtype=dtype)
            with k.unroll("u", num_parts) as u, k.vector(width) as lane:
                partial[u, lane] = identity(fold.fn, dtype)
            for vector in sweep(k, Dim.of(0), length, width, num_parts):
                if vector.is_full:
                    prefetch.vector(k, vector.start)
                with vector.lanes() as (lane, index):
                    value = rewrite_dims(fold.value, {**mapping, axis: index})
                    if stage.stored_in is not None:
                        stored, place = k.array(stage.stored_in), (*point, index)
                        stored[place] = value
                        value = stored[place]
                    partial[vector.part, lane] = combine(partial[vector.part, lane], value)
            fold_halves(k, partial, combine)
            result[0] = partial[0, 0]

    def write_elements(self, k: Kernel, stage: RowStage, store: Store, point: list[Dim], next_row: list[Dim] | None) -> None:
        """Write the elements of a row. If the value is a SELECT with the same condition for all elements, the SELECT becomes a branch
        around the loop."""
        nest, value, mapping = stage.nest, store.value, dict(zip(stage.nest.vars, point, strict=False))
        assert stage.inner is not None
        inner, length = stage.inner
        if isinstance(value, Apply) and value.fn is Fn.SELECT and inner not in free_dims(value.args[0]):
            cond, chosen, other = value.args
            with k.when(rewrite_dims(cond, mapping)):
                self.write_elements(k, stage, replace(store, value=chosen), point, next_row)
            with k.orelse():
                self.write_elements(k, stage, replace(store, value=other), point, next_row)
            return
        own = store.buffer is self.program.line
        read_again = own or any(load.buffer is store.buffer for s in self.program.stages for load in loads(s.nest.store.value))
        row = SpatialNest(nest.axes, (), store)
        write_vectors(k, row, mapping, Dim.of(0), length, self.width, self.prefetch(value, nest.vars, next_row), read_again=read_again)

    # --- prefetching ---------------------------------------------------------------------------------------------------

    def prefetch(self, value: Scalar, axes: Sequence[DimVar], next_row: list[Dim] | None) -> Prefetch:
        """Return a prefetch of the next row, for those buffers that the value reads in order, or no prefetch if there is no next row."""
        return NO_PREFETCH if next_row is None else Prefetch(self.read_in_order(value, axes), tuple(next_row))

    def read_in_order(self, value: Scalar, axes: Sequence[DimVar]) -> tuple[Buffer, ...]:
        """Return the buffers that the value reads in the order of the axes, except those that the kernel itself writes."""
        place, written = tuple(map(Dim.of, axes)), {stage.nest.store.buffer for stage in self.program.stages}
        return tuple(dict.fromkeys(s.buffer for s in loads(value) if s.indices == place and s.buffer not in written))
