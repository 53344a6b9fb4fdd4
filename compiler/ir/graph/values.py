"""The graph level: functions in A-normal form.

    Function   params -> Body
    Body       blocks, then a result
    Block      bindings, in order; a *dataflow* block is pure and straight-line, a *captured* one is replayed as a unit
    Binding    var = value        (a value is never nested: its operands are atoms)

Nodes are immutable and compare by identity; `equal.structural_equal` compares meaning. Values come in levels: a program starts with
operator calls, legalizing turns them into `CallTir`, and planning turns those into `Alloc` and `Launch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from numpy.typing import NDArray

from compiler.ir.dims import Dim
from compiler.ir.fields import Holds, holds, node
from compiler.ir.op import OpDef
from compiler.ir.types import FuncType, Type

# --- atoms: what an operand can be -------------------------------------------------------------------------------------


@node
class Var:
    """One value, defined once: by a parameter or by a binding."""

    name: str
    type: Type


@node
class Constant:
    data: NDArray[Any]  # [] is a scalar tensor


@node
class ShapeValue:
    dims: tuple[Dim, ...]


@node
class ScalarValue:
    """An integer known as an expression (i64), or a literal number of the given type."""

    value: Dim | float | bool
    dtype: str = "i64"


@node
class FuncRef:
    """A function of the module, as a value."""

    name: str


Atom = Var | Constant | ShapeValue | ScalarValue | FuncRef


# --- values: what a binding can compute --------------------------------------------------------------------------------


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
class If:
    cond: Atom = holds(Holds.ATOM)  # a bool scalar, or a bool tensor of rank 0
    then: Body = holds(Holds.BODY)
    orelse: Body = holds(Holds.BODY)


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


Value = Atom | Call | CallTir | CallLibrary | CallFunc | MakeTuple | TupleGet | MatchCast | If | Copy | Alloc | Launch


# --- structure ---------------------------------------------------------------------------------------------------------


class BlockKind(StrEnum):
    PLAIN = "plain"
    DATAFLOW = "dataflow"
    CAPTURED = "captured"


@node
class Binding:
    var: Var
    value: Value


@node
class Block:
    bindings: tuple[Binding, ...]
    kind: BlockKind = BlockKind.PLAIN


@node
class Body:
    blocks: tuple[Block, ...]
    result: Atom

    @property
    def bindings(self) -> tuple[Binding, ...]:
        return tuple(b for block in self.blocks for b in block.bindings)


@node
class Function:
    """`num_inputs` parameters change from call to call; the rest are weights and caches, bound once (None: all change). `arena` is what
    planning found that a call needs, in bytes."""

    params: tuple[Var, ...]
    body: Body
    result_type: Type
    pure: bool = True
    num_inputs: int | None = None
    arena: Dim | None = None

    @property
    def type(self) -> FuncType:
        return FuncType(tuple(p.type for p in self.params), self.result_type, self.pure)

    @property
    def weights(self) -> tuple[Var, ...]:
        return () if self.num_inputs is None else self.params[self.num_inputs :]
