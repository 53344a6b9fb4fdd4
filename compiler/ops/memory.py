"""In whose memory a value lies: the one place that knows which values are names of others."""

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
    """The values in whose memory this one may lie; none where it has its own. What an in-place call gives counts as new: nobody may
    read the old value afterwards."""
    match value:
        case If(then=then, orelse=orelse):
            return then.result, orelse.result
        case Copy() | MatchCast() | MakeTuple() | TupleGet() | Var() | CallFunc():  # a callee may return what it was given
            return operands(value)
        case Call(op=op, args=args) if op.name in VIEWS:
            return args[:1]
        case _:
            return ()


class Place(NamedTuple):
    """Memory of its own: a variable's, or that of one field of it."""

    var: Var
    path: tuple[int, ...]  # of fields, where the variable is a tuple that its value made


_Held: TypeAlias = "frozenset[Place] | tuple[_Held, ...]"  # by field, as far as a tuple's are known apart


class Owners:
    """The memory in which each variable may lie. Fields of a tuple lie apart."""

    def __init__(self, body: Body, shared: Callable[[Value], tuple[Atom, ...]] = shared_with) -> None:
        self._shared = shared
        self._held: dict[Var, _Held] = {}
        self._walk(body)

    def of(self, *atoms: Atom) -> frozenset[Place]:
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
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(map(_either, a, b))
    return _all([a, b])


def _all(held: Iterable[_Held]) -> frozenset[Place]:
    return frozenset(place for h in held for place in (_all(h) if isinstance(h, tuple) else h))


def written(body: Body, writes: Callable[[Value], Iterable[Atom]]) -> set[Var]:
    """The variables whose memory is written, under all their names; `writes` says what one value writes."""
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
