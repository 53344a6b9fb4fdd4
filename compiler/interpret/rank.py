"""The rank of the arrays in which the interpreter evaluates a nest: the largest number of nested loop variables and reduced axes, but at
least 2."""

from __future__ import annotations

from functools import lru_cache

from compiler.ir.fields import Holds, items
from compiler.ir.loops.attention import Attention
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Contraction, GroupedContraction, Scalar
from compiler.ir.loops.statements import For, Stmt
from compiler.ir.loops.visit import inside_out, scalars_of, subscalars, substatements
from compiler.ops.attention.plain import plain_attention


@lru_cache(maxsize=1024)
def rank_of(prim: PrimFunc) -> int:
    """Return the rank for a nest. The rank is at least 2, because rank 1 is reserved for arrays of points that a mask has selected."""
    return max(2, _depth(prim.body))


def _depth(stmt: Stmt) -> int:
    if isinstance(stmt, Attention):
        return _depth(plain_attention(stmt))
    inside = [*map(_depth, substatements(stmt)), *map(_scalar_depth, scalars_of(stmt))]
    return isinstance(stmt, For) + max(inside, default=0)


def _scalar_depth(scalar: Scalar) -> int:
    depths: dict[Scalar, int] = {}
    for node in inside_out(scalar):
        evaluated = node.fold if isinstance(node, Contraction | GroupedContraction) else node  # a contraction's fold may have an extra axis
        depths[node] = len(items(evaluated, Holds.NEW_AXES)) + max((depths[inner] for inner in subscalars(node)), default=0)
    return depths[scalar]
