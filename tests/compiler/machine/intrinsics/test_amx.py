"""AMX tiles: the machine instructions of one step, and the sizes and targets that are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from compiler.backends.cpu.codegen.llvm import emit_kernel
from compiler.codegen.link import link
from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.errors import CompileError
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Load
from compiler.ir.loops.statements import For, LoopKind, Seq, Tile
from compiler.machine.intrinsics.amx import AmxBf16, AmxI8ByI8, AmxI8ByU8
from compiler.machine.intrinsics.product import MatrixUnitOp
from compiler.machine.target import NAMED

AMX = NAMED["amx"]
PRODUCTS = {AmxBf16: "tdpbf16ps", AmxI8ByU8: "tdpbsud", AmxI8ByI8: "tdpbssd"}


def tiled(kind: Callable[[int, int], MatrixUnitOp], rows: int, columns: int) -> PrimFunc:
    op = kind(rows, columns)
    packed = 4 // op.row_dtype.num_bytes
    k, stride = DimVar("k", lower=64, multiple_of=64), DimVar("stride", lower=1)
    a = Buffer("a", (Dim.of(rows), stride.dim), op.row_dtype)
    b = Buffer("b", (k // packed, Dim.of(columns * packed)), op.panel_dtype)
    c = Buffer("c", (Dim.of(rows), Dim.of(columns)), op.accumulator)
    places = tuple(Load(x, (Dim.of(0), Dim.of(0))) for x in (c, a, b))
    body = Seq((Tile(op.configuration), Tile(op, places, (k.dim, stride.dim))))
    return PrimFunc((k, stride, a, b, c), 1, For(DimVar("p", 0, 0), Dim.of(1), body, LoopKind.PARALLEL))


@pytest.mark.parametrize("kind", list(PRODUCTS))
@pytest.mark.parametrize(("rows", "columns", "products"), [(32, 32, 4), (17, 32, 4), (16, 32, 2), (1, 32, 2), (32, 16, 2), (5, 16, 1)])
def test_each_pair_of_tiles_is_multiplied_once_per_step(kind: type[MatrixUnitOp], rows: int, columns: int, products: int) -> None:
    assembly = link([emit_kernel("k", tiled(kind, rows, columns), AMX)], AMX).assembly()
    multiplied = re.findall(rf"{PRODUCTS[kind]}\s+%tmm(\d), %tmm(\d), %tmm(\d)", assembly)
    heights, sides = -(-rows // 16), columns // 16
    assert len(multiplied) == 2 * products  # in the loop over the steps, and after it for the last step
    assert {tuple(map(int, m)) for m in multiplied} == {(6 + j, 4 + i, 2 * i + j) for i in range(heights) for j in range(sides)}
    assert len(re.findall(r"tilestored", assembly)) == products
    assert len(re.findall(r"ldtilecfg", assembly)) == 1
    assert re.findall(r"\btile\w+", assembly)[-1] == "tilerelease"


@pytest.mark.parametrize("kind", list(PRODUCTS))
def test_rows_of_a_block_do_not_displace_the_panel(kind: type[MatrixUnitOp]) -> None:
    """Rows are loaded with the hint t1, and columns and accumulators without it: they stay in the first-level cache."""
    assembly = link(
        [emit_kernel("k", tiled(lambda rows, columns: replace(kind(rows, columns), in_block=True), 32, 32), AMX)], AMX
    ).assembly()
    assert set(re.findall(r"tileloaddt1\s.*%tmm(\d)", assembly)) == {"4", "5"}
    assert set(re.findall(r"tileloadd\s.*%tmm(\d)", assembly)) == {"0", "1", "2", "3", "6", "7"}


def test_bf16_meaning_is_near_the_product() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=s).astype(DType.BF16.numpy) for s in ((3, 64), (32, 16, 2)))
    c = np.zeros((3, 16), np.float32)
    AmxBf16(3, 16).meaning((c.reshape(-1), a.reshape(-1), b.reshape(-1)), (64, 64))
    right = b.astype(np.float64).transpose(0, 2, 1).reshape(64, 16)
    np.testing.assert_allclose(c, a.astype(np.float64) @ right, rtol=1e-5, atol=1e-5)


def test_sizes_and_targets_without_the_unit_are_refused() -> None:
    with pytest.raises(CompileError, match="tile amx_configure: rows are 33, expected 1 to 32"):
        emit_kernel("k", tiled(AmxI8ByU8, 33, 16), AMX)
    with pytest.raises(CompileError, match="tile amx_bf16: columns are 24, expected 16 or 32"):
        emit_kernel("k", tiled(AmxBf16, 16, 24), AMX)
    with pytest.raises(CompileError, match="tile amx_configure has no instructions on target avx512"):
        emit_kernel("k", tiled(AmxBf16, 16, 16), NAMED["avx512"])
