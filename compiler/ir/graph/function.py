"""Functions: blocks of bindings, and the branches in them."""

from __future__ import annotations

from enum import StrEnum

from compiler.ir.dims import Dim
from compiler.ir.fields import Holds, holds, node
from compiler.ir.graph.atoms import Atom, Var
from compiler.ir.graph.values import Alloc, Call, CallFunc, CallLibrary, CallTir, Copy, Launch, MakeTuple, MatchCast, TupleGet
from compiler.ir.types import FuncType, Type


@node
class If:
    """A branch. The value of the If is the result of the body that runs."""

    cond: Atom = holds(Holds.ATOM)  # a bool scalar, or a bool tensor of rank 0
    then: Body = holds(Holds.BODY)
    orelse: Body = holds(Holds.BODY)


Value = Atom | Call | CallTir | CallLibrary | CallFunc | MakeTuple | TupleGet | MatchCast | If | Copy | Alloc | Launch


class BlockKind(StrEnum):
    """The kind of a block, which decides how passes may change it and how the virtual machine runs it. Only plain blocks may branch.
    The pass `capture` makes captured blocks out of launches of kernels, and of the allocations and aliases between them."""

    PLAIN = "plain"  # runs binding by binding
    DATAFLOW = "dataflow"  # has no effects, so passes may reorder, share and remove its bindings
    CAPTURED = "captured"  # one native call replays all its launches


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
        """The bindings of all blocks, without those inside the branches of an If."""
        return tuple(b for block in self.blocks for b in block.bindings)


@node
class Function:
    """A graph-level function. The first `num_inputs` parameters change from call to call; the others are weights and caches, which are
    bound once. If `num_inputs` is None, all parameters change. `arena` is the number of bytes that memory planning reserved for a call, or
    None before memory planning. If `pure` is false, the function may have effects, such as overwriting its arguments."""

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
