"""Move work that depends on weights alone out of the step and into a function that runs once, when weights are bound.

Before: an entry point `step(inputs..., weights...)`. After: `step(inputs..., kept..., prepared...)`, where `kept` are the weights that are
used as they are, and `step.weights(weights...)` that returns the tuple of `prepared` values: whatever was packed, transposed, quantised or
folded from weights. Both are compiled alike, so the packing loops run as fast as any other.
"""

from __future__ import annotations

from collections.abc import Container

from compiler.ir.graph import (
    Atom,
    Binding,
    Block,
    BlockKind,
    Body,
    Call,
    CallTir,
    Constant,
    Copy,
    Function,
    MakeTuple,
    TupleGet,
    Value,
    Var,
)
from compiler.ir.module import IRModule
from compiler.ir.types import TupleType
from compiler.ir.visit import operands
from compiler.passes.eliminate_dead_code import has_effect
from compiler.passes.rewrite import count_uses

SUFFIX = ".weights"


def lift_weights(module: IRModule) -> IRModule:
    lifted: dict[str, Function] = {}
    for name, func in module.graph_functions.items():
        if func.weights and name + SUFFIX not in module.functions:
            lifted |= _lift(name, func, module)
    return module.update(lifted) if lifted else module


def _lift(name: str, func: Function, module: IRModule) -> dict[str, Function]:
    early: dict[Var, None] = dict.fromkeys(func.weights)  # in order: the order of the prepared values
    moved: list[Binding] = []
    for binding in func.body.bindings:
        if _movable(binding.value, early, module):
            early[binding.var] = None
            moved.append(binding)
    if not moved:
        return {}
    stays = set(moved)
    rest = [Block(tuple(b for b in block.bindings if b not in stays), block.kind) for block in func.body.blocks]
    body = Body(tuple(b for b in rest if b.bindings), func.body.result)
    used = count_uses(body)
    kept = [v for v in func.weights if v in used]
    wanted = [b.var for b in moved if b.var in used]
    sources = [v for v in func.weights if any(v in operands(b.value) for b in moved)]
    prepared = Var("prepared", TupleType(tuple(v.type for v in wanted)))
    block = Block((*moved, Binding(prepared, MakeTuple(tuple(wanted)))), BlockKind.DATAFLOW)
    assert func.num_inputs is not None
    inputs = func.params[: func.num_inputs]
    step = Function((*inputs, *kept, *wanted), body, func.result_type, func.pure, func.num_inputs, func.arena)
    return {name: step, name + SUFFIX: Function(tuple(sources), Body((block,), prepared), prepared.type)}


def _movable(value: Value, early: Container[Var], module: IRModule) -> bool:
    if not isinstance(value, Call | CallTir | Copy | TupleGet | MakeTuple) or has_effect(value, module):
        return False
    atoms = operands(value)
    return any(isinstance(a, Var) for a in atoms) and all(_early(a, early) for a in atoms)


def _early(atom: Atom, early: Container[Var]) -> bool:
    return atom in early if isinstance(atom, Var) else isinstance(atom, Constant)
