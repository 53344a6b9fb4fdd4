"""Give parts of the program to library routines where they are better than generated code.

Before: operators. After: each part that a row describes, and whose predicate holds, is one `CallLibrary`. A row is a pattern of operators
beside its predicate; the wildcards of the pattern are named like the inputs of the routine. Values inside a part must have no other use.
No routine beats the generated code on CPUs, so no row is there by default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compiler.ir.deduce import type_of
from compiler.ir.graph import Atom, Binding, Body, Call, CallLibrary, Function, If, Value, Var
from compiler.ir.module import IRModule
from compiler.ir.types import TupleType, Type
from compiler.ir.visit import map_bindings
from compiler.passes.rewrite import count_uses
from runtime.library import routine


@dataclass(frozen=True, slots=True)
class Wild:
    """Any operand; the same one wherever the name stands again."""

    name: str


@dataclass(frozen=True, slots=True)
class Op:
    """An operator with these operands."""

    name: str
    args: tuple[Pattern, ...]


Pattern = Wild | Op


@dataclass(frozen=True, slots=True)
class Match:
    operands: Mapping[str, Atom]  # by the names of wildcards
    calls: tuple[Call, ...]  # in the order in which the pattern names their operators
    out: Type

    def type(self, name: str) -> Type:
        return type_of(self.operands[name])


def _nothing(_: Match) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Row:
    routine: str  # of `runtime.library`
    pattern: Op
    predicate: Callable[[Match], bool]
    attributes: Callable[[Match], dict[str, Any]] = _nothing  # of the routine, from those of the operators

    def call(self, match: Match) -> CallLibrary:
        known = routine(self.routine)
        args = tuple(match.operands[name] for name in known.inputs)
        out = match.out.fields if isinstance(match.out, TupleType) else (match.out,)
        return CallLibrary(known.name, args, out, self.attributes(match))


@dataclass(frozen=True, slots=True)
class DispatchLibrary:
    rows: Sequence[Row]  # the first that fits is taken

    def __call__(self, module: IRModule) -> IRModule:
        functions = {name: self._function(func) for name, func in module.graph_functions.items()}
        changed = {name: func for name, func in functions.items() if func is not module.functions[name]}
        return module.update(changed) if changed else module

    def _function(self, func: Function) -> Function:
        matcher = _Matcher(_definitions(func.body), count_uses(func.body))
        taken: dict[Var, Sequence[Binding]] = {}
        for var, value in reversed(list(matcher.values.items())):  # the last operator of a part comes first: it sees all of the part
            found = None if var in taken else self._first(matcher, var, value)
            if found is not None:
                call, inside = found
                taken |= dict.fromkeys(inside, ())
                taken[var] = (Binding(var, call),)
        return map_bindings(func, lambda binding: taken.get(binding.var, (binding,)))

    def _first(self, matcher: _Matcher, var: Var, value: Value) -> tuple[CallLibrary, Sequence[Var]] | None:
        for row in self.rows:
            part = matcher.part(row.pattern, var, value)
            if part is not None and row.predicate(part[0]):
                return row.call(part[0]), part[1]
        return None


@dataclass(frozen=True, slots=True)
class _Matcher:
    values: Mapping[Var, Value]
    uses: Mapping[Var, int]

    def part(self, pattern: Op, var: Var, value: Value) -> tuple[Match, list[Var]] | None:
        """What the wildcards stand for, and the variables inside."""
        operands: dict[str, Atom] = {}
        calls: list[Call] = []
        inside: list[Var] = []

        def fits(pattern: Pattern, atom: Atom) -> bool:
            if isinstance(pattern, Wild):
                return operands.setdefault(pattern.name, atom) is atom
            if not isinstance(atom, Var) or atom not in self.values or self.uses[atom] != 1:
                return False
            inside.append(atom)
            return computes(pattern, self.values[atom])

        def computes(pattern: Op, value: Value) -> bool:
            if not isinstance(value, Call) or value.op.name != pattern.name or len(value.args) != len(pattern.args):
                return False
            calls.append(value)
            return all(map(fits, pattern.args, value.args))

        return (Match(operands, tuple(calls), var.type), inside) if computes(pattern, value) else None


def _definitions(body: Body) -> dict[Var, Value]:
    found: dict[Var, Value] = {}
    for binding in body.bindings:
        if isinstance(binding.value, If):
            found |= _definitions(binding.value.then) | _definitions(binding.value.orelse)
        found[binding.var] = binding.value
    return found
