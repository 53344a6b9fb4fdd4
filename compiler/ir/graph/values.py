"""Values: the right-hand sides of bindings. The branch `If` is in function.py, since it contains bindings."""

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
    """A call of an operator: operands by position, attributes by name."""

    op: OpDef
    args: tuple[Atom, ...] = holds(Holds.ATOM)
    attrs: Mapping[str, Any] = holds(Holds.ATTRS, default_factory=dict[str, Any])


@node
class CallTir:
    """A call of a loop-level function in destination-passing style: outputs with the annotations `out` are allocated, and the function
    fills them. If `inplace[i]` is not None, output `i` reuses the memory of argument `inplace[i]` instead. Scalars and dimensions are
    passed as arguments, like tensors. The value of the call is its output, or the tuple of its outputs if there are several or none."""

    func: str
    args: tuple[Atom, ...] = holds(Holds.ATOM)
    out: tuple[Type, ...] = holds(Holds.TYPE)
    inplace: tuple[int | None, ...] = ()


@node
class CallLibrary:
    """A call of a routine of the runtime (runtime/library.py). Some routines fill outputs that are allocated for them; the others return
    new arrays. If the attribute `effect` is true, the call is kept even if its result is unused. The value of the call is its output, or
    the tuple of its outputs if there are several or none."""

    name: str
    args: tuple[Atom, ...] = holds(Holds.ATOM)
    out: tuple[Type, ...] = holds(Holds.TYPE)
    attrs: Mapping[str, Any] = holds(Holds.ATTRS, default_factory=dict[str, Any])


@node
class CallFunc:
    """A call of a graph-level function, by name or through a variable. The annotation of the call is deduced from the signature and the
    arguments, without the function's body."""

    callee: FuncRef | Var = holds(Holds.ATOM)
    args: tuple[Atom, ...] = holds(Holds.ATOM)


@node
class MakeTuple:
    """A tuple of the values of atoms."""

    fields: tuple[Atom, ...] = holds(Holds.ATOM)


@node
class TupleGet:
    """Field `index` of a tuple."""

    value: Atom = holds(Holds.ATOM)
    index: int


@node
class MatchCast:
    """A check, at run time, that the value has the annotation `type`. A dimension of the annotation that is a single variable defines this
    variable, unless the variable is already defined. `boundary` says in messages what requires the check, such as an operand of a call; it
    is empty if the program itself has the match_cast."""

    value: Atom = holds(Holds.ATOM)
    type: Type = holds(Holds.TYPE)
    boundary: str = ""


@node
class Copy:
    """An alias of an atom."""

    value: Atom = holds(Holds.ATOM)


@node
class Alloc:
    """Memory for one tensor: at byte `offset` of the function's arena, or memory of its own if `offset` is None."""

    type: Type = holds(Holds.TYPE)
    offset: Dim | None = holds(Holds.DIM, default=None)


@node
class Launch:
    """A call of a loop-level function, or of a routine of the runtime if `library` is set. The outputs are among the arguments, and their
    memory is allocated before the launch. A launch has no value."""

    func: str
    args: tuple[Atom, ...] = holds(Holds.ATOM)
    library: bool = False
    attrs: Mapping[str, Any] = holds(Holds.ATTRS, default_factory=dict[str, Any])
