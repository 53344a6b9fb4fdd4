"""Move work that depends on weights alone out of the step and into a function that runs once, when weights are bound.

Before: an entry point `step(inputs..., weights...)`. After: `step(inputs..., kept..., prepared...)`, where `kept` are the weights that are
used as they are, and `step.weights(weights...)` that returns the tuple of `prepared` values: whatever was packed, transposed, quantised or
folded from weights. Both are compiled alike, so the packing loops run as fast as any other.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

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
from compiler.ir.types import TupleType, binders_of, vars_of
from compiler.ir.visit import Uses, free_vars, fresh_function, operands, used_vars
from compiler.passes.eliminate_dead_code import has_effect
from compiler.passes.protect_operands import destroyed
from compiler.passes.rewrite import count_uses
from runtime.executable import PREPARATION


def lift_weights(module: IRModule) -> IRModule:
    lifted: dict[str, Function] = {}
    for name, func in module.graph_functions.items():
        if func.weights and name + PREPARATION not in module.functions:
            lifted |= _lift(name, func, module)
    return module.update(lifted) if lifted else module


def _lift(name: str, func: Function, module: IRModule) -> dict[str, Function]:
    early: dict[Var, None] = dict.fromkeys(func.weights)  # in order: the order of the prepared values
    defined = {d for v in func.weights for d in binders_of(v.type)}
    fresh = destroyed(func.body)  # by every call, so every call must make them
    moved: list[Binding] = []
    for binding in func.body.bindings:
        if binding.var in fresh:
            continue
        if _movable(binding.value, early, module) and defined.issuperset(used_vars(binding.value).dims):
            early[binding.var] = None
            moved.append(binding)
    if not moved:
        return {}
    stays = set(moved)
    rest = [Block(tuple(b for b in block.bindings if b not in stays), block.kind) for block in func.body.blocks]
    body = Body(tuple(b for b in rest if b.bindings), func.body.result)
    used = count_uses(body)
    wanted = [b.var for b in moved if b.var in used]
    prepared = Var("prepared", TupleType(tuple(v.type for v in wanted)))
    block = Block((*moved, Binding(prepared, MakeTuple(tuple(wanted)))), BlockKind.DATAFLOW)
    preparation = Body((block,), prepared)
    assert func.num_inputs is not None
    inputs = func.params[: func.num_inputs]
    kept = _with_definitions([v for v in func.weights if v in used], (*inputs, *wanted), func.weights, free_vars(body))
    read = count_uses(preparation)
    sources = _with_definitions([v for v in func.weights if v in read], (), func.weights, free_vars(preparation))
    step = Function((*inputs, *kept, *wanted), body, func.result_type, func.pure, func.num_inputs, func.arena)
    prepare = fresh_function(Function(tuple(sources), preparation, prepared.type))
    return {name: step, name + PREPARATION: prepare}


def _with_definitions(chosen: list[Var], others: Sequence[Var], weights: Sequence[Var], needs: Uses) -> list[Var]:
    """The chosen weights, and those without which a variable of the shapes would have no definition."""
    given = {*chosen, *others}
    mentioned = dict.fromkeys([*needs.dims, *(d for v in given for d in vars_of(v.type))])
    for dim in mentioned:
        if not any(dim in binders_of(v.type) for v in given):
            given.update([w for w in weights if dim in binders_of(w.type)][:1])
    return [w for w in weights if w in given]


def _movable(value: Value, early: Container[Var], module: IRModule) -> bool:
    if not isinstance(value, Call | CallTir | Copy | TupleGet | MakeTuple) or has_effect(value, module):
        return False
    atoms = operands(value)
    return any(isinstance(a, Var) for a in atoms) and all(_early(a, early) for a in atoms)


def _early(atom: Atom, early: Container[Var]) -> bool:
    return atom in early if isinstance(atom, Var) else isinstance(atom, Constant)
