"""The passes of the CUDA back end."""

from __future__ import annotations

from functools import partial

from compiler.backends.cuda.passes.gather_rounded import gather_rounded
from compiler.backends.cuda.passes.join_branches import JoinBranches
from compiler.backends.cuda.passes.join_independent import JoinIndependent
from compiler.backends.cuda.passes.join_rows import JoinRows
from compiler.backends.cuda.passes.round_attention import round_attention
from compiler.backends.cuda.schedule.elements import is_one_launch
from compiler.backends.cuda.schedule.product import schedule_product
from compiler.backends.cuda.schedule.rows import schedule_rows
from compiler.backends.cuda.schedule.rules import schedule
from compiler.backends.cuda.schedule.small_rows import schedule_small_rows
from compiler.backends.pipeline import pipeline_of
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.numbers import Kind
from compiler.machine.products import ProductTiles, product_tiles
from compiler.machine.target import Target
from compiler.passes.base import Instrument, Pipeline
from compiler.passes.pack_operands import PackOperands
from compiler.passes.round_operands import RoundOperands
from compiler.passes.widen_tables import widen_tables


def pipeline(target: Target, instruments: tuple[Instrument, ...] = ()) -> Pipeline:
    """Return the passes from operators to scheduled kernels in planned memory for a GPU, as `Backend.pipeline` requires."""
    tiles = product_tiles(target)
    step = min(tile.depth for tile in tiles.tiles)
    return pipeline_of(
        operators=[widen_tables, RoundOperands(frozenset([Kind.INT, Kind.E4M3, Kind.E2M1]), of_experts=step), gather_rounded],
        nests=[
            round_attention,
            PackOperands(tiles.floats.shape.columns, tiles.all_pairs, tiles.scaled, others=False),
            JoinBranches(lambda prim: schedule_product(prim, tiles) is not None),
            JoinRows(lambda prim: schedule_small_rows(prim) is not None),
            JoinIndependent(partial(_may_share_a_launch, tiles=tiles, target=target)),
        ],
        schedule=partial(schedule, tiles=tiles, target=target),
        instruments=instruments,
    )


def _may_share_a_launch(prim: PrimFunc, tiles: ProductTiles, target: Target) -> bool:
    """Return whether one launch computes all stages of a function, with the schedule of rows (rows.py) or the reference schedule
    (elements.py), and rules.py chooses that schedule. Schedules of earlier rules are faster where they apply. For example, the schedule of
    rows also computes products, but not on tensor cores."""
    if not is_one_launch(prim) and schedule_rows(prim) is None:
        return False
    return schedule(prim, tiles, target).attrs["schedule"] in ("rows", "elements")
