"""The reference schedule: a thread computes an element of the result, folds in their order.

    for block b in ceil(elements / THREADS), thread t in THREADS {
      when b * THREADS + t < elements { the element with that number }
    }

It takes any nest. An element is computed by the same operations wherever it stands, so its bits depend on nothing beside it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from compiler.idioms.nest import allocated, without_allocations
from compiler.idioms.product import without_products
from compiler.idioms.spatial import SpatialNest, match_spatial, read_integers, stages, write_element
from compiler.ir.dims import Dim, ceil_div, product_of
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.statements import For, LoopKind, Stmt
from compiler.ir.loops.visit import map_stmt, rewrite_dims, sequence
from compiler.ir.loops.write import Kernel, less

THREADS = 128  # of a block
WARP = 32


def schedule_elements(prim: PrimFunc) -> PrimFunc:
    """Schedule each stage as a phase of its own."""
    temporaries, body = without_allocations(without_products(prim.body))
    done = sequence([_stage(s) for s in stages(body)])
    return PrimFunc(prim.params, prim.num_outputs, allocated(temporaries, done), {**prim.attrs, "schedule": "elements"})


@contextmanager
def elements(k: Kernel, axes: Sequence[tuple[str, Dim]], threads: int = THREADS) -> Generator[tuple[Dim, ...]]:
    """Run a thread for each point of a box of these axes. Yields the point."""
    count = product_of([extent for _, extent in axes])
    with k.grid("b", ceil_div(count, threads)) as b, k.threads("t", threads) as t:
        number = b * threads + t
        with k.when(less(number, count)):
            yield k.unravel(number, axes)


def _stage(stmt: Stmt) -> Stmt:
    nest = match_spatial(stmt)
    return _in_order(stmt) if nest is None else _side_by_side(nest)


def _side_by_side(nest: SpatialNest) -> Stmt:
    k = Kernel()
    with elements(k, [(var.name, extent) for var, extent in nest.axes]) as values:
        point = dict(zip((var for var, _ in nest.axes), values, strict=True))
        write_element(k, nest.store, read_integers(k, nest, point))
    return k.body()


def _in_order(stmt: Stmt) -> Stmt:
    """Give each iteration of a parallel loop a thread. One thread runs all other loops, as they are written."""
    k = Kernel()
    if isinstance(stmt, For) and stmt.kind is LoopKind.PARALLEL:
        with elements(k, [(stmt.var.name, stmt.extent)], WARP) as (i,):
            k.add(_serial(rewrite_dims(stmt.body, {stmt.var: i})))
    else:
        with k.grid("b", 1), k.threads("t", 1):
            k.add(_serial(stmt))
    return k.body()


def _serial(stmt: Stmt) -> Stmt:
    """Replace a CPU's parallel and vector loops by serial ones."""
    kinds = (LoopKind.PARALLEL, LoopKind.VECTOR)
    return map_stmt(stmt, lambda s: replace(s, kind=LoopKind.SERIAL) if isinstance(s, For) and s.kind in kinds else s)
