"""Let the attention kernel serve contexts of any length, so that a new length can reuse its machine code.

Before: in paged attention, the page table has a variable number of columns, at most the number of pages of the longest sequence. After: the
variable has no upper bound if its bound was at least MANY and if the variable is in the shape of no other buffer. A schedule uses the bound
only to find out whether one split, a part of a sequence's keys, has room for all keys of any sequence. A bound of MANY or more never proves
this, so the code stays the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from compiler.ir.dims import Dim, DimVar
from compiler.ir.loops.attention import Attention, Paged
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.visit import substitute
from compiler.ir.module import IRModule

MANY: Final = 128  # number of columns from which the pass drops the bound; a split of any schedule has fewer pages


def any_context(module: IRModule) -> IRModule:
    changed = {name: new for name, prim in module.prim_functions.items() if (new := _unbounded(prim)) is not prim}
    return module.update(changed) if changed else module


def _unbounded(prim: PrimFunc) -> PrimFunc:
    """Return the function without an upper bound for the number of columns of its page table. Return the function itself if it is no paged
    attention, if the number of columns is no variable, if the bound is not known or less than MANY, or if the variable is in the shape of
    another buffer."""
    match prim.body:
        case Attention(keys=Paged(tables=tables)) if (columns := tables.shape[1].var) is not None:
            pass
        case _:
            return prim
    others = [d for buffer in prim.buffers if buffer is not tables for d in buffer.shape]
    if not isinstance(columns.upper, int) or columns.upper < MANY or any(columns in d.vars() for d in others):
        return prim
    any_number = DimVar(columns.name, columns.lower, None, columns.multiple_of)
    wide = replace(tables, shape=(tables.shape[0], Dim.of(any_number)))
    params = tuple(wide if p is tables else p for p in prim.params)
    return replace(prim, params=params, body=substitute(prim.body, {columns: any_number}, {tables: wide}))
