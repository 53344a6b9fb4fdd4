"""Attention in both directions among the tokens of an image, in a decoder whose other tokens attend only to those before them.

The attention operator knows no images; it takes the last position that each token sees. For an image token this is the last position of its
image instead of its own position, so the token sees the whole image. In a layer with a window, the operator also takes the first position
that a token sees, which still depends on the token's own position. An image token reads the keys of later tokens of its image, so all of
them must be in the same step.
"""

from __future__ import annotations

from compiler.frontend.layers.nn import Net
from compiler.ir.graph.atoms import ScalarValue, Var
from compiler.ops.elementwise import MAXIMUM, SUBTRACT
from compiler.ops.index import SCATTER
from compiler.ops.manipulate import CONCAT, EXPAND_DIMS


def spans(net: Net, positions: Var, at: Var, lasts: Var, window: int) -> Var:
    """Return the last position that each token sees, [tokens]; with a window, the first and the last position, [tokens, 2]. The tokens `at`
    see up to `lasts`, and others up to their own position. An image is not longer than a window."""
    seen = net.call(SCATTER, positions, at, lasts, axis=0)
    if not window:
        return seen
    firsts = net.call(MAXIMUM, net.call(SUBTRACT, positions, ScalarValue(window - 1, "i32")), ScalarValue(0, "i32"))
    return net.call(CONCAT, net.call(EXPAND_DIMS, firsts, axes=1), net.call(EXPAND_DIMS, seen, axes=1), axis=1)
