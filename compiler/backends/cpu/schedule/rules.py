"""Which schedule a loop nest gets: the first rule that takes it.

Vectors have WIDTH lanes whatever the machine's registers hold; code generation splits or joins them. So the order of every fold is the
same on all instruction sets.
"""

from __future__ import annotations

from dataclasses import replace

from compiler.backends.cpu.codegen.intrinsics.amx import AMX_I8
from compiler.backends.cpu.codegen.intrinsics.amx_operands import AMX_PAIRS
from compiler.backends.cpu.codegen.intrinsics.integer import multiplies_words, panel_bits
from compiler.backends.cpu.codegen.intrinsics.widen import STRETCH, WIDEN_PANEL
from compiler.backends.cpu.schedule.attention import schedule_attention
from compiler.backends.cpu.schedule.integer import IntegerTile, schedule_integer
from compiler.backends.cpu.schedule.matmul import schedule_matmul
from compiler.backends.cpu.schedule.pairs import PairTile, schedule_pairs
from compiler.backends.cpu.schedule.ragged import schedule_ragged
from compiler.backends.cpu.schedule.rows import schedule_rows
from compiler.backends.cpu.schedule.spatial import schedule_spatial
from compiler.backends.cpu.schedule.spot import TileShape
from compiler.backends.cpu.schedule.widened import WidenedTile, schedule_widened
from compiler.idioms.nest import allocated, without_allocations
from compiler.ir.dtypes import DType
from compiler.ir.loops import Attention, For, Let, LoopKind, PrimFunc, Stmt, Tile
from compiler.ir.visit_loops import sequence, statements, walk_stmts
from compiler.machine.target import Target
from compiler.ops.plain_attention import plain_attention

WIDTH = 16


def tile_shape(target: Target) -> TileShape:
    """Accumulators, columns and one factor must fit the registers."""
    if target.vector_bits >= 512:
        return TileShape(rows=8, vectors=2, lanes=WIDTH)  # 16 accumulators of 32 registers
    return TileShape(rows=4, vectors=1, lanes=WIDTH)  # 8 of 16 with 256 bits, 16 of 32 with 128


def pair_tile(target: Target) -> PairTile | None:
    """Where bf16 are multiplied faster than f32 (docs/decisions/0008-where-bf16-is-multiplied.md)."""
    if target.has("amx-bf16"):
        return PairTile("amx_bf16", TileShape(rows=32, vectors=2, lanes=WIDTH), depth=32, block=256, configure="amx_configure")
    if target.has("avx512bf16", "sse4a"):
        return PairTile("dot_bf16", TileShape(rows=8, vectors=2, lanes=WIDTH), depth=2)
    return None


def integer_tiles(target: Target) -> tuple[IntegerTile, ...]:
    """Where integers are multiplied several at a time, the best first. A row has an accumulator per plane, and one of f32 across groups."""
    bits = panel_bits(target)
    if not bits:
        return ()
    shape = TileShape(rows=4, vectors=2, lanes=WIDTH) if target.vector_bits >= 512 else TileShape(rows=2, vectors=1, lanes=WIDTH)
    tiles = (IntegerTile("dot_panel", shape, bits=bits),)
    if 8 not in bits and multiplies_words(target):
        tiles = (IntegerTile("dot_panel", replace(shape, rows=2 * shape.rows), bits=(8,), rows=DType.I16), *tiles)
    if AMX_I8.runs_on(target):
        return (IntegerTile("amx_i8", replace(shape, rows=16), bits=(8,), depth=64, block=512, configure="amx_configure"), *tiles)
    return tiles


def widened_tile(target: Target) -> WidenedTile | None:
    """Where a matrix unit takes weights of 4 bits."""
    if not (AMX_I8.runs_on(target) and WIDEN_PANEL.runs_on(target)):
        return None
    shape = TileShape(rows=32, vectors=2, lanes=WIDTH)
    return WidenedTile("widen_panel", "amx_i8_near", "amx_configure", shape, stretch=STRETCH, depth=64, block=512)


def schedule(prim: PrimFunc, target: Target) -> PrimFunc:
    if "schedule" in prim.attrs or _scheduled(prim.body):
        return prim
    tile, pairs, widened = tile_shape(target), pair_tile(target), widened_tile(target)
    found = (
        schedule_ragged(prim)
        or schedule_attention(prim, tile, unit=AMX_PAIRS.runs_on(target), pairs=pairs is not None and pairs.intrinsic == "dot_bf16")
        or (schedule_pairs(prim, pairs) if pairs else None)
    )
    if found is None and isinstance(prim.body, Attention):
        prim = replace(prim, body=plain_attention(prim.body))
    found = found or schedule_matmul(prim, tile) or (schedule_widened(prim, widened) if widened else None)
    found = found or schedule_integer(prim, integer_tiles(target))
    return found or schedule_rows(prim, WIDTH) or _by_stage(prim)


def _scheduled(body: Stmt) -> bool:
    """Written by hand with loops of other kinds than serial ones."""
    return any(isinstance(s, Tile) or (isinstance(s, For) and s.kind is not LoopKind.SERIAL) for s in walk_stmts(body))


def _stages(stmt: Stmt) -> list[Stmt]:
    """The statements of a body one by one; an integer that is read around several of them is read in each."""
    if isinstance(stmt, Let):
        return [Let(stmt.var, stmt.value, s) for s in _stages(stmt.body)]
    return [s for inner in statements(stmt) for s in (_stages(inner) if isinstance(inner, Let) else [inner])]


def _by_stage(prim: PrimFunc) -> PrimFunc:
    """Each stage on its own: a phase of the kernel. A stage that no rule takes runs on one thread as it is written."""
    temporaries, body = without_allocations(prim.body)
    done = [schedule_spatial(s, WIDTH) or s for s in _stages(body)]
    return PrimFunc(prim.params, prim.num_outputs, allocated(temporaries, sequence(done)), {**prim.attrs, "schedule": "spatial"})
