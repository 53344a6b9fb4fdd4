"""Compute short rows in several stages, one of which chooses the best experts. A warp computes a row through all stages. Shared memory
holds the row of each input that several stages read, and results that later stages read.

    for block b in rows {
      for lane t { write or reduce elements t, t + 32, ... of the row }     for each stage
      the warp chooses the best experts by their keys: tile
    }

A reduction to one number per row combines elements in the same order as in rows.py. A lane loads several elements before it uses any of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from compiler.backends.cuda.schedule.hold import at_once, hold
from compiler.backends.cuda.schedule.rows import WARP, combination, folded_warp, of_warp
from compiler.idioms.best import Best
from compiler.idioms.rows import folds_in
from compiler.idioms.small_rows import Part, match_small_rows
from compiler.idioms.spatial import SpatialNest, read_integers
from compiler.ir.dims import Dim, DimVar, product_of
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Load, Reduce, Scalar, dtype_of, identity
from compiler.ir.loops.statements import Store
from compiler.ir.loops.visit import map_scalar, rewrite_dims
from compiler.ir.loops.write import Array, Kernel, cast, less
from compiler.machine.intrinsics.best_keys import BestKeys
from compiler.ops.routing import order

MOST_BYTES = 40 << 10  # maximum number of bytes of a row in shared memory
ZERO = Dim.of(0)

Point = dict[DimVar, Dim]


def schedule_small_rows(prim: PrimFunc) -> PrimFunc | None:
    """Schedule the stages of short rows, one of which chooses the best experts. Return None for any other nest, and if a row needs too much
    shared memory."""
    rows = match_small_rows(prim)
    if rows is None or not rows.chooses:
        return None
    lines = {b: Buffer(b.name, b.shape[1:] or (Dim.of(1),), b.dtype, Scope.SHARED) for b in (*rows.kept, *rows.inputs)}
    if sum(product_of(line.shape).const * line.dtype.num_bytes for line in lines.values()) > MOST_BYTES:
        return None
    k = Kernel()
    with k.grid("b", rows.num_rows) as row:
        for line in lines.values():
            k.allocate(line)
        writer = _Row(k, row, lines, frozenset(prim.outputs))
        for buffer in rows.inputs:
            writer.load(buffer)
        for part in rows.parts:
            with k.scope():
                writer.write(part)
    return PrimFunc(prim.params, prim.num_outputs, k.body(), {**prim.attrs, "schedule": "small rows"})


@dataclass(frozen=True, slots=True)
class _Row:
    """Writes the code of the warp that computes one row."""

    k: Kernel
    row: Dim
    lines: Mapping[Buffer, Buffer]  # for each buffer, the shared memory that holds the block's row of the buffer
    outputs: frozenset[Buffer]  # the results of the function, which are also stored in global memory

    def load(self, buffer: Buffer) -> None:
        """Copy the block's row of an input to shared memory."""
        k, line = self.k, self.k.array(self.lines[buffer])
        with k.threads("t", WARP) as t:

            def copy(numbers: Sequence[Dim]) -> None:
                for n, value in zip(numbers, hold(k, [Load(buffer, (self.row, n)) for n in numbers]), strict=True):
                    line[n] = value

            self._each(t, buffer.shape[1].const, copy)

    def write(self, part: Part) -> None:
        """Write what the warp does for a part: a choice, a reduction, or elements."""
        if isinstance(part, Best):
            self._choose(replace(part, score=self._own(part.score)))
            return
        store = Store(part.store.buffer, part.store.indices, self._own(part.store.value))
        nest = replace(part, lets=tuple((var, self._own(value)) for var, value in part.lets), store=store)
        if folds_in(nest.store.value) and product_of([extent for _, extent in nest.axes[1:]]) == Dim.of(1):
            self._write_reduction(nest)
        else:
            self._write_elements(nest)

    def _own(self, scalar: Scalar) -> Scalar:
        """Replace loads of the block's row by loads from shared memory."""

        def read(s: Scalar) -> Scalar:
            line = self.lines.get(s.buffer) if isinstance(s, Load) else None
            return s if line is None or not isinstance(s, Load) else Load(line, s.indices[1:] or (ZERO,))

        return map_scalar(scalar, read)

    # --- parts ---------------------------------------------------------------------------------------------------------

    def _choose(self, part: Best) -> None:
        """Write the choice of the best experts of the row: store keys that have the order of the scores, and let the tile `BestKeys`
        choose. Copy the choice to global memory if it is a result of the function."""
        k, ((row, _), (expert, extent)), chosen = self.k, part.axes, part.chosen
        keys = k.shared("keys", extent.const, dtype=DType.I32)
        with k.threads("t", WARP) as t:

            def write(numbers: Sequence[Dim]) -> None:
                scores = hold(k, [rewrite_dims(part.score, {row: self.row, expert: e}) for e in numbers])
                for e, score in zip(numbers, scores, strict=True):
                    keys[e] = cast(order(score), DType.I32)

            self._each(t, extent.const, write)
        line = self.lines.get(part.out)
        places = k.shared("places", chosen, dtype=DType.I32) if line is None else k.array(line)
        k.tile(BestKeys(extent.const, chosen), places[0], keys[0])
        if part.out in self.outputs:
            with k.threads("t", WARP) as t:

                def copy(numbers: Sequence[Dim]) -> None:
                    for c in numbers:
                        k.array(part.out)[self.row, c] = places[c]

                self._each(t, chosen, copy)

    def _write_reduction(self, nest: SpatialNest) -> None:
        """Write a nest that has one element per row and contains reductions. The lanes of the warp reduce parts of the row; then one thread
        combines their results, and stores the element."""
        k, (row, *others) = self.k, (var for var, _ in nest.axes)
        point = {row: self.row, **dict.fromkeys(others, ZERO)}
        partials = {fold: self._write_fold(fold, point) for fold in folds_in(nest.store.value)}
        with k.threads("t", 1):
            found = {fold: folded_warp(k, of_warp(partial), combination(fold)) for fold, partial in partials.items()}
            value = map_scalar(nest.store.value, lambda s: found[s] if isinstance(s, Reduce) and s in found else s)
            self._store(nest, point, rewrite_dims(value, point))

    def _write_fold(self, fold: Reduce, point: Point) -> Array:
        """Reduce the row to a result for each lane, and return these results."""
        k, ((axis, length),), dtype, combine = self.k, fold.axes, dtype_of(fold), combination(fold)
        partial = k.shared("partial", WARP, dtype=dtype)
        with k.threads("t", WARP) as t:
            found = k.local("found", 1, dtype=dtype)
            found[0] = identity(fold.fn, dtype)

            def add(numbers: Sequence[Dim]) -> None:
                for value in hold(k, [rewrite_dims(fold.value, {**point, axis: i}) for i in numbers]):
                    found[0] = combine(found[0], value)

            self._each(t, length.const, add)
            partial[t] = found[0]
        return partial

    def _write_elements(self, nest: SpatialNest) -> None:
        """Write a nest of several elements per row. Each lane computes some of them."""
        k, ((row, _), *inner) = self.k, nest.axes
        axes = [(var.name, extent) for var, extent in inner]
        with k.threads("t", WARP) as t:

            def write(numbers: Sequence[Dim]) -> None:
                points = [{row: self.row, **dict(zip((v for v, _ in inner), k.unravel(i, axes), strict=True))} for i in numbers]
                points = [read_integers(k, nest, point) for point in points]
                for point, value in zip(points, hold(k, [rewrite_dims(nest.store.value, p) for p in points]), strict=True):
                    self._store(nest, point, value)

            self._each(t, product_of([extent for _, extent in inner]).const, write)

    # --- elements ------------------------------------------------------------------------------------------------------

    def _each(self, t: Dim, count: int, body: Callable[[Sequence[Dim]], None]) -> None:
        """Write a body for the numbers below `count` that belong to a lane: every 32nd, several at once."""
        k, (whole, rest) = self.k, divmod(count, WARP)
        if whole:
            group = at_once(whole)
            with k.serial("m", whole // group) as m:
                body([(m * group + u) * WARP + t for u in range(group)])
        if rest:
            with k.when(less(t, rest)):
                body([whole * WARP + t])

    def _store(self, nest: SpatialNest, point: Point, value: Scalar) -> None:
        """Store an element of the row in shared memory if later parts read it, and in the output if the nest writes an output."""
        k, buffer = self.k, nest.store.buffer
        indices = tuple(d.substitute(point) for d in nest.store.indices)
        (element,) = hold(k, [value])
        if buffer in self.lines:
            k.array(self.lines[buffer])[indices[1:] or (ZERO,)] = element
        if buffer in self.outputs:
            k.array(buffer)[indices] = element
