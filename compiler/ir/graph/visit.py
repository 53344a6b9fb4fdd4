"""Walk and rewrite the graph level; `loops/visit.py` does the same for the loop level.

`used_vars` and `free_vars` return the values and the symbolic variables on which a value or a body depends. A `map_*` function that changes
nothing returns its argument, so a comparison by `is` shows whether anything changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from compiler.ir.dims import Dim, DimVar
from compiler.ir.fields import Holds, items, parts
from compiler.ir.graph.atoms import Atom, Constant, FuncRef, ScalarValue, ShapeValue, Var
from compiler.ir.graph.function import Binding, Block, Body, Function, Value
from compiler.ir.graph.values import CallTir, Launch, MatchCast
from compiler.ir.rebuild import map_items, map_tuple, mapped, remade, updated
from compiler.ir.types import Type, binders_of, substitute, vars_of

# --- graph level: reading ----------------------------------------------------------------------------------------------


class Uses(NamedTuple):
    """The variables that a value or a body uses but does not define, in order of first use: graph variables (`values`) and symbolic
    variables (`dims`)."""

    values: tuple[Var, ...]
    dims: tuple[DimVar, ...]


def operands(value: Value) -> tuple[Atom, ...]:
    """Return the atoms of the value itself, without those inside the branches of an If."""
    return (value,) if isinstance(value, Atom) else items(value, Holds.ATOM)


def stated_types(value: Value) -> tuple[Type, ...]:
    """Return the annotations that the value itself states, without those inside the branches of an If."""
    return items(value, Holds.TYPE)


def walk_values(body: Body) -> Iterator[Value]:
    """Yield the values that a body binds, in order. The values inside the branches of an If follow the If."""
    for binding in body.bindings:
        yield binding.value
        for branch in items(binding.value, Holds.BODY):
            yield from walk_values(branch)


def called_nests(body: Body) -> Iterator[str]:
    """Yield the names of the loop nests that a body calls or launches, and of the library routines that it launches."""
    for value in walk_values(body):
        if isinstance(value, CallTir | Launch):
            yield value.func


def used_vars(value: Value) -> Uses:
    """Return the variables on which the value depends. A match_cast defines or tests each symbolic variable that is a whole dimension of
    its annotation (see `binders_of`). This annotation does not count as a use of the variable, but a use in the operand does. In the
    branches of an If, a use of such a variable counts only if it comes before the match_cast."""
    found = _Uses()
    found.value(value)
    return found.result


def free_vars(body: Body) -> Uses:
    """Return the variables that the body uses but does not define, including symbolic variables in the annotations of its bindings. A
    symbolic variable whose first use in the body is as a whole dimension of a match_cast's annotation is defined there, so it is left out,
    even if it is known outside."""
    found = _Uses()
    found.body(body)
    return found.result


def atom_dims(atom: Atom) -> tuple[DimVar, ...]:
    """Return the symbolic variables in a shape or in an integer expression. Variables in the annotation of a `Var` are left out."""
    match atom:
        case ShapeValue(dims=dims):
            return tuple(dict.fromkeys(v for d in dims for v in d.vars()))
        case ScalarValue(value=Dim() as dim):
            return dim.vars()
        case _:
            return ()


def attr_dims(value: Value) -> Iterator[Dim]:
    """Yield the dimensions among the attributes of the value, also those inside lists."""
    pending: list[Any] = [item for attrs in items(value, Holds.ATTRS) for item in attrs.values()]
    while pending:
        match pending.pop(0):
            case Dim() | DimVar() as dim:
                yield Dim.of(dim)
            case list() | tuple() as several:
                pending[:0] = several
            case _:
                pass


class _Uses:
    """Collects the variables that values and bodies use but do not define. `_inner` has the variables that bodies have defined so far."""

    def __init__(self) -> None:
        self._values: dict[Var, None] = {}
        self._dims: dict[DimVar, None] = {}
        self._inner: set[Var | DimVar] = set()

    @property
    def result(self) -> Uses:
        return Uses(tuple(self._values), tuple(self._dims))

    def value(self, value: Value) -> None:
        for atom in operands(value):
            self._atom(atom)
        for dim in attr_dims(value):
            self._note(dim.vars())
        for type_ in stated_types(value):
            binders = binders_of(type_) if isinstance(value, MatchCast) else ()
            self._note(v for v in vars_of(type_) if v not in binders)
        for dim in () if isinstance(value, Atom) else items(value, Holds.DIM):
            self._note(dim.vars())
        for body in items(value, Holds.BODY):
            self.body(body)

    def body(self, body: Body) -> None:
        for binding in body.bindings:
            self.value(binding.value)
            if isinstance(binding.value, MatchCast):
                # A match_cast tests variables that are already known, and defines those that are new.
                self._inner.update(v for v in binders_of(binding.value.type) if v not in self._dims)
            self._note(vars_of(binding.var.type))
            self._inner.add(binding.var)
        self._atom(body.result)

    def _atom(self, atom: Atom) -> None:
        if isinstance(atom, Var) and atom not in self._inner:
            self._values[atom] = None
        self._note(atom_dims(atom))

    def _note(self, dims: Iterable[DimVar]) -> None:
        self._dims.update((v, None) for v in dims if v not in self._inner)


# --- graph level: rewriting --------------------------------------------------------------------------------------------


def map_operands(value: Value, fn: Callable[[Atom], Atom]) -> Value:
    """Apply `fn` to every atom of the value, including those inside the branches of an If. `fn` must map a callee to a FuncRef or a
    variable."""
    if isinstance(value, Atom):
        return fn(value)
    return mapped(mapped(value, Holds.ATOM, fn), Holds.BODY, lambda body: map_atoms(body, fn))


def map_atoms(body: Body, fn: Callable[[Atom], Atom]) -> Body:
    """Apply `fn` to every operand in the body, including those inside the branches of an If, and to the results."""

    def rewrite(binding: Binding) -> Binding:
        return updated(binding, value=map_operands(binding.value, fn))

    blocks = map_tuple(body.blocks, lambda block: updated(block, bindings=map_tuple(block.bindings, rewrite)))
    return updated(body, blocks=blocks, result=fn(body.result))


def map_bindings(function: Function, fn: Callable[[Binding], Sequence[Binding]]) -> Function:
    """Replace each binding by the bindings that `fn` returns for it. Bindings inside the branches of an If are replaced before the If
    itself. `fn` keeps a binding by returning it alone. Blocks that become empty are removed. Uses of variables are not renamed, and
    annotations are not deduced again."""
    return updated(function, body=_map_body(function.body, fn))


def _map_body(body: Body, fn: Callable[[Binding], Sequence[Binding]]) -> Body:
    blocks = map_tuple(body.blocks, lambda block: _map_block(block, fn))
    kept = tuple(b for b, old in zip(blocks, body.blocks, strict=True) if b.bindings or b is old)
    return updated(body, blocks=kept if len(kept) < len(blocks) else blocks)


def _map_block(block: Block, fn: Callable[[Binding], Sequence[Binding]]) -> Block:
    made: list[Binding] = []
    for binding in block.bindings:
        value = binding.value
        value = mapped(value, Holds.BODY, lambda body: _map_body(body, fn))
        made.extend(fn(updated(binding, value=value)))
    same = len(made) == len(block.bindings) and all(m is b for m, b in zip(made, block.bindings, strict=True))
    return block if same else Block(tuple(made), block.kind)


def fresh_function(func: Function) -> Function:
    """Copy the function with new variables. The function must not have an arena yet, because the copy keeps the expression `arena` of the
    original. Function types keep their own variables."""
    return _Fresh().function(func)


class _Fresh:
    """Copies a function, and puts a new variable in the place of each variable."""

    def __init__(self) -> None:
        self._values: dict[Var, Var] = {}
        self._dims: dict[DimVar, DimVar] = {}

    def function(self, func: Function) -> Function:
        params = tuple(self._define(p) for p in func.params)
        return replace(func, params=params, body=self._body(func.body), result_type=self._type(func.result_type))

    def _define(self, var: Var) -> Var:
        new = self._values[var] = Var(var.name, self._type(var.type))
        return new

    def _body(self, body: Body) -> Body:
        blocks = tuple(replace(b, bindings=tuple(self._binding(x) for x in b.bindings)) for b in body.blocks)
        return Body(blocks, self._atom(body.result))

    def _binding(self, binding: Binding) -> Binding:
        value = self._value(binding.value)
        return Binding(self._define(binding.var), value)

    def _value(self, value: Value) -> Value:
        if isinstance(value, Atom):
            return self._atom(value)
        rules = {Holds.ATOM: self._atom, Holds.BODY: self._body, Holds.TYPE: self._type, Holds.ATTRS: self._attrs, Holds.DIM: self._dim}
        return remade(value, {p.name: map_items(getattr(value, p.name), rules[p.what]) for p in parts(type(value))})

    def _atom(self, atom: Atom) -> Atom:
        match atom:
            case Var():
                return self._values[atom]
            case ShapeValue(dims=dims):
                return ShapeValue(tuple(map(self._dim, dims)))
            case ScalarValue(value=value):
                return replace(atom, value=self._dim(value)) if isinstance(value, Dim) else atom
            case Constant() | FuncRef():
                return atom

    def _attrs(self, attrs: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: self._attr(value) for name, value in attrs.items()}

    def _attr(self, value: Any) -> Any:
        match value:
            case Dim() | DimVar():
                return self._dim(Dim.of(value))
            case list() | tuple():
                return tuple(map(self._attr, value))
            case _:
                return value

    def _type(self, type_: Type) -> Type:
        for var in vars_of(type_):
            self._variable(var)
        return substitute(type_, self._dims)

    def _dim(self, dim: Dim) -> Dim:
        for var in dim.vars():
            self._variable(var)
        return dim.substitute(self._dims)

    def _variable(self, var: DimVar) -> None:
        if var not in self._dims:
            upper = self._dim(var.upper) if isinstance(var.upper, Dim) else var.upper
            self._dims[var] = DimVar(var.name, var.lower, upper, var.multiple_of)
