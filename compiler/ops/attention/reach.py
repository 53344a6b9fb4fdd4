"""The first and the last position of its sequence to which a token attends. The operand `positions` of attention states the last one, and
also the first one if it has two columns."""

from __future__ import annotations

from compiler.ir.dims import Dim, dim_max
from compiler.ir.dtypes import DType
from compiler.ir.loops.attention import Attention
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, cast

FIRST, LAST = 0, 1  # columns of `positions[tokens, 2]`


def has_window(node: Attention) -> bool:
    """Return whether some tokens may not attend to the first position of their sequence."""
    return node.window > 0 or node.has_spans


def last_position(positions: Array, token: Dim) -> Scalar:
    """Return the last position to which a token attends."""
    return cast(positions[token, LAST] if len(positions.shape) == 2 else positions[token], DType.I64)


def first_position(k: Kernel, node: Attention, positions: Array, token: Dim, last: Dim) -> Dim:
    """Return the first position to which a token attends. `last` is the last position to which it attends."""
    if node.has_spans:
        return k.let("low", cast(positions[token, FIRST], DType.I64))
    return first_of_window(node, last)


def first_of_window(node: Attention, last: Dim) -> Dim:
    """Return the first position of the window that ends at `last`, or 0 if there is no window."""
    return dim_max(0, last - (node.window - 1)) if node.window else Dim.of(0)
