"""Reductions along rows, with the stages that follow them: sums, maxima, softmax, norms. A block computes a row, and one launch runs all
stages.

    for block b in rows {
      for thread t { reduce elements t, t + THREADS, ... }
      combine the results of the threads: first those that are a warp apart, then, in one thread, by halves
      for thread t { write elements t, t + THREADS, ... }
    }

The order of a reduction depends only on the lengths of the rows. Two such reductions that do not depend on each other share one launch: the
blocks of one follow the blocks of the other in the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from compiler.backends.cuda.schedule.hold import at_once, hold
from compiler.idioms.nest import allocated, without_allocations
from compiler.idioms.rows import COMBINE, RowProgram, RowStage, match_rows, with_own_numbers
from compiler.idioms.spatial import write_element
from compiler.ir.dims import Dim, DimVar, ceil_div, product_of
from compiler.ir.loops.buffers import Scope
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Apply, Reduce, Scalar, dtype_of, identity
from compiler.ir.loops.statements import Stmt, Store
from compiler.ir.loops.visit import loads, map_scalar, rewrite_dims, sequence, statements, written_buffers
from compiler.ir.loops.write import Array, Kernel, halvings, less, less_equal
from compiler.ir.prove import prove_divisible

WARP = 32
# (longest row, number of threads of a block for rows up to this length); longer rows get _MOST_THREADS
_THREADS = ((8 * WARP, WARP), (2048, 128))
_MOST_THREADS = 512
_ASSUMED_LENGTH = 512  # assumed length of rows whose length is a variable

Point = dict[DimVar, Dim]
Combine = Callable[[Scalar, Scalar], Scalar]


def schedule_rows(prim: PrimFunc) -> PrimFunc | None:
    """Schedule the stages along rows of one program (`RowProgram`), or of two, as one launch. Return None for any other nest."""
    programs = _programs(prim.body)
    if programs is None:
        return None
    k, first = Kernel(), Dim.of(0)
    counts = [product_of([extent for _, extent in program.row]) for program in programs]
    with k.grid("b", sum(counts, first)) as b:
        for program, count in zip(programs, counts, strict=True):
            with nullcontext() if len(programs) == 1 else k.when(less_equal(first, b) & less(b, first + count)):
                _write(k, program, b if len(programs) == 1 else k.let("block", b - first, count - 1))
            first = first + count
    return PrimFunc(prim.params, prim.num_outputs, k.body(), {**prim.attrs, "schedule": "rows"})


def _programs(body: Stmt) -> list[RowProgram] | None:
    """Return one program of stages along rows, or two that follow each other and write different buffers, and of which neither reads what
    the other writes. Return None if the body consists of anything else, if a program divides its rows into parts, or if a reduction does
    not read adjacent memory."""
    program = match_rows(body)
    if program is not None and program.parts is None:
        return [program] if _reads_along_rows(program) else None
    temporaries, inner = without_allocations(body)
    stmts = statements(inner)
    for count in range(1, len(stmts)):
        parts = [sequence(stmts[:count]), sequence(stmts[count:])]
        written = [written_buffers(part) for part in parts]
        read = [{load.buffer for load in loads(part)} for part in parts]
        if any((mine | made) & other for mine, made, other in zip(read, written, reversed(written), strict=True)):
            continue
        whole = [allocated([t for t in temporaries if t in own], part) for part, own in zip(parts, written, strict=True)]
        found = [program for part in whole if (program := match_rows(part)) is not None]
        if len(found) == len(parts) and all(program.parts is None and _reads_along_rows(program) for program in found):
            return found
    return None


def _write(k: Kernel, program: RowProgram, block: Dim) -> None:
    """Write what a block does for the row whose number is that of the block."""
    lengths = [fold.axes[0][1] for stage in program.stages for fold in stage.folds]
    point = k.unravel(block, [(var.name, extent) for var, extent in program.row])
    with k.scope():
        _Row(k, with_own_numbers(program, Scope.SHARED), point, num_threads(lengths)).write()


def _reads_along_rows(program: RowProgram) -> bool:
    """Return whether each reduction reads adjacent memory along the row. If not, the reference schedule is faster: its adjacent threads
    compute adjacent rows, and read adjacent memory."""
    folds = [fold for stage in program.stages for fold in stage.folds]
    return all(any(fold.axes[0][0] in load.indices[-1].vars() for load in loads(fold.value) if load.indices) for fold in folds)


def num_threads(lengths: Sequence[Dim]) -> int:
    """Return the number of threads of a block that reduces rows of these lengths. If one of them is a variable, all count as rows of
    _ASSUMED_LENGTH elements."""
    longest = max(length.const for length in lengths) if all(length.is_const for length in lengths) else _ASSUMED_LENGTH
    return next((threads for length, threads in _THREADS if longest <= length), _MOST_THREADS)


@dataclass(frozen=True, slots=True)
class _Row:
    """Writes the stages of a program for one row."""

    k: Kernel
    program: RowProgram
    point: tuple[Dim, ...]
    num_threads: int

    def write(self) -> None:
        """Allocate the numbers of the row that stages pass to later stages, and write the stages in order."""
        for number in self.program.temporaries:
            self.k.allocate(number)
        for stage in self.program.stages:
            if stage.inner is None:
                self.write_number(stage)
            else:
                self.write_elements(stage, *stage.inner)

    def write_elements(self, stage: RowStage, var: DimVar, length: Dim) -> None:
        """Write the elements that a stage computes for a row: `length` elements, numbered by `var`. If all threads have equally many
        elements, a thread computes several before it stores any."""
        k, store, at = self.k, stage.nest.store, self.at(stage)
        count, rest = divmod(length.const, self.num_threads) if length.is_const else (0, 0)
        if rest or not count:
            with self.elements(length) as i:
                write_element(k, store, {**at, var: i})
            return
        group = at_once(count)  # number of a thread's elements that it computes before it stores any
        with k.threads("t", self.num_threads) as t, k.serial("m", count // group) as m:
            points = [{**at, var: (m * group + u) * self.num_threads + t} for u in range(group)]
            for point, value in zip(points, hold(k, [rewrite_dims(store.value, point) for point in points]), strict=True):
                k.array(store.buffer)[tuple(d.substitute(point) for d in store.indices)] = value

    def at(self, stage: RowStage) -> Point:
        """Return the values of the row axes of a stage: those of the block's row."""
        return dict(zip(stage.nest.vars, self.point, strict=False))

    @contextmanager
    def elements(self, length: Dim) -> Generator[Dim]:
        """Distribute the elements of a row among threads. A thread gets every `num_threads`-th element."""
        with self.k.threads("t", self.num_threads) as t, self.of_thread(t, length) as i:
            yield i

    @contextmanager
    def of_thread(self, t: Dim, length: Dim) -> Generator[Dim]:
        """Loop over the elements of one thread."""
        with self.k.serial("m", ceil_div(length, self.num_threads)) as m:
            i = m * self.num_threads + t
            if prove_divisible(length, self.num_threads):
                yield i
            else:
                with self.k.when(less(i, length)):
                    yield i

    def write_number(self, stage: RowStage) -> None:
        """Reduce the row, and write the number that a stage computes from the results."""
        k, at, store = self.k, self.at(stage), stage.nest.store
        with k.scope():
            partials = {fold: self.write_fold(fold, at) for fold in stage.folds}
            with k.threads("t", 1):
                found = {fold: folded_warp(k, of_warp(partial), combination(fold)) for fold, partial in partials.items()}
                value = map_scalar(store.value, lambda s: found[s] if isinstance(s, Reduce) and s in found else s)
                write_element(k, Store(store.buffer, store.indices, value), at)

    def write_fold(self, fold: Reduce, at: Point) -> Array:
        """Reduce the row to a result for each thread of a warp, and return these results."""
        k, (axis, length), dtype, combine = self.k, fold.axes[0], dtype_of(fold), combination(fold)
        partial = k.shared("partial", self.num_threads, dtype=dtype)
        with k.threads("t", self.num_threads) as t:
            found = k.local("found", 1, dtype=dtype)
            found[0] = identity(fold.fn, dtype)
            with self.of_thread(t, length.substitute(at)) as i:
                found[0] = combine(found[0], rewrite_dims(fold.value, {**at, axis: i}))
            partial[t] = found[0]
        fold_warps(k, partial, self.num_threads, combine)
        return partial


