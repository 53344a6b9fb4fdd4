"""Choose the schedule of a loop nest: the first rule that applies."""

from __future__ import annotations

from dataclasses import replace

from compiler.backends.cpu.schedule.attention.paged import schedule_paged
from compiler.backends.cpu.schedule.attention.ragged import schedule_ragged
from compiler.backends.cpu.schedule.product.ways import schedule_product
from compiler.backends.cpu.schedule.rows import schedule_rows
from compiler.backends.cpu.schedule.spatial import schedule_spatial
from compiler.idioms.nest import allocated, without_allocations
from compiler.idioms.product import without_products
from compiler.idioms.spatial import stages
from compiler.ir.loops.attention import Attention
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.statements import For, LoopKind, Stmt, Tile
from compiler.ir.loops.visit import sequence, walk_stmts
from compiler.machine.intrinsics.interleave import InterleavePairs
from compiler.machine.products import LANES, product_tiles
from compiler.machine.target import Target
from compiler.ops.attention.plain import plain_attention


def schedule(prim: PrimFunc, target: Target) -> PrimFunc:
    """Return the scheduled nest. A nest that is scheduled already is returned unchanged. Attention that no rule for attention schedules is
    first turned into loops, which are then scheduled like any others."""
    if "schedule" in prim.attrs or _scheduled(prim.body):
        return prim
    tiles = product_tiles(target)
    found = schedule_ragged(prim, lanes=target.lanes(4)) or schedule_paged(prim, tiles, unit=InterleavePairs(LANES).runs_on(target))
    if found is None and isinstance(prim.body, Attention):
        prim = replace(prim, body=plain_attention(prim.body))
    found = found or schedule_product(prim, tiles)
    return found or schedule_rows(prim, LANES) or _by_stage(prim)


def _scheduled(body: Stmt) -> bool:
    """Return whether the nest is scheduled already: it contains tiles, or loops other than serial ones."""
    return any(isinstance(s, Tile) or (isinstance(s, For) and s.kind is not LoopKind.SERIAL) for s in walk_stmts(body))


def _by_stage(prim: PrimFunc) -> PrimFunc:
    """Schedule each stage as a phase of its own. If the iterations of a stage are not provably independent, one thread runs them in
    order."""
    temporaries, body = without_allocations(without_products(prim.body))
    done = [schedule_spatial(s, LANES) or s for s in stages(body)]
    return PrimFunc(prim.params, prim.num_outputs, allocated(temporaries, sequence(done)), {**prim.attrs, "schedule": "spatial"})
