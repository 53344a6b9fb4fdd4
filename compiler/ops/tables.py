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

from compiler.ir.dims import Dim
from compiler.ir.errors import AnnotationError, CompileError
from compiler.ir.graph.atoms import Atom
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Const, ScalarParam
from compiler.ir.loops.statements import Stmt
from compiler.ir.op import OPS, Deduce, OpDef, Registry
from compiler.ir.types import Type

# NumPy arrays for tensors, tuples of ints for shapes, numbers for scalars, tuples for tuples.
Interpret = Callable[..., Any]  # (*values, **attributes) -> value


class UnknownShape(CompileError):
    """A loop nest needs extents, and an annotation says too little."""


Place = Buffer | ScalarParam | Const  # of a tensor, a scalar, a literal number


@dataclass(frozen=True, slots=True)
class Operands:
    """A call as a legalization sees it: where each operand's elements come from, made for this call."""

    atoms: tuple[Atom, ...]
    types: tuple[Type, ...]
    places: tuple[Place | None, ...]  # None: a shape, of which only the annotation counts, or a tensor of unknown extents
    attrs: Mapping[str, Any]
    out: Type

    def buffer(self, index: int) -> Buffer:
        place = self.places[index]
        if not isinstance(place, Buffer):
            raise UnknownShape(f"operand {index} is {self.types[index]}, and a loop nest needs all extents; state them with match_cast")
        return place

    def has(self, index: int) -> bool:
        """Whether an optional operand is given."""
        return index < len(self.places)


@dataclass(frozen=True, slots=True)
class Fit:
    """The extent `given` of an operand must be 1 or `wanted`, and deduction could not prove it."""

    operand: int
    axis: int
    wanted: Dim
    given: Dim


@dataclass(frozen=True, slots=True)
class Nest:
    """A loop-level body: the outputs it fills and the statement that fills them. It may use the symbolic variables of the graph
    function: outlining renames them and passes those that no shape defines. Output `i` reuses operand `inplace[i]`. `checks` are
    annotations that operands must match at run time, because deduction could not prove that they do, `equal` pairs of numbers, the
    wanted one and the given one, and `fits` says which extents must broadcast."""

    outputs: tuple[Buffer, ...]
    body: Stmt
    inplace: tuple[int | None, ...] = ()
    checks: tuple[tuple[int, Type], ...] = ()
    equal: tuple[tuple[Dim, Dim], ...] = ()
    fits: tuple[Fit, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Library:
    """Not a loop nest but a host routine by this name (data-dependent shapes, sorting)."""

    name: str
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class View:
    """Nothing to compute: the first operand's memory under another shape, if these pairs of counts are equal."""

    equal: tuple[tuple[Dim, Dim], ...] = ()


Legalize = Callable[[Operands], Nest | Library | View]

INTERPRET: Registry[Interpret] = Registry("interpretation of operator")
LEGALIZE: Registry[Legalize] = Registry("loop nest of operator")
VIEWS: set[str] = set()  # operators that stay operators down to the machine, which gives the memory its new shape


def define(
    name: str,
    operands: str,
    deduce: Deduce,
    interpret: Interpret,
    legalize: Legalize | None,
    attributes: Mapping[str, Any] | None = None,
    *,
    pure: bool = True,
    view: bool = False,
) -> OpDef:
    """Add one operator to every table. `operands` names them: "x, weight, bias?" or "*xs". Without `legalize` the machine itself must
    know the operator."""
    op = OPS.add(name, OpDef(name, dict(attributes or {}), _counted(operands, deduce), pure))
    INTERPRET.add(name, interpret)
    if legalize is not None:
        LEGALIZE.add(name, legalize)
    if view:
        VIEWS.add(name)
    return op


def _counted(operands: str, deduce: Deduce) -> Deduce:
    """Deduction that may rely on the number of operands."""
    names = [name.strip() for name in operands.split(",")] if operands else []
    least = sum(not name.endswith("?") for name in names)
    most = None if any(name.startswith("*") for name in names) else len(names)

    def counted(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
        if len(args) < least or (most is not None and len(args) > most):
            raise AnnotationError(f"takes ({operands}), has {len(args)} operand{'' if len(args) == 1 else 's'}")
        return deduce(args, attrs)

    return counted
