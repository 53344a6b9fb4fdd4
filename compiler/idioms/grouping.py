"""Recognise the loop nest that groups rows by their experts (`group_rows`), by comparing it with the one that the operator writes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.idioms.nest import without_allocations
from compiler.ir.equal import structural_equal
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ops.routing import group_nest

_NUM_AXES = [2, 1, 1, 2]  # numbers of axes of the parameters: experts, tokens, chosen experts, places


@dataclass(frozen=True, slots=True)
class Grouping:
    """The operand and the outputs of `group_rows` (ops/routing.py)."""

    experts: Buffer  # [tokens, k]
    tokens: Buffer  # [rows]: the token of each row
    chosen: Buffer  # [rows]: the expert of each row
    places: Buffer  # [tokens, k]: the row of each choice
    count: int  # number of experts


def match_grouping(prim: PrimFunc) -> Grouping | None:
    """Return the buffers of a function that groups rows, or None for any other function."""
    temporaries, _ = without_allocations(prim.body)
    if [len(b.shape) for b in prim.buffers] != _NUM_AXES or prim.num_outputs != len(_NUM_AXES) - 1 or not temporaries:
        return None
    (count, *_), (experts, *outputs) = temporaries[0].shape, prim.buffers
    if not count.is_const or not experts.shape[1].is_const:
        return None
    if structural_equal(prim, replace(prim, body=group_nest(experts, outputs, count.const))) is not None:
        return None
    tokens, chosen, places = outputs
    return Grouping(experts, tokens, chosen, places, count.const)