def combination(fold: Reduce) -> Combine:
    """Return the function that combines two results of a reduction."""
    return lambda a, b: Apply(COMBINE[fold.fn], (a, b))


def of_warp(partial: Array) -> list[Scalar]:
    """Return the results of the threads of a warp."""
    return [partial[n] for n in range(WARP)]


def fold_threads(k: Kernel, partial: Array, count: int, combine: Combine) -> None:
    """Reduce the results of `count` threads, a multiple of WARP, to partial[0]."""
    fold_warps(k, partial, count, combine)
    with k.threads("t", 1):
        partial[0] = folded_warp(k, of_warp(partial), combine)


def fold_warps(k: Kernel, partial: Array, count: int, combine: Combine) -> None:
    """Reduce the results of `count` threads, a multiple of WARP, to those of a warp: each of its threads combines the results that are a
    warp apart. If `count` is WARP, there is nothing to do."""
    if count > WARP:
        with k.threads("t", WARP) as t:
            total: Scalar = partial[t]
            for first in range(WARP, count, WARP):
                total = combine(total, partial[t + first])
            partial[t] = total


def folded_warp(k: Kernel, results: Iterable[Scalar], combine: Combine) -> Scalar:
    """Return the combination of the results of a warp. One thread loads all of them at once, and combines halves: this takes less time than
    a barrier after each half."""
    found = hold(k, results)
    for half in halvings(WARP):
        found = [combine(found[n], found[n + half]) for n in range(half)]
    return found[0]
