"""Find captured regions: sequences of bindings that need no work of the host. Each sequence becomes a captured block, which one native call
replays.

Before: launches of loop nests, allocations in the arena, aliases, views and tuples, among other bindings. After: every maximal sequence of
such bindings with at least one launch is a captured block, also in the branches of an If. The order of bindings is kept, except that a
check of dimensions within a sequence moves before it.
"""

from __future__ import annotations

from compiler.ir.graph.atoms import ScalarValue, Var
from compiler.ir.graph.function import Binding, Block, BlockKind, Body, If, Value
from compiler.ir.graph.values import Alloc, Call, Copy, Launch, MakeTuple, MatchCast
from compiler.ir.module import IRModule
from compiler.ir.types import binders_of
from compiler.ops.tables import VIEWS
from compiler.passes.rewrite import rewrite_bodies


def capture(module: IRModule) -> IRModule:
    return rewrite_bodies(module, lambda func: _body(func.body))


def _body(body: Body) -> Body:
    bindings = [_inside(b) for b in body.bindings]
    blocks = tuple(_blocks(bindings))
    if _same(blocks, body.blocks):
        return body
    return Body(blocks, body.result)


def _inside(binding: Binding) -> Binding:
    value = binding.value
    if not isinstance(value, If):
        return binding
    then, orelse = _body(value.then), _body(value.orelse)
    if then is value.then and orelse is value.orelse:
        return binding
    return Binding(binding.var, If(value.cond, then, orelse))


def _blocks(bindings: list[Binding]) -> list[Block]:
    """Group the bindings into blocks. `run` collects a sequence of bindings that need no work of the host, and `rest` collects other
    bindings. At most one of the two has bindings at a time."""
    blocks: list[Block] = []
    run: list[Binding] = []
    rest: list[Binding] = []

    def close(pending: list[Binding], kind: BlockKind) -> None:
        if pending:
            blocks.append(Block(tuple(pending), kind))
            pending.clear()

    def close_run() -> None:
        launches = any(isinstance(b.value, Launch) for b in run)
        close(run, BlockKind.CAPTURED if launches else BlockKind.PLAIN)

    for binding in bindings:
        if _static(binding.value):
            close(rest, BlockKind.PLAIN)
            run.append(binding)
        elif run and _checks_dims(binding.value):  # the check depends only on values that are defined before the sequence
            blocks.append(Block((binding,), BlockKind.PLAIN))
        else:
            close_run()
            rest.append(binding)
    close_run()
    close(rest, BlockKind.PLAIN)
    return blocks


def _static(value: Value) -> bool:
    """Whether the value needs no instruction between launches: it launches a loop nest, allocates memory of the arena, or is an alias, a
    view or a tuple."""
    match value:
        case Launch(library=library):
            return not library
        case Alloc(offset=offset):
            return offset is not None
        case Call(op=op):
            return op.name in VIEWS
        case Copy() | MakeTuple() | Var():
            return True
        case _:
            return False


def _checks_dims(value: Value) -> bool:
    """Whether the value checks an expression of dimensions, and defines no variable."""
    return isinstance(value, MatchCast) and isinstance(value.value, ScalarValue) and not binders_of(value.type)


def _same(a: tuple[Block, ...], b: tuple[Block, ...]) -> bool:
    """Whether both have the same bindings in blocks of the same kinds."""
    return len(a) == len(b) and all(
        x.kind is y.kind and len(x.bindings) == len(y.bindings) and all(p is q for p, q in zip(x.bindings, y.bindings, strict=True))
        for x, y in zip(a, b, strict=True)
    )
