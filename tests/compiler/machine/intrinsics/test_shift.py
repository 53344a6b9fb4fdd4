"""The shift tile turns the mantissas of f32 numbers into integers and shifts each lane right by the lane's own count. Every target that can
run here gives the interpreter's result. Targets that can permute bytes use a single permutation instruction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.codegen.link import link
from compiler.interpret.loops import run_prim
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.text.parser import parse
from compiler.machine.target import NAMED

SHIFTING = """
prim k(mantissas: f32[64], counts: f32[64], out shifted: i64[64]) {
  for parallel b in 4 { tile "shift"(shifted[16*b], mantissas[16*b], counts[16*b]) }
}
"""


def shifting() -> PrimFunc:
    return parse(SHIFTING).prim("k")


@pytest.mark.parametrize("name", [None, *(t.name for t in NAMED.values() if t.can_run_here)])
def test_every_count_shifts_down_as_far(run_native: Any, name: str | None) -> None:
    mantissas = np.random.default_rng(1).integers(0, 2**23, 64)
    mantissas[[0, 40]] = 0, 2**23 - 1
    counts = np.arange(64)
    arrays = [2.0 + mantissas * 2.0**-22, 2.0**23 + counts]
    shifted = np.zeros(64, np.int64)
    given = [*(a.astype(np.float32) for a in arrays), shifted]
    if name is None:
        run_prim(shifting(), given)
    else:
        run_native(shifting(), given, target=NAMED[name])
    np.testing.assert_array_equal(shifted, mantissas << 24 >> counts)


def test_bytes_are_moved_by_one_instruction() -> None:
    target = NAMED["avx512-vnni-bf16"]
    assembly = link([emit_kernel("k", shifting(), target)], target).assembly()
    assert "vpsrlvq" in assembly and "vpmovsxdq" not in assembly
