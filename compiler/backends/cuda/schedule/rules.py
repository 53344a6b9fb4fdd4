"""Choose the schedule of a loop nest: the first rule that applies."""

from __future__ import annotations

from compiler.backends.cuda.schedule.attention.floats import schedule_attention
from compiler.backends.cuda.schedule.attention.tensors import schedule_tensor_attention
from compiler.backends.cuda.schedule.attention.warpgroups import schedule_warpgroup_attention
from compiler.backends.cuda.schedule.elements import schedule_elements
from compiler.backends.cuda.schedule.float_product import schedule_float_product
from compiler.backends.cuda.schedule.grouping import schedule_grouping
from compiler.backends.cuda.schedule.product import schedule_product
from compiler.backends.cuda.schedule.rows import schedule_rows
from compiler.backends.cuda.schedule.small_rows import schedule_small_rows
from compiler.ir.loops.prim_func import PrimFunc
from compiler.machine.products import ProductTiles
from compiler.machine.target import Target


def schedule(prim: PrimFunc, tiles: ProductTiles, target: Target) -> PrimFunc:
    """Return the nest with the schedule of the first rule that applies. The last rule applies to every nest."""
    return (
        schedule_warpgroup_attention(prim, target)
        or schedule_tensor_attention(prim, target)
        or schedule_attention(prim)
        or schedule_product(prim, tiles)
        or schedule_float_product(prim)
        or schedule_grouping(prim)
        or schedule_small_rows(prim)
        or schedule_rows(prim)
        or schedule_elements(prim)
    )
