"""Remove what nothing uses: bindings of pure values, and functions that no entry point reaches.

Kept are calls that may have an effect: impure operators and functions, launches, in-place calls on memory that outlives them, and
`match_cast`s, which are checks and define variables.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.graph import (
    Block,
    Body,
    Call,
    CallFunc,
    CallLibrary,
    CallTir,
    FuncRef,
    Function,
    If,
    Launch,
    MatchCast,
    Value,
    Var,
)
from compiler.ir.loops import PrimFunc
from compiler.ir.module import IRModule
from compiler.ir.visit import operands


@dataclass(frozen=True, slots=True)
class EliminateDeadCode:
    entries: tuple[str, ...] = ()  # functions to keep; none named: every graph function

    def __call__(self, module: IRModule) -> IRModule:
        functions = {name: _clean(func, module) for name, func in module.graph_functions.items()}
        kept = _reachable(functions, self.entries or tuple(functions))
        result: dict[str, Function | PrimFunc] = {}
        for name, func in module.functions.items():
            if name in kept:
                result[name] = functions.get(name, func)
        same = len(result) == len(module.functions) and all(module.functions[n] is f for n, f in result.items())
        return module if same else IRModule(result)


def _clean(func: Function, module: IRModule) -> Function:
    used: set[Var] = set()
    body = _clean_body(func.body, used, module)
    if body is func.body:
        return func
    return Function(func.params, body, func.result_type, func.pure, func.num_inputs, func.arena)


def _clean_body(body: Body, used: set[Var], module: IRModule) -> Body:
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


def _reachable(functions: dict[str, Function], entries: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    todo = list(entries)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        if name in functions:
            todo += _referenced(functions[name].body)
    return found


def _referenced(body: Body) -> list[str]:
    names: list[str] = []
    for binding in body.bindings:
        value = binding.value
        if isinstance(value, CallTir | Launch):
            names.append(value.func)
        if isinstance(value, If):
            names += _referenced(value.then) + _referenced(value.orelse)
        names += [a.name for a in operands(value) if isinstance(a, FuncRef)]
    if isinstance(body.result, FuncRef):
        names.append(body.result.name)
    return names
