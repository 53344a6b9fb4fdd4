"""Values: what a binding can compute, except for a branch, which holds bindings of its own (function.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiler.ir.dims import Dim
from compiler.ir.fields import Holds, holds, node
from compiler.ir.graph.atoms import Atom, FuncRef, Var
from compiler.ir.op import OpDef
from compiler.ir.types import Type


@node
class Call:
    """An operator; operands positional, attributes by name."""

    op: OpDef
    args: tuple[Atom, ...] = holds(Holds.ATOM)
    attrs: Mapping[str, Any] = holds(Holds.ATTRS, default_factory=dict[str, Any])


@node
class CallTir:
    """A loop-level function in destination-passing style: outputs of type `out` are made and filled. Output `i` takes over the
    storage of argument `inplace[i]` where that is not None. Scalars among the arguments are ordinary arguments."""

    func: str
    args: tuple[Atom, ...] = holds(Holds.ATOM)
    out: tuple[Type, ...] = holds(Holds.TYPE)
    inplace: tuple[int | None, ...] = ()


@node
class CallLibrary:
    """An external function named in a registry, in destination-passing style. `writes` lists arguments it also changes."""

    name: str
    args: tuple[Atom, ...] = holds(Holds.ATOM)
    out: tuple[Type, ...] = holds(Holds.TYPE)
    attrs: Mapping[str, Any] = holds(Holds.ATTRS, default_factory=dict[str, Any])


@node
class CallFunc:
    """A graph-level function, by name or as a value; its result is deduced from its signature alone."""

    callee: FuncRef | Var = holds(Holds.ATOM)
    args: tuple[Atom, ...] = holds(Holds.ATOM)


@node
class MakeTuple:
    fields: tuple[Atom, ...] = holds(Holds.ATOM)


@node
class TupleGet:
    value: Atom = holds(Holds.ATOM)
    index: int


@node
class MatchCast:
    """Check the value against the annotation at run time; variables standing alone in it that are new are defined here. `boundary`
    names the place in the program that demands the check, for messages; none where the program itself asks for it."""

    value: Atom = holds(Holds.ATOM)
    type: Type = holds(Holds.TYPE)
    boundary: str = ""


@node
class Copy:
    """Another name for an atom."""

    value: Atom = holds(Holds.ATOM)


@node
class Alloc:
    """Memory for one tensor: at `offset` bytes of the shared arena, or, where `offset` is None, of its own."""

    type: Type = holds(Holds.TYPE)
    offset: Dim | None = holds(Holds.DIM, default=None)


@node
class Launch:
    """Run a loop-level function, or with `library` an external one, on memory that exists. Has no value."""

    func: str
    args: tuple[Atom, ...] = holds(Holds.ATOM)
    library: bool = False
    attrs: Mapping[str, Any] = holds(Holds.ATTRS, default_factory=dict[str, Any])
