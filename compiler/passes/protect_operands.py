"""Copy what an in-place call would destroy.

Before: an in-place call means what its pure form means. After: it may really take its operand's memory, because nobody reads the old value
again and the memory is ours: made by an earlier call, or an input of a function that is declared impure. Where that does not hold, a copy
is made first.
"""

from __future__ import annotations

from compiler.ir.builder import Builder
from compiler.ir.deduce import type_of
from compiler.ir.graph import Atom, Binding, Body, CallTir, Function, If, Value, Var
from compiler.ir.loops import Buffer, Load
from compiler.ir.module import IRModule
from compiler.ir.types import TensorType
from compiler.ir.visit import operands
from compiler.ops.memory import Owners, written
from compiler.ops.nest import fill
from compiler.passes.outline import Outliner
from compiler.passes.rewrite import rewrite_function


def protect_operands(module: IRModule) -> IRModule:
    builder = Builder(module)
    outliner = Outliner(builder, module)
    changed = False
    for name, func in module.graph_functions.items():
        endangered = _endangered(func)
        if not endangered:
            continue

        def replace(builder: Builder, binding: Binding, value: Value, endangered: dict[Var, list[int]] = endangered) -> Value | None:
            if not isinstance(value, CallTir) or binding.var not in endangered:
                return None
            args = list(value.args)
            for index in endangered[binding.var]:
                args[index] = builder.emit(_copy(outliner, args[index]), f"{binding.var.name}.own")
            return CallTir(value.func, tuple(args), value.out, value.inplace)

        changed |= rewrite_function(builder, name, func, replace)
    return builder.finish() if changed else module


def _copy(outliner: Outliner, atom: Atom) -> CallTir:
    type_ = type_of(atom)
    assert isinstance(type_, TensorType) and type_.shape is not None and type_.dtype is not None
    source, target = Buffer("a", type_.shape, type_.dtype), Buffer("out", type_.shape, type_.dtype)
    return outliner.call("copy", [(source, atom)], (target,), fill(target, lambda *ijk: Load(source, ijk)))


# --- whose memory, and who reads it later ------------------------------------------------------------------------------


def _endangered(func: Function) -> dict[Var, list[int]]:
    """For each in-place call, by its variable: the operands that must be copied first."""
    owners = Owners(func.body)
    last_use: dict[Var, int] = {}
    calls: list[tuple[int, Var, CallTir]] = []
    clock = 0

    def use(*atoms: Atom) -> None:
        last_use.update((owner, clock) for owner in owners.of(*atoms))

    def walk(body: Body) -> None:
        nonlocal clock
        for binding in body.bindings:
            clock += 1
            value = binding.value
            use(*operands(value))
            if isinstance(value, If):
                walk(value.then)
                walk(value.orelse)
            elif isinstance(value, CallTir) and _taken(value):
                calls.append((clock, binding.var, value))
        clock += 1
        use(body.result)

    walk(func.body)
    fixed = {p for i, p in enumerate(func.params) if func.pure or (func.num_inputs is not None and i >= func.num_inputs)}
    found: dict[Var, list[int]] = {}
    for time, var, call in calls:
        for index in call.inplace:
            if index is None:
                continue
            held = owners.of(call.args[index])
            read = owners.of(*(a for i, a in enumerate(call.args) if i != index))
            if not held or held & (fixed | read) or any(last_use[owner] > time for owner in held):
                found.setdefault(var, []).append(index)
    return found


def destroyed(body: Body) -> set[Var]:
    """The values whose memory in-place calls take, under all their names."""
    return written(body, _taken)


def _taken(value: Value) -> list[Atom]:
    return [value.args[i] for i in value.inplace if i is not None] if isinstance(value, CallTir) else []
