"""Copy operands that an in-place call would destroy.

Before: an in-place call means the same as a call that leaves its operand unchanged. After: an in-place call may overwrite its operand's
memory, because nothing reads the old value again, and because the memory belongs to the function: an earlier call made it, or it is an
input of a function that is declared impure. Where that does not hold, the operand is copied first. The attribute `inplace` of each function
that an in-place call calls then states which of its buffers share memory. The function's body accesses such memory by the name of the
output alone, so that later passes and schedules see which iterations read elements that other iterations write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from compiler.ir.errors import CompileError
from compiler.ir.graph.atoms import Atom, FuncRef, Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.function import Binding, Body, Function, If, Value
from compiler.ir.graph.values import CallFunc, CallTir, MakeTuple, TupleGet
from compiler.ir.graph.visit import operands
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.visit import fresh_prim, rename_buffers
from compiler.ir.loops.write import Kernel
from compiler.ir.module import IRModule
from compiler.ir.types import FuncType, ObjectType, TensorType, TupleType
from compiler.ops.memory import Owners, Place, shared_with, written
from compiler.passes.outline import Outliner, shared_buffers
from compiler.passes.rewrite import rewrite_function


def protect_operands(module: IRModule) -> IRModule:
    builder = Builder(module)
    outliner = Outliner(builder, module)
    taken = taken_in(module)
    changed = False
    for name, func in module.graph_functions.items():
        endangered = _endangered(func, taken)

        def replace_call(builder: Builder, binding: Binding, value: Value, endangered: dict[Var, list[int]] = endangered) -> Value | None:
            if not isinstance(value, CallTir | CallFunc):
                return None
            args = list(value.args)
            for index in endangered.get(binding.var, ()):
                args[index] = _own(builder, outliner, args[index], f"{binding.var.name}.own")
            made = tuple(args)
            if isinstance(value, CallFunc):
                return CallFunc(value.callee, made) if made != value.args else None
            callee = _stating(outliner, value)
            return CallTir(callee, made, value.out, value.inplace) if (callee, made) != (value.func, value.args) else None

        changed |= rewrite_function(builder, name, func, replace_call)
    return builder.finish() if changed else module


def _stating(outliner: Outliner, call: CallTir) -> str:
    """Return the name of a function that states which buffers share memory in the call, and reads this memory by the name of the output:
    the called function, or a copy of it."""
    prim = outliner.module.prim(call.func)
    stated = {(i, o) for i, o in prim.attrs.get("inplace", ())}
    shared = shared_buffers(prim.params[: len(call.args)], call.inplace)
    body = rename_buffers(prim.body, {prim.buffers[i]: prim.buffers[o] for i, o in shared})
    if stated.issuperset(shared) and body is prim.body:
        return call.func
    attrs = {**prim.attrs, "inplace": [list(pair) for pair in sorted({*stated, *shared})]}
    return outliner.add(call.func, fresh_prim(dataclasses.replace(prim, body=body, attrs=attrs)))


def _own(builder: Builder, outliner: Outliner, atom: Atom, name: str) -> Var:
    """Return a copy of a tensor, or a tuple of copies of the tensors of a tuple. Raise CompileError if the shape or the element type of a
    tensor is unknown, and for any other value."""
    match type_of(atom):
        case TensorType(shape=shape, dtype=dtype) if shape is not None and dtype is not None:
            source, target = Buffer("a", shape, dtype), Buffer("out", shape, dtype)
            k = Kernel()
            out, x = k.arrays(target, source)
            with k.nest(shape) as at:
                out[at] = x[at]
            return builder.emit(outliner.call("copy", [(source, atom)], (target,), k.body()), name)
        case TupleType(fields=fields):
            parts = [builder.emit(TupleGet(atom, i)) for i in range(len(fields))]
            return builder.emit(MakeTuple(tuple(_own(builder, outliner, part, name) for part in parts)), name)
        case type_:
            raise CompileError(
                f"{atom} of {type_} is changed in place and read later, and its extents are unknown; state them with match_cast"
            )


# --- ownership and later reads -----------------------------------------------------------------------------------------

Taken = Callable[[Value], tuple[int, ...]]  # returns the positions of the operands whose memory a value overwrites


def taken_in(module: IRModule) -> Taken:
    """Return a function that returns the positions of the operands that a value overwrites. An in-place call overwrites the operands that
    it names. A call of an impure function overwrites the arguments of those parameters that the function's body overwrites. If the callee
    is a variable, so that the body is not known, an impure call counts as overwriting all operands that are tensors, tuples or objects."""
    by_function: dict[str, tuple[int, ...]] = {}

    def taken(value: Value) -> tuple[int, ...]:
        match value:
            case CallTir(inplace=inplace):
                return tuple(i for i in inplace if i is not None)
            case CallFunc(callee=FuncRef(name=name)):
                return of_function(name)
            case CallFunc(callee=callee, args=args):
                type_ = type_of(callee)
                pure = isinstance(type_, FuncType) and type_.pure
                return () if pure else tuple(i for i, a in enumerate(args) if isinstance(type_of(a), TensorType | TupleType | ObjectType))
            case _:
                return ()

    def of_function(name: str) -> tuple[int, ...]:
        func = module.graph(name)
        if func.pure:
            return ()
        if name not in by_function:
            by_function[name] = tuple(range(len(func.params)))  # assume all parameters during the analysis: the function may call itself
            changed = destroyed(func.body, taken)
            by_function[name] = tuple(i for i, p in enumerate(func.params) if p in changed)
        return by_function[name]

    return taken


def destroyed(body: Body, taken: Taken) -> set[Var]:
    """Return the values that calls overwrite, and the values of which these are aliases (`written`)."""
    return written(body, lambda value: [_operands(value)[i] for i in taken(value)])


def _operands(value: Value) -> tuple[Atom, ...]:
    return value.args if isinstance(value, CallTir | CallFunc) else ()


def _endangered(func: Function, taken: Taken) -> dict[Var, list[int]]:
    """Return, by the variable of each call that overwrites memory, the positions of the operands that must be copied before the call. Calls
    that need no copy are left out."""

    def shared(value: Value) -> tuple[Atom, ...]:
        """Return the values with which a value shares memory. Memory that a call overwrote belongs to the call's result alone."""
        gone = {_operands(value)[i] for i in taken(value)}
        return tuple(a for a in shared_with(value) if a not in gone)

    owners = Owners(func.body, shared)
    last_use: dict[Place, int] = {}
    calls: list[tuple[int, Binding]] = []
    clock = 0

    def use(*atoms: Atom) -> None:
        last_use.update((place, clock) for place in owners.of(*atoms))

    def walk(body: Body) -> None:
        nonlocal clock
        for binding in body.bindings:
            clock += 1
            value = binding.value
            use(*operands(value))
            if isinstance(value, If):
                walk(value.then)
                walk(value.orelse)
            elif taken(value):
                calls.append((clock, binding))
        clock += 1
        use(body.result)

    walk(func.body)
    fixed = owners.of(*(p for i, p in enumerate(func.params) if func.pure or (func.num_inputs is not None and i >= func.num_inputs)))
    found: dict[Var, list[int]] = {}
    for time, binding in calls:
        args = _operands(binding.value)
        for index in taken(binding.value):
            held = owners.of(args[index])
            read = owners.of(*(a for i, a in enumerate(args) if i != index))
            # Copy a constant, and memory that does not belong to the function, that another operand shares, or that is read later.
            if not held or held & (fixed | read) or any(last_use[place] > time for place in held):
                found.setdefault(binding.var, []).append(index)
    return found
