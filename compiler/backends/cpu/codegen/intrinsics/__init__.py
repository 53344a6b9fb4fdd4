"""The tile intrinsics by name, and their meanings for the interpreter."""

from __future__ import annotations

from compiler.backends.cpu.codegen.intrinsics import amx, amx_operands, append, dot, integer, prefetch, rounding, shift, stream, widen
from compiler.backends.cpu.codegen.intrinsics.registry import Intrinsic
from compiler.interpret.tiles import TILES
from compiler.ir.op import Registry

INTRINSICS: Registry[Intrinsic] = Registry("tile intrinsic")
INTRINSICS.add("dot_bf16", dot.DOT_BF16)
INTRINSICS.add("dot_rows", dot.DOT_ROWS)
INTRINSICS.add("amx_bf16", amx.AMX_BF16)
INTRINSICS.add("amx_bf16_near", amx.AMX_BF16_NEAR)
INTRINSICS.add("amx_i8", amx.AMX_I8)
INTRINSICS.add("amx_i8_near", amx.AMX_I8_NEAR)
INTRINSICS.add("amx_configure", amx.AMX_CONFIGURE)
INTRINSICS.add("amx_pairs", amx_operands.AMX_PAIRS)
INTRINSICS.add("dot_panel", integer.DOT_PANEL)
INTRINSICS.add("append", append.APPEND)
INTRINSICS.add("prefetch", prefetch.PREFETCH)
INTRINSICS.add("round_bf16", rounding.ROUND_BF16)
INTRINSICS.add("shift", shift.SHIFT)
INTRINSICS.add("stream", stream.STREAM)
INTRINSICS.add("widen_panel", widen.WIDEN_PANEL)

for name in INTRINSICS:
    TILES.add(name, INTRINSICS[name].meaning)
