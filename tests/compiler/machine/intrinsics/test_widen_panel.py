"""The tile that widens a panel of 4-bit weights to 8 bits. Its machine code computes the same as its definition in NumPy for all numbers
and multipliers, and has the expected number of instructions."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.codegen.link import link
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Load
from compiler.ir.loops.statements import Allocate, For, LoopKind, Seq, Store, Tile
from compiler.machine.intrinsics.widen_panel import WidenPanel
from compiler.machine.target import NAMED

TARGET = NAMED["avx512"]


def widened(columns: int, group: int) -> PrimFunc:
    """Return a kernel that widens a panel into a local buffer and copies the buffer to its output."""
    k, zero = DimVar("k", lower=64, upper=512, multiple_of=64), Dim.of(0)
    panel, multipliers = Buffer("panel", (k // 8, Dim.of(columns * 4)), DType.U8), Buffer("m", (k // group, Dim.of(columns)), DType.I8)
    out, wide = Buffer("out", (k // 4 * 4, Dim.of(columns)), DType.I8), Buffer("wide", (Dim.of(512 * columns),), DType.I8, Scope.LOCAL)
    places = [Load(b, (zero, zero)) for b in (panel, multipliers)]
    tile = Tile(WidenPanel(columns, group), (Load(wide, (zero,)), *places, *places), (k.dim,))
    i, j = DimVar("i", 0, k.dim - 1), DimVar("j", 0, columns - 1)
    copy = For(i, k.dim, For(j, Dim.of(columns), Store(out, (i.dim, j.dim), Load(wide, (i * columns + j,)))))
    body = Allocate(wide, Seq((tile, copy)))
    return PrimFunc((k, panel, multipliers, out), 1, For(DimVar("once", upper=0), Dim.of(1), body, LoopKind.PARALLEL))


@pytest.mark.skipif(not TARGET.can_run_here, reason="this machine has no AVX-512")
@pytest.mark.parametrize(("columns", "group"), [(32, 32), (32, 128), (16, 64), (32, 512)])
def test_machine_code_is_what_is_meant(run_native: Callable[..., None], columns: int, group: int) -> None:
    rng, k = np.random.default_rng(group), 512
    panel = rng.integers(0, 256, (k // 8, columns * 4)).astype(np.uint8)
    multipliers = rng.integers(-127, 128, (k // group, columns)).astype(np.int8)
    multipliers[0, :2] = 127, -127
    found, wanted = (np.zeros((k, columns), np.int8) for _ in range(2))
    prim = widened(columns, group)
    (k_var,) = (p for p in prim.params if isinstance(p, DimVar))
    run_native(prim, [panel, multipliers, found], {k_var: k}, target=TARGET)
    flat = [a.reshape(-1) for a in (wanted, panel, multipliers)]
    WidenPanel(columns, group).meaning(flat, (k,))
    np.testing.assert_array_equal(found, wanted)


def test_meaning_is_that_of_the_operator() -> None:
    """The widened elements are q * m / 8 for weights q and multipliers m, rounded to nearest, with ties rounded up. Four consecutive
    elements of a column are adjacent."""
    panel = np.full((8, 64), 0x08, np.uint8)  # of every eight weights in a column, the first four are 0 and the last four are -8
    panel[0, :4] = 0x9F  # the numbers 7 and 1, each stored plus 8
    out, multipliers = np.zeros((64, 16), np.int8), np.full((2, 16), 127, np.int8)
    multipliers[0, 0] = -100
    WidenPanel(16, 32).meaning((out.reshape(-1), panel.reshape(-1), multipliers.reshape(-1)), (64,))
    fours = out.reshape(16, 16, 4)
    assert (fours[0, 0] == -87).all() and (fours[1, 0] == -12).all() and (fours[3, 0] == 100).all()
    assert not fours[0, 1:].any() and (fours[1, 1:] == -127).all() and (fours[15] == -127).all()


def test_two_lines_cost_fifteen_operations() -> None:
    """The code that widens two cache lines has 15 instructions. Loading the multipliers for 32 elements of k needs two more
    instructions."""
    assembly = link([emit_kernel("k", widened(32, 32), TARGET)], TARGET).assembly()
    (body,) = (part for part in re.split(r"\n\.\w+:", assembly) if "vpmulhrsw" in part)
    vector = [op for op in re.findall(r"\n\t(v\w+)[^\n]*%zmm", body) if not op.startswith(("vmovdq", "vbroadcast"))]
    blends = re.findall(r"vmovdqu8\t%zmm\d+, %zmm\d+ \{%k", body)
    assert len(vector) + len(blends) == 8 * 15 + 2 * 2
    assert vector.count("vpmulhrsw") == 8 * 4
