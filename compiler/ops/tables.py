"""The tables that define operators, each keyed by the operator's name.

    OPS         name, attributes, deduction of the annotation       (in `compiler/ir/op.py`)
    INTERPRET   what the operator computes, in NumPy
    LEGALIZE    how a call is executed: by a loop nest, by a host routine, or as a view of the first operand
    INDICES     the operands whose elements are indices, and what happens to an index outside its range
    OPERANDS    the names of the operands
    VIEWS       the operators whose result is the memory of their first operand under another shape

A module of operators fills the tables through `define`; `tests/compiler/ops` reports missing entries.
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
from compiler.ir.op import OPS, Deduce, OpDef, Registry, Relations, no_relations
from compiler.ir.types import Type
from compiler.ops.indices import Indices, with_safe_indices

# A tensor is a NumPy array, a shape is a tuple of ints, a scalar is a number, and a tuple is a tuple of such values.
Interpret = Callable[..., Any]  # (*values, **attributes) -> value


class UnknownShape(CompileError):
    """Raised if a loop nest needs extents that the annotation does not have."""


Place = Buffer | ScalarParam | Const  # where a kernel finds an operand: the buffer of a tensor, a scalar parameter, or a literal number


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of one call, for its legalization. A place is where a kernel reads an operand's elements; the places are made for this
    call."""

    atoms: tuple[Atom, ...]
    types: tuple[Type, ...]
    places: tuple[Place | None, ...]  # None for shapes, tensors of unknown extents or type, and other values
    attrs: Mapping[str, Any]
    out: Type

    def buffer(self, index: int) -> Buffer:
        """Return the buffer of an operand. Raise UnknownShape if the operand has none, because its extents or element type are unknown."""
        place = self.places[index]
        if not isinstance(place, Buffer):
            raise UnknownShape(f"operand {index} is {self.types[index]}, and a loop nest needs all extents; state them with match_cast")
        return place

    def has(self, index: int) -> bool:
        """Return whether the call has this optional operand."""
        return index < len(self.places)


@dataclass(frozen=True, slots=True)
class Fit:
    """A run-time check of what deduction could not prove: that the extent `given` of an operand is 1 or `wanted`."""

    operand: int
    axis: int
    wanted: Dim
    given: Dim


@dataclass(frozen=True, slots=True)
class Nest:
    """The loop-level body of an operator: its outputs, and the statement that fills them.

    The body may use symbolic variables of the graph function: outlining renames them, and passes those that no shape defines as arguments.
    Output `i` reuses the memory of operand `inplace[i]`. `checks` and `fits` are run-time checks of what deduction could not prove:
    `checks` has annotations that operands must match, and `fits` has extents that must broadcast. `attrs` are the attributes of the
    outlined function.
    """

    outputs: tuple[Buffer, ...]
    body: Stmt
    inplace: tuple[int | None, ...] = ()
    checks: tuple[tuple[int, Type], ...] = ()
    fits: tuple[Fit, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Library:
    """A host routine that is called instead of a loop nest, for data-dependent shapes and sorting."""

    name: str
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class View:
    """The memory of the first operand under another shape, so nothing is computed. The two dimensions of each pair in `equal` must be
    equal; a run-time check requires it."""

    equal: tuple[tuple[Dim, Dim], ...] = ()


Legalize = Callable[[Operands], Nest | Library | View]

INTERPRET: Registry[Interpret] = Registry("interpretation of operator")
LEGALIZE: Registry[Legalize] = Registry("loop nest of operator")
INDICES: dict[str, Indices] = {}  # operators without index operands are not in it
OPERANDS: dict[str, tuple[str, ...]] = {}  # the names of an operator's operands, without `?` and `*`
VIEWS: set[str] = set()  # operators without a kernel: the virtual machine gives the memory its new shape


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
    relations: Relations = no_relations,
    indices: Indices | None = None,
) -> OpDef:
    """Add one operator to the tables. `operands` names its operands: "x, weight, bias?" or "*xs". Without `legalize`, the virtual machine
    itself must execute the operator. `relations` is called with operands and attributes that `deduce` accepts. `indices` has an entry for
    each operand whose elements are used as indices."""
    op = OPS.add(name, OpDef(name, dict(attributes or {}), _counted(operands, deduce), pure, relations))
    OPERANDS[name] = tuple(operand.strip(" *?") for operand in operands.split(",")) if operands else ()
    if indices:
        INDICES[name] = indices
        interpret = with_safe_indices(name, OPERANDS[name], indices, interpret)
    INTERPRET.add(name, interpret)
    if legalize is not None:
        LEGALIZE.add(name, legalize)
    if view:
        VIEWS.add(name)
    return op


def _counted(operands: str, deduce: Deduce) -> Deduce:
    """Wrap a deduction so that it is called only with a valid number of operands; any other number raises AnnotationError."""
    names = [name.strip() for name in operands.split(",")] if operands else []
    least = sum(not name.endswith("?") for name in names)
    most = None if any(name.startswith("*") for name in names) else len(names)

    def counted(args: tuple[Type, ...], attrs: Mapping[str, Any]) -> Type:
        if len(args) < least or (most is not None and len(args) > most):
            raise AnnotationError(f"has {len(args)} operand{'' if len(args) == 1 else 's'}, expected ({operands})")
        return deduce(args, attrs)

    return counted
