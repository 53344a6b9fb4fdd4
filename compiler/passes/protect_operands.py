"""Copy what an in-place call would destroy.

Before: an in-place call means what its pure form means. After: it may really take its operand's memory, because nobody reads the old value
again and the memory is ours: made by an earlier call, or an input of a function that is declared impure. Where that does not hold, a copy
is made first.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.builder import Builder
from compiler.ir.deduce import type_of
from compiler.ir.graph import Atom, Binding, Body, Call, CallTir, Copy, Function, If, MakeTuple, MatchCast, TupleGet, Value, Var
from compiler.ir.loops import Buffer, Load
from compiler.ir.module import IRModule
from compiler.ir.types import TensorType
from compiler.ir.visit import operands
from compiler.ops.nest import fill
from compiler.ops.tables import VIEWS
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


@dataclass(slots=True)
class _Memory:
    """One piece of memory under all its names."""

    ours: bool
    last_use: int = 0


def _endangered(func: Function) -> dict[Var, list[int]]:
    """For each in-place call, by its variable: the operands that must be copied first."""
    memories: dict[Var, set[int]] = {}
    table: list[_Memory] = []
    calls: list[tuple[int, Var, CallTir]] = []
    clock = 0

    def new(var: Var, ours: bool) -> None:
        memories[var] = {len(table)}
        table.append(_Memory(ours))

    def of(atom: Atom) -> set[int]:
        return memories.get(atom, set()) if isinstance(atom, Var) else set()

    def walk(body: Body) -> None:
        nonlocal clock
        for binding in body.bindings:
            clock += 1
            value = binding.value
            for atom in operands(value):
                for m in of(atom):
                    table[m].last_use = clock
            match value:
                case If(then=then, orelse=orelse):
                    walk(then)
                    walk(orelse)
                    memories[binding.var] = of(then.result) | of(orelse.result)
                case CallTir(inplace=inplace) if any(i is not None for i in inplace):
                    calls.append((clock, binding.var, value))
                    new(binding.var, True)
                case Copy() | MatchCast() | MakeTuple() | TupleGet() | Var():
                    memories[binding.var] = {m for a in operands(value) for m in of(a)}
                case Call(op=op, args=args) if op.name in VIEWS:
                    memories[binding.var] = of(args[0])
                case _:
                    new(binding.var, True)
        for m in of(body.result):
            table[m].last_use = clock + 1

    for index, param in enumerate(func.params):
        mutable = not func.pure and (func.num_inputs is None or index < func.num_inputs)
        new(param, mutable)
    walk(func.body)
    found: dict[Var, list[int]] = {}
    for time, var, call in calls:
        for index in call.inplace:
            if index is None:
                continue
            held = of(call.args[index])
            if not held or any(not table[m].ours or table[m].last_use > time for m in held):
                found.setdefault(var, []).append(index)
    return found


def destroyed(body: Body) -> set[Var]:
    """The values whose memory in-place calls take, under all their names."""
    found: set[Var] = set()

    def walk(body: Body) -> None:
        for binding in reversed(body.bindings):
            match binding.value:
                case CallTir(args=args, inplace=inplace):
                    found.update(a for i in inplace if i is not None and isinstance(a := args[i], Var))
                case If(then=then, orelse=orelse):
                    if binding.var in found:
                        found.update(a for a in (then.result, orelse.result) if isinstance(a, Var))
                    walk(then)
                    walk(orelse)
                case Copy() | MatchCast() | MakeTuple() | TupleGet() | Var() as value if binding.var in found:
                    found.update(a for a in operands(value) if isinstance(a, Var))
                case Call(op=op, args=args) if binding.var in found and op.name in VIEWS:
                    found.update(a for a in args[:1] if isinstance(a, Var))
                case _:
                    pass

    walk(body)
    return found
