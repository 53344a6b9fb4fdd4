"""Reductions along rows, with the stages that follow them: sums, maxima, softmax, norms. A block computes a row, and one launch runs all
stages.

    for block b in rows {
      for thread t { reduce elements t, t + THREADS, ... }
      combine the results of the threads: first those that are a warp apart, then by halves
      for thread t { write elements t, t + THREADS, ... }
    }

The order of a reduction depends only on the length of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from compiler.backends.cuda.schedule.hold import at_once, hold
from compiler.idioms.rows import COMBINE, RowProgram, RowStage, match_rows, with_own_numbers
from compiler.idioms.spatial import write_element
from compiler.ir.dims import Dim, DimVar, ceil_div, product_of
from compiler.ir.loops.buffers import Scope
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Apply, Reduce, Scalar, dtype_of, identity
from compiler.ir.loops.statements import Store
from compiler.ir.loops.visit import loads, map_scalar, rewrite_dims
from compiler.ir.loops.write import Array, Kernel, halvings, less
from compiler.ir.prove import prove_divisible

WARP = 32
# (longest row, number of threads of a block for rows up to this length)
_THREADS = ((8 * WARP, WARP), (2048, 128))
_MOST_THREADS = 512

Point = dict[DimVar, Dim]


def schedule_rows(prim: PrimFunc) -> PrimFunc | None:
    program = match_rows(prim.body)
    if program is None or program.parts is not None or not _reads_along_rows(program):
        return None
    program, k = with_own_numbers(program, Scope.SHARED), Kernel()
    axes = [(var.name, extent) for var, extent in program.row]
    with k.grid("b", product_of([extent for _, extent in axes])) as b:
        _Row(k, program, k.unravel(b, axes), _num_threads(program)).write()
    return PrimFunc(prim.params, prim.num_outputs, k.body(), {**prim.attrs, "schedule": "rows"})


def _reads_along_rows(program: RowProgram) -> bool:
    """Return whether each reduction reads adjacent memory along the row. If not, the reference schedule is faster: its adjacent threads
    compute adjacent rows, and read adjacent memory."""
    folds = [fold for stage in program.stages for fold in stage.folds]
    return all(any(fold.axes[0][0] in load.indices[-1].vars() for load in loads(fold.value) if load.indices) for fold in folds)


def _num_threads(program: RowProgram) -> int:
    lengths = [fold.axes[0][1] for stage in program.stages for fold in stage.folds]
    longest = max(length.const for length in lengths) if all(length.is_const for length in lengths) else _MOST_THREADS
    return next((threads for length, threads in _THREADS if longest <= length), _MOST_THREADS)


@dataclass(frozen=True, slots=True)
class _Row:
    k: Kernel
    program: RowProgram
    point: tuple[Dim, ...]
    num_threads: int

    def write(self) -> None:
        for number in self.program.temporaries:
            self.k.allocate(number)
        for stage in self.program.stages:
            if stage.inner is None:
                self.write_number(stage)
            else:
                self.write_elements(stage, *stage.inner)

    def write_elements(self, stage: RowStage, var: DimVar, length: Dim) -> None:
        k, store, at = self.k, stage.nest.store, self.at(stage)
        if not length.is_const or length.const % self.num_threads:
            with self.elements(length) as i:
                write_element(k, store, {**at, var: i})
            return
        count = length.const // self.num_threads  # number of elements of a thread
        group = at_once(count)
        with k.threads("t", self.num_threads) as t, k.serial("m", count // group) as m:
            points = [{**at, var: (m * group + u) * self.num_threads + t} for u in range(group)]
            for point, value in zip(points, hold(k, [rewrite_dims(store.value, point) for point in points]), strict=True):
                k.array(store.buffer)[tuple(d.substitute(point) for d in store.indices)] = value

    def at(self, stage: RowStage) -> Point:
        return dict(zip(stage.nest.vars, self.point, strict=False))

    @contextmanager
    def elements(self, length: Dim) -> Generator[Dim]:
        """Distribute the elements of a row among threads. A thread gets every `num_threads`-th element."""
        with self.k.threads("t", self.num_threads) as t, self.of_thread(t, length) as i:
            yield i

    @contextmanager
    def of_thread(self, t: Dim, length: Dim) -> Generator[Dim]:
        with self.k.serial("m", ceil_div(length, self.num_threads)) as m:
            i = m * self.num_threads + t
            if prove_divisible(length, self.num_threads):
                yield i
            else:
                with self.k.when(less(i, length)):
                    yield i

    def write_number(self, stage: RowStage) -> None:
        k, at = self.k, self.at(stage)
        with k.scope():
            results = {fold: k.shared("fold", 1, dtype=dtype_of(fold)) for fold in stage.folds}
            for fold, result in results.items():
                self.write_fold(fold, result, at)
            value = map_scalar(stage.nest.store.value, lambda s: results[s][0] if isinstance(s, Reduce) and s in results else s)
            with k.threads("t", 1):
                write_element(k, Store(stage.nest.store.buffer, stage.nest.store.indices, value), at)

    def write_fold(self, fold: Reduce, result: Array, at: Point) -> None:
        k, (axis, length), dtype = self.k, fold.axes[0], dtype_of(fold)

        def combine(a: Scalar, b: Scalar) -> Scalar:
            return Apply(COMBINE[fold.fn], (a, b))

        with k.scope():
            partial = k.shared("partial", self.num_threads, dtype=dtype)
            with k.threads("t", self.num_threads) as t:
                found = k.local("found", 1, dtype=dtype)
                found[0] = identity(fold.fn, dtype)
                with self.of_thread(t, length.substitute(at)) as i:
                    found[0] = combine(found[0], rewrite_dims(fold.value, {**at, axis: i}))
                partial[t] = found[0]
            fold_threads(k, partial, self.num_threads, combine)
            with k.threads("t", 1):
                result[0] = partial[0]


def fold_threads(k: Kernel, partial: Array, count: int, combine: Callable[[Scalar, Scalar], Scalar]) -> None:
    """Reduce the results of all threads to partial[0]. First, each of the first 32 threads combines the results that are a warp apart; then
    halves are combined."""
    if count > WARP:
        with k.threads("t", WARP) as t:
            total: Scalar = partial[t]
            for first in range(WARP, count, WARP):
                total = combine(total, partial[t + first])
            partial[t] = total
    for half in halvings(WARP):
        with k.threads("t", half) as t:
            partial[t] = combine(partial[t], partial[t + half])
