"""Eliminate common subexpressions: replace a pure value, or a check, by an equal earlier one of the same body. Calls of graph functions and
of library routines, and Ifs, are never replaced. A branch may also reuse values computed before it, but code outside a branch never reuses
values computed in it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from compiler.ir.graph.atoms import Atom, Constant, FuncRef, ScalarValue, ShapeValue, Var
from compiler.ir.graph.function import Binding, Block, Body, If, Value
from compiler.ir.graph.values import Call, CallTir, Copy, MakeTuple, MatchCast, TupleGet
from compiler.ir.graph.visit import map_operands, operands
from compiler.ir.module import IRModule
from compiler.passes.rewrite import rewrite_bodies


def share_subexpressions(module: IRModule) -> IRModule:
    return rewrite_bodies(module, lambda func: _share(func.body, {}, {}))


def _share(body: Body, seen: dict[Hashable, Var], same: dict[Var, Var]) -> Body:
    """Share the values of a body. `seen` has the variables of earlier values, by the keys of the values. `same` maps each variable that is
    replaced to the variable that replaces it; this function adds to it."""

    def atom(a: Atom) -> Atom:
        return same.get(a, a) if isinstance(a, Var) else a

    seen = dict(seen)
    blocks: list[Block] = []
    changed = False
    for block in body.blocks:
        bindings: list[Binding] = []
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, If):
                sides = _share(value.then, seen, same), _share(value.orelse, seen, same)
                cond = atom(value.cond)
                if cond is not value.cond or sides[0] is not value.then or sides[1] is not value.orelse:
                    value = If(cond, *sides)
            elif any(atom(a) is not a for a in operands(value)):
                value = map_operands(value, atom)
            key = _key(value)
            if key is not None and key in seen:
                same[binding.var] = seen[key]
                changed = True
                continue
            if key is not None:
                seen[key] = binding.var
            if value is not binding.value:
                changed = True
                binding = Binding(binding.var, value)
            bindings.append(binding)
        blocks.append(Block(tuple(bindings), block.kind))
    result = atom(body.result)
    if not changed and result is body.result:
        return body
    return Body(tuple(b for b in blocks if b.bindings), result)


def _key(value: Value) -> Hashable | None:
    """Return a hashable key, or None if the value must not be shared. Values with equal keys are equal."""
    match value:
        case Call(op=op, args=args, attrs=attrs) if op.pure:
            return ("call", op.name, tuple(map(_atom_key, args)), freeze(attrs))
        case CallTir(func=func, args=args, out=out, inplace=inplace) if all(i is None for i in inplace):
            return ("tir", func, tuple(map(_atom_key, args)), out)
        case MakeTuple(fields=fields):
            return ("tuple", tuple(map(_atom_key, fields)))
        case TupleGet(value=atom, index=index):
            return ("get", _atom_key(atom), index)
        case Copy(value=atom):
            return ("copy", _atom_key(atom))
        case MatchCast(value=atom, type=type_):  # a value that passed a check would pass it again; an error names the first boundary
            return ("check", _atom_key(atom), type_)
        case _:
            return None


def _atom_key(atom: Atom) -> Hashable:
    """Return a key of an operand. Arrays of more than 64 elements count as equal only if they are the same object."""
    match atom:
        case Var():
            return atom
        case Constant(data=data):
            return ("const", str(data.dtype), data.shape, data.tobytes()) if data.size <= 64 else ("array", id(data))
        case ShapeValue(dims=dims):
            return ("shape", dims)
        case ScalarValue(value=value, dtype=dtype):
            return ("scalar", dtype, freeze(value))
        case FuncRef(name=name):
            return ("func", name)


def freeze(value: Any) -> Hashable:
    """Return a hashable key that distinguishes 1 from True and 0.0 from -0.0."""
    if isinstance(value, dict):
        return tuple((k, freeze(v)) for k, v in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(map(freeze, value))
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, bool | int | float):
        return repr(value)
    return value
