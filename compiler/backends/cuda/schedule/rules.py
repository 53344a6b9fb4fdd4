"""Which schedule a loop nest gets: the first rule that takes it."""

from __future__ import annotations

from compiler.backends.cuda.schedule.attention import schedule_attention
from compiler.backends.cuda.schedule.elements import schedule_elements
from compiler.ir.loops.prim_func import PrimFunc


def schedule(prim: PrimFunc) -> PrimFunc:
    return schedule_attention(prim) or schedule_elements(prim)
