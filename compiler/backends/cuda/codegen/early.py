"""Find the buffers that a kernel reads early: before the kernels that were launched before it have ended.

For some targets, a kernel may begin while earlier ones still run (programmatic dependent launch). Until it has waited for their end, it
must not read what they write, and must not write to global memory. A kernel waits when it begins, unless all its accesses to memory are
those of tiles that wait themselves, and of statements after such tiles. A tile that waits itself reads some operands before it waits, such
as weights, which no kernel changes. In this file, each phase of a kernel counts as a kernel of its own.
"""

from __future__ import annotations

from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.statements import Allocate, For, Let, Seq, Stmt, Tile, When
from compiler.ir.loops.visit import loads, walk_stmts
from compiler.machine.intrinsics.base import Intrinsic


def early_buffers(stmt: Stmt) -> frozenset[Buffer]:
    """Return the buffers that tiles read early. If there are none, the kernel waits when it begins."""
    if not _only_waiting_tiles(stmt):
        return frozenset()
    tiles = [s for s in walk_stmts(stmt) if isinstance(s, Tile) and isinstance(s.op, Intrinsic)]
    return frozenset(tile.operands[i].buffer for tile in tiles if isinstance(tile.op, Intrinsic) for i in tile.op.early)


def _only_waiting_tiles(stmt: Stmt) -> bool:
    """Return whether a statement accesses memory only by tiles that wait themselves, or after such a tile in the same sequence."""
    match stmt:
        case Tile():
            return _waits(stmt)
        case Seq(stmts=stmts):
            first = next((i for i, s in enumerate(stmts) if _waits(s)), len(stmts))
            return all(_only_waiting_tiles(s) for s in stmts[:first])
        case When(cond=cond, then=then, orelse=orelse):
            return not any(loads(cond)) and _only_waiting_tiles(then) and (orelse is None or _only_waiting_tiles(orelse))
        case Let(value=value, body=body):
            return not any(loads(value)) and _only_waiting_tiles(body)
        case For(body=body) | Allocate(body=body):
            return _only_waiting_tiles(body)
        case _:
            return False


def _waits(stmt: Stmt) -> bool:
    """Return whether a statement is a tile that waits itself."""
    return isinstance(stmt, Tile) and isinstance(stmt.op, Intrinsic) and bool(stmt.op.early)
