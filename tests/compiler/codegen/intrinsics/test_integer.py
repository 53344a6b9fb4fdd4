"""The tile of bytes: which instruction its inner loop is made of, and what it means."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from compiler.codegen.intrinsics.integer import DOT_PANEL, panel_bits
from compiler.codegen.link import link
from compiler.codegen.llvm import emit_kernel
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.loops import Allocate, Buffer, Const, For, Load, LoopKind, PrimFunc, Scope, Seq, Stmt, Store, Tile
from compiler.ir.parser import parse
from compiler.passes.pipeline import pipeline
from compiler.target import NAMED, Target

ROWS, COLUMNS, K = 4, 16, 64
AVX_VNNI = Target("avx-vnni", "x86_64", NAMED["x86-64-v3"].features | {"avxvnni"}, 256)
TARGETS = (NAMED["avx512-vnni-bf16"], AVX_VNNI, NAMED["aarch64-i8mm-bf16"])


def tiled(bits: int, lanes: int) -> PrimFunc:
    """c = a * b, as a kernel of one tile."""
    a, b = Buffer("a", (Dim.of(ROWS), Dim.of(K)), DType.I8), Buffer("b", (Dim.of(K * bits // 32), Dim.of(4 * COLUMNS)), DType.U8)
    c, acc = (Buffer(n, (Dim.of(ROWS), Dim.of(COLUMNS)), DType.I32, s) for n, s in (("c", Scope.GLOBAL), ("acc", Scope.LOCAL)))
    zero = Dim.of(0)

    def each(to: Buffer, *, clear: bool) -> Stmt:
        i, j, v = DimVar("i", upper=ROWS - 1), DimVar("j", upper=COLUMNS // lanes - 1), DimVar("v", upper=lanes - 1)
        at = (i.dim, j * lanes + v)
        inner: Stmt = For(v, Dim.of(lanes), Store(to, at, Const(0, DType.I32) if clear else Load(acc, at)), LoopKind.VECTOR)
        inner = For(j, Dim.of(COLUMNS // lanes), inner, LoopKind.UNROLL)
        return For(i, Dim.of(ROWS), inner, LoopKind.UNROLL)

    places = (Load(acc, (zero, zero)), Load(a, (zero, zero)), Load(b, (zero, zero)))
    tile = Tile("dot_panel", places, (Dim.of(K), Dim.of(K)), {"rows": ROWS, "columns": COLUMNS, "bits": bits})
    body = Seq((each(acc, clear=True), tile, each(c, clear=False)))
    return PrimFunc((a, b, c), 1, For(DimVar("once", upper=0), Dim.of(1), Allocate(acc, body), LoopKind.PARALLEL))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("target", "instruction"),
    [(TARGETS[0], r"vpdpbusd\s.*%zmm"), (TARGETS[1], r"\{vex\}\s+vpdpbusd\s.*%ymm"), (TARGETS[2], r"usdot\s+v\d+\.4s")],
)
def test_inner_loop_is_made_of_the_targets_instruction(target: Target, instruction: str, bits: int) -> None:
    code = link([emit_kernel("k", tiled(bits, target.lanes(4)), target)], target)
    assert len(re.findall(instruction, code.assembly())) >= ROWS * COLUMNS // target.lanes(4)
    assert "alloca" not in code.optimised()


@pytest.mark.parametrize(("name", "instruction"), [("x86-64-v3", r"vpmaddubsw\s.*%ymm"), ("avx512", r"vpmaddubsw\s.*%zmm")])
def test_where_bytes_saturate_four_bits_are_multiplied(name: str, instruction: str) -> None:
    target = NAMED[name]
    assert panel_bits(target) == (4,)
    code = link([emit_kernel("k", tiled(4, target.lanes(4)), target)], target)
    assert len(re.findall(instruction, code.assembly())) >= ROWS * COLUMNS // target.lanes(4)


@pytest.mark.parametrize(
    ("target", "bits"),
    [pytest.param(t, bits, id=f"{t.name}-{bits}") for t in (*NAMED.values(), AVX_VNNI) if t.can_run_here for bits in panel_bits(t)],
)
def test_tile_has_its_meaning(run_native: Any, target: Target, bits: int) -> None:
    rng = np.random.default_rng(bits)
    a, b = rng.integers(-128, 128, (ROWS, K)).astype(np.int8), rng.integers(0, 256, (K * bits // 32, 4 * COLUMNS)).astype(np.uint8)
    a[0], b[:, :8] = -128, 255
    c, wanted = np.zeros((ROWS, COLUMNS), np.int32), np.zeros((ROWS, COLUMNS), np.int32)
    run_native(tiled(bits, target.lanes(4)), [a, b, c], {}, target=target)
    attrs = {"rows": ROWS, "columns": COLUMNS, "bits": bits}
    DOT_PANEL.meaning((wanted.reshape(-1), a.reshape(-1), b.reshape(-1)), (K, K), attrs)
    np.testing.assert_array_equal(c, wanted)


@pytest.mark.parametrize("target", [t for t in NAMED.values() if 8 not in panel_bits(t)])
def test_machines_without_such_instructions_are_not_asked(target: Target) -> None:
    text = "func main(x: f32[n, 64], q: i8[32, 64], s: f32[32, 1]) -> object { w = dequantize(q, s) y = linear(x, w) return y }"
    kernels = pipeline(target).until("schedule_kernels")(parse(text)).prim_functions.values()
    assert "integer" not in [k.attrs.get("schedule") for k in kernels]
