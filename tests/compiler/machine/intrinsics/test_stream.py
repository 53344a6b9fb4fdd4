"""Non-temporal stores of vectors write the right elements at any address, on every target that can run here. A store is a single
instruction if its vector begins at a cache line."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.codegen.link import link
from compiler.interpret.loops import run_prim
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.text.parser import parse
from compiler.machine.target import NAMED

DOUBLED = """
prim k(x: f32[64], out y: f32[64]) {
  for parallel once in 1 {
    alloc local row: f32[16] {
      for b in 3 {
        for vector l in 16 { row[l] = x[16*b + l] * 2.0 }
        tile "stream"(y[16*b + 5], row[0])
      }
    }
  }
}
"""


def doubled() -> PrimFunc:
    return parse(DOUBLED).prim("k")


@pytest.mark.parametrize("begin", [0, 4, 11, 16])
@pytest.mark.parametrize("name", [None, *(t.name for t in NAMED.values() if t.can_run_here)])
def test_every_lane_arrives_and_nothing_else(run_native: Any, name: str | None, begin: int) -> None:
    """The store writes all elements of the vector and nothing else. y begins `begin` elements after the start of a cache line, which holds
    16. The kernel writes from element 5 of y on, so its vectors begin at cache lines if `begin` is 11."""
    room = np.zeros(256, np.float32)
    first = -room.ctypes.data % 64 // 4 + begin
    x, y = np.arange(64, dtype=np.float32), room[first : first + 64]
    if name is None:
        run_prim(doubled(), [x, y])
    else:
        run_native(doubled(), [x, y], target=NAMED[name])
    expected = np.zeros(64, np.float32)
    expected[5:53] = 2 * x[:48]
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    ("name", "instruction"),
    [("avx512", r"vmovntps\s+%zmm"), ("x86-64-v3", r"vmovntps\s+%ymm"), ("aarch64-neon", r"stnp\s")],
)
def test_the_instruction_that_passes_the_caches(name: str, instruction: str) -> None:
    assert re.search(instruction, link([emit_kernel("k", doubled(), NAMED[name])], NAMED[name]).assembly())
