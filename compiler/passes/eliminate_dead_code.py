"""Remove bindings of pure values that nothing uses, and loop nests that no function calls.

Values that may have an effect stay: calls of impure operators and functions, calls of functions that are passed as values, launches,
in-place calls, and calls of library routines that state an effect. `match_cast`s stay, because they are checks and define variables. An If
stays if one of its branches contains such a value. Run this pass after `legalize`, which turns operators that update states into in-place
calls: before, these operators look like pure values that nothing uses.
"""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.graph.atoms import FuncRef, Var
from compiler.ir.graph.function import Block, Body, Function, If, Value
from compiler.ir.graph.values import Call, CallFunc, CallLibrary, CallTir, Launch, MatchCast
from compiler.ir.graph.visit import called_nests, operands
from compiler.ir.module import IRModule


def eliminate_dead_code(module: IRModule) -> IRModule:
    functions = {name: _clean(func, module) for name, func in module.graph_functions.items()}
    kept = with_nests(functions, module)
    same = len(kept.functions) == len(module.functions) and all(module.functions[n] is f for n, f in kept.functions.items())
    return module if same else kept


def with_nests(functions: Mapping[str, Function], module: IRModule) -> IRModule:
    """Return a module of these functions and the loop nests that they call, in the order of `module`."""
    called = {name for func in functions.values() for name in called_nests(func.body)}
    return IRModule({name: functions.get(name, func) for name, func in module.functions.items() if name in functions or name in called})


def _clean(func: Function, module: IRModule) -> Function:
    used: set[Var] = set()
    body = _clean_body(func.body, used, module)
    if body is func.body:
        return func
    return Function(func.params, body, func.result_type, func.pure, func.num_inputs, func.arena)


def _clean_body(body: Body, used: set[Var], module: IRModule) -> Body:
    """Return the body without bindings that nothing uses. `used` has the variables that are read later; the variables that the body reads
    are added to it."""
    if isinstance(body.result, Var):
        used.add(body.result)
    blocks: list[Block] = []
    changed = False
    for block in reversed(body.blocks):
        kept = []
        for binding in reversed(block.bindings):
            if binding.var not in used and not has_effect(binding.value, module):
                changed = True
                continue
            value = binding.value
            if isinstance(value, If):
                then = _clean_body(value.then, used, module)
                orelse = _clean_body(value.orelse, used, module)
                if then is not value.then or orelse is not value.orelse:
                    changed = True
                    binding = type(binding)(binding.var, If(value.cond, then, orelse))
            used.update(a for a in operands(value) if isinstance(a, Var))
            kept.append(binding)
        if len(kept) == len(block.bindings) and all(a is b for a, b in zip(reversed(kept), block.bindings, strict=True)):
            blocks.append(block)
        elif kept:
            blocks.append(Block(tuple(reversed(kept)), block.kind))
    return Body(tuple(reversed(blocks)), body.result) if changed else body


def has_effect(value: Value, module: IRModule) -> bool:
    """Whether the value must stay even if nothing uses it: see the list at the head of this file."""
    match value:
        case Call(op=op):
            return not op.pure
        case CallTir(inplace=inplace):
            return any(i is not None for i in inplace)
        case CallLibrary(attrs=attrs):
            return bool(attrs.get("effect"))
        case CallFunc(callee=FuncRef(name=name)):
            return not module.graph(name).pure
        case CallFunc() | Launch() | MatchCast():
            return True
        case If(then=then, orelse=orelse):
            return any(has_effect(b.value, module) for side in (then, orelse) for b in side.bindings)
        case _:
            return False
