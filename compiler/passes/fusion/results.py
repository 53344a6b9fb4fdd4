"""Narrow a call to some of its results. This is possible if its stages do not depend on each other (a split)."""

from __future__ import annotations

from functools import lru_cache

from compiler.idioms.nest import perfect_nest
from compiler.ir.graph.values import CallTir
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import ScalarParam
from compiler.ir.loops.statements import Seq, Stmt, Store
from compiler.ir.loops.visit import loads, sequence, statements, walk_scalars, walk_stmts
from compiler.passes.fusion.join import WrittenCall, written_out


def with_results(call: CallTir, prim: PrimFunc, results: tuple[int, ...]) -> WrittenCall | None:
    """Return a call that computes only the results with these indices, or None if the function is not as `_independent` requires."""
    if not _independent(prim):
        return None
    whole = written_out(call, prim)
    outputs = tuple(whole.outputs[i] for i in results)
    body = sequence([stage for stage in statements(whole.body) if _written(stage).buffer in outputs])
    read = {load.buffer for load in loads(body)} | {s for s in walk_scalars(body) if isinstance(s, ScalarParam)}
    return WrittenCall(call.func, tuple((place, atom) for place, atom in whole.operands if place in read), outputs, body)


@lru_cache(maxsize=512)
def _independent(prim: PrimFunc) -> bool:
    """Whether the function has no schedule, does not work in place, and is a sequence of stages, each of which is a nest that writes one of
    the outputs and reads none of them."""
    if not isinstance(prim.body, Seq) or prim.attrs.keys() & {"inplace", "schedule"}:
        return False
    stages, outputs = statements(prim.body), set(prim.outputs)
    if any(perfect_nest(stage) is None or _written(stage).buffer not in outputs for stage in stages):
        return False
    return not any(load.buffer in outputs for load in loads(prim.body))


def _written(stage: Stmt) -> Store:
    return next(s for s in walk_stmts(stage) if isinstance(s, Store))
