"""Aliasing: which values may share memory with which other values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import NamedTuple, TypeAlias

from compiler.ir.graph.atoms import Atom, Var
from compiler.ir.graph.function import Body, If, Value
from compiler.ir.graph.values import Call, CallFunc, Copy, MakeTuple, MatchCast, TupleGet
from compiler.ir.graph.visit import operands
from compiler.ir.types import TupleType, Type
from compiler.ops.tables import VIEWS


def shared_with(value: Value) -> tuple[Atom, ...]:
    """Return the operands, or the results of an If's branches, whose memory `value` may share. Return no atoms if `value` has its own
    memory. The result of an in-place call of a loop nest counts as new memory, since the pass `protect_operands` ensures that nothing reads
    the old value afterwards."""
    match value:
        case If(then=then, orelse=orelse):
            return then.result, orelse.result
        case Copy() | MatchCast() | MakeTuple() | TupleGet() | Var() | CallFunc():  # a callee may return its arguments
            return operands(value)
        case Call(op=op, args=args) if op.name in VIEWS:
            return args[:1]
        case _:
            return ()


class Place(NamedTuple):
    """A piece of memory: that of a variable, or that of one field of a tuple."""

    var: Var
    path: tuple[int, ...]  # indices of nested fields, if the variable is a tuple


# a tuple whose fields are tracked separately has an entry per field; any other value has a set of places
_Held: TypeAlias = "frozenset[Place] | tuple[_Held, ...]"


class Owners:
    """Maps each variable to the places whose memory it may share: those of the values from which it was made, or else its own. The fields
    of a tuple have separate places. Constants and numbers have no places."""

    def __init__(self, body: Body, shared: Callable[[Value], tuple[Atom, ...]] = shared_with) -> None:
        self._shared = shared
        self._held: dict[Var, _Held] = {}
        self._walk(body)

    def of(self, *atoms: Atom) -> frozenset[Place]:
        """Return all places whose memory the atoms may share."""
        return _all([self._of(a) for a in atoms])

    def _of(self, atom: Atom) -> _Held:
        if not isinstance(atom, Var):
            return frozenset()
        held = self._held.get(atom)
        return _own(atom, atom.type) if held is None else held

    def _walk(self, body: Body) -> None:
        for binding in body.bindings:
            value = binding.value
            if isinstance(value, If):
                self._walk(value.then)
                self._walk(value.orelse)
            if shared := self._shared(value):
                self._held[binding.var] = self._given(value, [self._of(a) for a in shared])

    def _given(self, value: Value, shared: list[_Held]) -> _Held:
        match value:
            case MakeTuple():
                return tuple(shared)
            case TupleGet(index=index) if isinstance(shared[0], tuple):
                return shared[0][index]
            case CallFunc():
                return _all(shared)
            case _:
                return reduce(_either, shared)


def _own(var: Var, type_: Type, path: tuple[int, ...] = ()) -> _Held:
    if isinstance(type_, TupleType):
        return tuple(_own(var, field, (*path, i)) for i, field in enumerate(type_.fields))
    return frozenset({Place(var, path)})


def _either(a: _Held, b: _Held) -> _Held:
    """Return the places of a value that is one of two values: field by field if both values are tuples of the same length."""
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(map(_either, a, b))
    return _all([a, b])


def _all(held: Iterable[_Held]) -> frozenset[Place]:
    return frozenset(place for h in held for place in (_all(h) if isinstance(h, tuple) else h))


def written(body: Body, writes: Callable[[Value], Iterable[Atom]]) -> set[Var]:
    """Return the variables that are written, and all variables of which they are aliases, directly or through others. Further aliases of
    these are not included. `writes` returns the atoms that one value writes."""
    found: set[Var] = set()

    def walk(body: Body) -> None:
        for binding in reversed(body.bindings):
            value = binding.value
            found.update(a for a in writes(value) if isinstance(a, Var))
            if binding.var in found:
                found.update(a for a in shared_with(value) if isinstance(a, Var))
            if isinstance(value, If):
                walk(value.then)
                walk(value.orelse)

    walk(body)
    return found
