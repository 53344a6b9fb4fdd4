"""Tiles with many instructions per cache line of weights prefetch each line into both caches."""

from __future__ import annotations

import re

import pytest

from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.codegen.link import link
from compiler.ir.tiles import TileOp
from compiler.machine.intrinsics.decode_e4m3 import DecodeE4m3
from compiler.machine.intrinsics.dot_widened import DotWidened
from compiler.machine.intrinsics.widen_panel import WidenPanel
from compiler.machine.target import NAMED
from tests.compiler.machine.intrinsics.test_dot_widened import kernel

TARGET, K = NAMED["amx"], 32
WIDENED = DotWidened(1, 32, 32), [(1, 32), (1, K), (1, 1), (K // 8, 128), (1, 32)], (K, K, 1)
WIDEN = WidenPanel(32, 32), [(K, 32), (K // 8, 128), (1, 32), (K // 8, 128), (1, 32)], (K,)
DECODED = DecodeE4m3(columns=32), [(K // 2, 64), (K // 4, 128)], (K,)


# 32 by 32 weights are 8 lines of 4-bit weights and a line of multipliers, which is prefetched only once, or 16 lines of floats.
@pytest.mark.parametrize(
    ("tile", "far", "near"), [(WIDENED, 8, 9), (WIDEN, 9, 8), (DECODED, 16, 16)], ids=["dot_widened", "widen_panel", "decode_e4m3"]
)
def test_each_line_is_prefetched_into_both_caches(tile: tuple[TileOp, list[tuple[int, ...]], tuple[int, ...]], far: int, near: int) -> None:
    """A core that prefetched each line once waited longer than a loop that only loads."""
    op, shapes, dims = tile
    code = link([emit_kernel("k", kernel(op, shapes, dims), TARGET)], TARGET).optimised()
    levels = re.findall(r"call void @llvm.prefetch.*i32 0, i32 ([23]), i32 1", code)
    loops = max(1, far // max(levels.count("2"), 1))  # iterations of a loop that is not unrolled
    assert (levels.count("2") * loops, levels.count("3") * loops) == (far, near)
