"""In whose memory a value lies: the one place that knows which values are names of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from compiler.ir.graph import Atom, Body, Call, CallFunc, Copy, If, MakeTuple, MatchCast, TupleGet, Value, Var
from compiler.ir.visit import operands
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


class Owners:
    """The variables that have memory of their own, by each variable that may be another name of it."""

    def __init__(self, body: Body, shared: Callable[[Value], tuple[Atom, ...]] = shared_with) -> None:
        self._shared = shared
        self._owners: dict[Var, frozenset[Var]] = {}
        self._walk(body)

    def of(self, *atoms: Atom) -> frozenset[Var]:
        return frozenset(owner for a in atoms if isinstance(a, Var) for owner in self._owners.get(a, (a,)))

    def _walk(self, body: Body) -> None:
        for binding in body.bindings:
            value = binding.value
            if isinstance(value, If):
                self._walk(value.then)
                self._walk(value.orelse)
            if shared := self._shared(value):
                self._owners[binding.var] = self.of(*shared)


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
