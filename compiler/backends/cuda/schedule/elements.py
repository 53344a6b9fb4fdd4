"""The reference schedule: each thread computes one element of the result, with reductions in order.

    for block b in ceil(elements / THREADS), thread t in THREADS {
      when b * THREADS + t < elements { the element with that number }
    }

Every element is computed by the same operations, so its bits do not depend on its place. Adjacent elementwise stages that do not read what
the others write share one launch: the blocks of one stage follow the blocks of another in the grid. Stages that are not elementwise nests,
such as scans, run in launches of their own (`_in_order`), so the schedule applies to any nest.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from compiler.backends.cuda.schedule.columns import schedule_columns
from compiler.backends.cuda.schedule.lanes import schedule_lanes, serial
from compiler.idioms.nest import allocated, without_allocations
from compiler.idioms.product import without_products
from compiler.idioms.spatial import SpatialNest, match_spatial, read_integers, stages, where_computed, write_element
from compiler.ir.dims import Dim, ceil_div, product_of
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Fold
from compiler.ir.loops.statements import For, LoopKind, Stmt
from compiler.ir.loops.visit import loads, rewrite_dims, sequence, walk_scalars
from compiler.ir.loops.write import Kernel, less, less_equal

THREADS = 128  # number of threads of a block
WARP = 32


def schedule_elements(prim: PrimFunc) -> PrimFunc:
    """Schedule the nest. Each group of independent elementwise stages is a phase. Any other stage is scheduled by itself (`_in_order`)."""
    temporaries, body = without_allocations(without_products(prim.body))
    done: list[Stmt] = []
    for group in _independent_groups(stages(body)):
        nests = [n for stmt in group if (n := match_spatial(stmt)) is not None]
        done.append(_in_one_launch(nests) if nests else _in_order(group[0]))
    return PrimFunc(prim.params, prim.num_outputs, allocated(temporaries, sequence(done)), {**prim.attrs, "schedule": "elements"})


def is_one_launch(prim: PrimFunc) -> bool:
    """Return whether the stages of a function are elementwise nests without reductions that share one launch."""
    groups = _independent_groups(stages(without_allocations(without_products(prim.body))[1]))
    return (
        len(groups) == 1
        and all(match_spatial(stmt) is not None for stmt in groups[0])
        and not any(isinstance(s, Fold) for s in walk_scalars(prim.body))
    )


def _independent_groups(stmts: Sequence[Stmt]) -> list[list[Stmt]]:
    """Group adjacent stages that are independent: they write different elements, and do not read what other stages of the group write."""
    groups: list[list[Stmt]] = []
    for stmt in stmts:
        if groups and all(_are_independent(stmt, other) for other in groups[-1]):
            groups[-1].append(stmt)
        else:
            groups.append([stmt])
    return groups


def _are_independent(a: Stmt, b: Stmt) -> bool:
    """Return whether two statements are elementwise nests that write different elements, and neither reads what the other writes."""
    nests = match_spatial(a), match_spatial(b)
    if nests[0] is None or nests[1] is None:
        return False
    mine, other = nests[0].store, nests[1].store
    read = [{load.buffer for load in loads(stmt)} for stmt in (b, a)]
    if mine.buffer in read[0] or other.buffer in read[1]:
        return False
    if mine.buffer is not other.buffer:
        return True
    return any(i.is_const and j.is_const and i != j for i, j in zip(mine.indices, other.indices, strict=True))


@contextmanager
def elements(k: Kernel, axes: Sequence[tuple[str, Dim]], threads: int = THREADS) -> Generator[tuple[Dim, ...]]:
    """Run a thread for each point of the box of these axes. Yield the point."""
    with k.grid("b", _num_blocks(axes, threads)) as b, k.threads("t", threads) as t, _point(k, b * threads + t, axes) as point:
        yield point


def _num_blocks(axes: Sequence[tuple[str, Dim]], threads: int) -> Dim:
    """Return the number of blocks that have a thread for each point of the box of these axes."""
    return ceil_div(product_of([extent for _, extent in axes]), threads)


@contextmanager
def _point(k: Kernel, number: Dim, axes: Sequence[tuple[str, Dim]]) -> Generator[tuple[Dim, ...]]:
    """Yield the point with this number, in a block of code that runs only if there is such a point."""
    with k.when(less(number, product_of([extent for _, extent in axes]))):
        yield k.unravel(number, axes)


def _in_one_launch(nests: Sequence[SpatialNest]) -> Stmt:
    """Write elementwise nests as one launch. A thread computes one element of one nest."""
    k, axes = Kernel(), [[(var.name, extent) for var, extent in nest.axes] for nest in nests]
    counts = [_num_blocks(each, THREADS) for each in axes]
    if len(nests) == 1:
        with elements(k, axes[0]) as values:
            _write(k, nests[0], values)
        return k.body()
    first = Dim.of(0)
    with k.grid("b", sum(counts, first)) as b, k.threads("t", THREADS) as t:
        for nest, each, count in zip(nests, axes, counts, strict=True):
            with k.when(less_equal(first, b) & less(b, first + count)):
                block = k.let("block", b - first, count - 1)
                with _point(k, block * THREADS + t, each) as values:
                    _write(k, nest, values)
            first = first + count
    return k.body()


def _write(k: Kernel, nest: SpatialNest, values: Sequence[Dim]) -> None:
    """Write the element of a nest at which its axes have these values."""
    point = dict(zip((var for var, _ in nest.axes), values, strict=True))
    with where_computed(k, nest, point):
        write_element(k, nest.store, read_integers(k, nest, point))


def _in_order(stmt: Stmt) -> Stmt:
    """Schedule a statement that is not an elementwise nest. `schedule_columns` schedules scans: each thread computes a column of the state.
    `schedule_lanes` schedules a parallel loop around loops over lanes, if a block can run an iteration. Otherwise a thread runs each
    iteration of a parallel loop, and one thread runs any other statement; the loops inside become serial."""
    if (found := schedule_columns(stmt) or schedule_lanes(stmt)) is not None:
        return found
    k = Kernel()
    if isinstance(stmt, For) and stmt.kind is LoopKind.PARALLEL:
        with elements(k, [(stmt.var.name, stmt.extent)], WARP) as (i,):
            k.add(serial(rewrite_dims(stmt.body, {stmt.var: i})))
    else:
        with k.grid("b", 1), k.threads("t", 1):
            k.add(serial(stmt))
    return k.body()
