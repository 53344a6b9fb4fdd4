"""The meanings of an operator beyond its annotation, each a table keyed by the operator's name.

    DEFINE      name, attributes, deduction       (`ir.op.OPS`, filled by `define`)
    INTERPRET   what it computes, in NumPy
    LEGALIZE    the loop nest that computes it

A family of operators is one file that fills all tables side by side; `tests/compiler/ops` lists the gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from compiler.ir.graph import Atom
from compiler.ir.loops import Buffer, Const, ScalarParam, Stmt
from compiler.ir.op import OPS, Deduce, OpDef, Registry
from compiler.ir.types import Type

# NumPy arrays for tensors, tuples of ints for shapes, numbers for scalars, tuples for tuples.
Interpret = Callable[..., Any]  # (*values, **attributes) -> value


Place = Buffer | ScalarParam | Const  # of a tensor, a scalar, a literal number


@dataclass(frozen=True, slots=True)
class Operands:
    """A call as a legalization sees it: where each operand's elements come from, made for this call."""

    atoms: tuple[Atom, ...]
    types: tuple[Type, ...]
    places: tuple[Place | None, ...]  # None: a shape or a tuple, of which only the annotation counts
    attrs: Mapping[str, Any]
    out: Type

    def buffer(self, index: int) -> Buffer:
        place = self.places[index]
        assert isinstance(place, Buffer), f"operand {index} is no tensor of known shape"
        return place


@dataclass(frozen=True, slots=True)
class Nest:
    """A loop-level body: the outputs it fills and the statement that fills them. It may use the symbolic variables of the graph
    function: outlining renames them and passes those that no shape defines. Output `i` reuses operand `inplace[i]`. `checks` are
    annotations that operands must match at run time, because deduction could not prove that they do."""

    outputs: tuple[Buffer, ...]
    body: Stmt
    inplace: tuple[int | None, ...] = ()
    checks: tuple[tuple[int, Type], ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Library:
    """Not a loop nest but a host routine by this name (data-dependent shapes, sorting)."""

    name: str
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])


Legalize = Callable[[Operands], Nest | Library]

INTERPRET: Registry[Interpret] = Registry("interpretation of operator")
LEGALIZE: Registry[Legalize] = Registry("loop nest of operator")


VIEWS: set[str] = set()  # operators whose result is their first operand's memory under another shape


def define(
    name: str,
    deduce: Deduce,
    interpret: Interpret,
    legalize: Legalize | None,
    attributes: Mapping[str, Any] | None = None,
    *,
    pure: bool = True,
) -> OpDef:
    """Add one operator to every table. Without `legalize` it must be rewritten before loops are made (a view, say)."""
    op = OPS.add(name, OpDef(name, dict(attributes or {}), deduce, pure))
    INTERPRET.add(name, interpret)
    if legalize is not None:
        LEGALIZE.add(name, legalize)
    return op
