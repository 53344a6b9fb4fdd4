"""Dot tiles of bf16 compute the same as their definition in NumPy on every target that can run here. For other targets, the tests check
which instructions are generated."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.codegen.link import link
from compiler.interpret.loops import run_prim
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import CompileError
from compiler.ir.loops.buffers import Buffer, Scope
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Const, Load
from compiler.ir.loops.statements import Allocate, For, LoopKind, Seq, Stmt, Store, Tile
from compiler.ir.text.parser import parse
from compiler.machine.intrinsics.dot_bf16 import PAIR, DotBf16
from compiler.machine.target import NAMED, Target, host

Array = NDArray[Any]
BF16, F32 = DType.BF16, DType.F32
COLUMNS = 32
TARGETS = {t.name: t for t in (host(), *NAMED.values()) if t.can_run_here}


def tiled(rows: int, lanes: int) -> PrimFunc:
    """Return a kernel for c[i, j] = 1 + sum(a[i, k] * b[k, j]). The rows of a have a stride, and b is the second of two packed panels."""
    k, stride = DimVar("k", lower=PAIR, multiple_of=PAIR), DimVar("stride", lower=1)
    a, b = Buffer("a", (Dim.of(rows), stride.dim), BF16), Buffer("b", (Dim.of(2), k // PAIR, Dim.of(COLUMNS * PAIR)), BF16)
    c, acc = Buffer("c", (Dim.of(rows), Dim.of(COLUMNS)), F32), Buffer("acc", (Dim.of(rows), Dim.of(COLUMNS)), F32, Scope.LOCAL)

    def each(to: Buffer, value: Any) -> Stmt:
        i, j, v = DimVar("i", upper=rows - 1), DimVar("j", upper=COLUMNS // lanes - 1), DimVar("v", upper=lanes - 1)
        at = (i.dim, j * lanes + v)
        inner: Stmt = For(v, Dim.of(lanes), Store(to, at, value(at)), LoopKind.VECTOR)
        inner = For(j, Dim.of(COLUMNS // lanes), inner, LoopKind.UNROLL)
        return For(i, Dim.of(rows), inner, LoopKind.UNROLL)

    zero = Dim.of(0)
    places = (Load(acc, (zero, zero)), Load(a, (zero, zero)), Load(b, (Dim.of(1), zero, zero)))
    tile = Tile(DotBf16(rows, COLUMNS), places, (k.dim, stride.dim))
    body = Seq((each(acc, lambda at: Const(1.0, F32)), tile, each(c, lambda at: Load(acc, at))))
    once = For(DimVar("once", upper=0), Dim.of(1), Allocate(acc, body), LoopKind.PARALLEL)
    return PrimFunc((k, stride, a, b, c), 1, once)


def operands(rows: int, k: int, stride: int) -> tuple[Array, Array]:
    rng, bf16 = np.random.default_rng(k), ml_dtypes.bfloat16
    return rng.normal(size=(rows, stride)).astype(bf16), rng.normal(size=(2, k // PAIR, COLUMNS * PAIR)).astype(bf16)


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize(("rows", "k", "stride"), [(1, 4, 4), (4, 64, 64), (6, 20, 37)])
def test_tile_has_its_meaning(run_native: Any, target: str, rows: int, k: int, stride: int) -> None:
    prim = tiled(rows, TARGETS[target].lanes(4))
    a, b = operands(rows, k, stride)
    c = np.zeros((rows, COLUMNS), np.float32)
    k_var, stride_var = (p for p in prim.params if isinstance(p, DimVar))
    run_native(prim, [a, b, c], {k_var: k, stride_var: stride}, target=TARGETS[target])
    wanted = np.ones_like(c)
    DotBf16(rows, COLUMNS).meaning((wanted.reshape(-1), a.reshape(-1), b[1].reshape(-1)), (k, stride))
    assert c.tobytes() == wanted.tobytes()


def test_a_row_has_the_same_bits_in_any_tile(run_native: Any) -> None:
    a, b = operands(6, 32, 32)
    found: list[Array] = []
    for rows in (1, 3, 6):
        prim = tiled(rows, host().lanes(4))
        c = np.zeros((rows, COLUMNS), np.float32)
        k_var, stride_var = (p for p in prim.params if isinstance(p, DimVar))
        run_native(prim, [a[:rows].copy(), b, c], {k_var: 32, stride_var: 32})
        found.append(c[0])
    assert all(f.tobytes() == found[0].tobytes() for f in found)


ROWS = """
prim k(a: bf16[4, 10], b: bf16[2, 80], c: f32[4, 48], out total: f32[4, 48]) {
  for parallel once in 1 {
    alloc local acc: f32[4, 48] {
      for i in 192 { acc[i // 48, i % 48] = c[i // 48, i % 48] }
      tile "dot_bf16_rows"(acc[0, 0], a[0, 2], PLACES) dims(10) {rows=4, columns=48TOUCHING}
      for i in 192 { total[i // 48, i % 48] = acc[i // 48, i % 48] }
    }
  }
}
"""


@pytest.mark.parametrize("places", ["b[0, 0], b[1, 8]", "b[0, 5]"], ids=["apart", "touching"])
@pytest.mark.parametrize("target", list(TARGETS))
def test_a_pair_of_rows_as_they_lie(run_native: Any, target: str, places: str) -> None:
    """A tile that reads two rows of b where they are stored gives the same result as a tile that reads a packed panel of both rows."""
    touching = ", touching=true" if "1" not in places else ""
    prim = parse(ROWS.replace("PLACES", places).replace("TOUCHING", touching)).prim("k")
    rng, bf16 = np.random.default_rng(0), ml_dtypes.bfloat16
    a, b, c = rng.normal(size=(4, 10)).astype(bf16), rng.normal(size=(2, 80)).astype(bf16), rng.normal(size=(4, 48)).astype(np.float32)
    meant, found, wanted = np.zeros_like(c), np.zeros_like(c), c.copy()
    run_prim(prim, [a, b, c, meant])
    run_native(prim, [a, b, c, found], target=TARGETS[target])
    pair = [b[0, :48], b[1, 8:56]] if "1" in places else [b.reshape(-1)[5:53], b.reshape(-1)[53:101]]
    DotBf16(4, 48).meaning((wanted.reshape(-1), a.reshape(-1)[2:], np.stack(pair, -1).reshape(-1)), (PAIR, 10))
    assert meant.tobytes() == wanted.tobytes()
    assert found.tobytes() == wanted.tobytes()


INSTRUCTIONS = {
    "avx512-vnni-bf16": r"vdpbf16ps\s.*%zmm",
    "avx512": r"vfmadd\w+ps\s.*%zmm",
    "x86-64-v3": r"vfmadd\w+ps\s.*%ymm",
    "aarch64-neon": r"fmla\s+v\d+\.4s",
}


@pytest.mark.parametrize("target", list(INSTRUCTIONS))
def test_inner_loop_is_made_of_the_targets_instruction(target: str) -> None:
    where: Target = NAMED[target]
    code = link([emit_kernel("k", tiled(4, where.lanes(4)), where)], where)
    per_group = 4 * COLUMNS // where.lanes(4)
    assert len(re.findall(INSTRUCTIONS[target], code.assembly())) >= per_group
    assert "alloca" not in code.optimised()


def test_tile_in_a_vector_loop_is_refused() -> None:
    x = Buffer("x", (Dim.of(4),), DType.F32)
    v = DimVar("v", upper=3)
    with pytest.raises(CompileError, match="tile dot_bf16 is inside vector loop v"):
        emit_kernel("k", PrimFunc((x,), 1, For(v, Dim.of(4), Tile(DotBf16(4, 32)), LoopKind.VECTOR)), host())
