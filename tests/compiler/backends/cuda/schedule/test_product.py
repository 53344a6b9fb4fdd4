"""Some products run on tensor cores. The tests check which ones do, and that their results are near the interpreter's."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import compiler.ops
from compiler.backends.cuda.pipeline import pipeline
from compiler.interpret.graph import Interpreter
from compiler.ir.loops.statements import Tile
from compiler.ir.loops.visit import walk_stmts
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from compiler.machine.intrinsics.block_product import BlockProduct
from compiler.machine.intrinsics.wgmma import Wgmma
from compiler.machine.target import get

assert compiler.ops

BF16 = ml_dtypes.bfloat16


def program(*, k: int = 64, n: int = 72, most: int = 256, x: str = "bf16", w: str = "bf16", more: str = "") -> str:
    tolerates = ', tolerates="bf16"' if x == "f32" else ""
    return (
        f"func main(x: {x}[t, {k}], w: {w}[{n}, {k}]) -> object where t in 0..{most} "
        f'{{ dataflow {{ y = linear(x, w, out_dtype="f32"{tolerates}){more} }} return y }}'
    )


def scheduled(text: str, target: str = "sm_80") -> IRModule:
    module = pipeline(get(target)).until("schedule_kernels")(parse(text))
    verify(module)
    return module


def ops(text: str, target: str = "sm_80") -> list[BlockProduct]:
    found = [s.op for prim in scheduled(text, target).prim_functions.values() for s in walk_stmts(prim.body) if isinstance(s, Tile)]
    return [op for op in found if isinstance(op, BlockProduct)]


def tiles(text: str, target: str = "sm_80") -> list[tuple[int, int]]:
    """Return the rows and columns of each tensor-core tile."""
    return [(op.rows, op.columns) for op in ops(text, target)]


def test_a_range_of_rows_has_a_tile_of_its_own() -> None:
    assert tiles(program()) == [(8, 64), (16, 64), (32, 64), (64, 64), (64, 128)]
    assert tiles(program(most=16)) == [(8, 64), (16, 64)], "tiles should have no more rows than the product"


@pytest.mark.parametrize("text", [program(k=48), program(w="f32"), program(x="f32", w="f16")], ids=["length", "weights", "formats"])
def test_what_the_tile_does_not_take_runs_on_the_reference_schedule(text: str) -> None:
    assert tiles(text) == []


def test_rows_that_tolerate_it_are_rounded() -> None:
    assert tiles(program(x="f32"))


def quantised(*, bits: int = 8, group: int = 0, scale: str = "f32", zero: bool = False, x: str = "f32", kind: str = "int") -> str:
    q, groups = "u8[72, 32]" if bits == 4 else "e4m3[72, 64]" if kind == "e4m3" else "i8[72, 64]", 64 // (group or 64)
    more = ', kind="e4m3"' if kind == "e4m3" else ""
    tolerates = ', tolerates="bf16"' if kind == "e4m3" and x == "f32" else ""
    given, taken = (f", z: {scale}[72, {groups}]", ", z") if zero else ("", "")
    return f"""
func main(x: {x}[t, 64], q: {q}, s: {scale}[72, {groups}]{given}) -> object where t in 0..256 {{
  dataflow {{ w = dequantize(q, s{taken}, bits={bits}, group={group}{more}) y = linear(x, w, out_dtype="f32"{tolerates}) }} return y
}}"""


def test_sm_90a_multiplies_by_wgmma() -> None:
    assert {op.name for op in ops(program(), "sm_90a")} == {"wgmma_product"}
    assert tiles(program(), "sm_90a") == [(8, 64), (32, 64), (64, 64), (128, 64), (128, 256)]


@pytest.mark.parametrize("text", [program(k=96), quantised(bits=4, group=32)], ids=["length", "short groups"])
def test_what_wgmma_does_not_take_is_multiplied_by_mma(text: str) -> None:
    assert {op.name for op in ops(text, "sm_90a")} == {"mma_product"}


@pytest.mark.parametrize(
    "text", [quantised(zero=True), quantised(scale="f16"), quantised(group=16)], ids=["zeros", "scales", "short groups"]
)
def test_integers_that_the_tile_does_not_take_run_on_the_reference_schedule(text: str) -> None:
    assert tiles(text) == []


def test_sums_of_groups_need_narrow_tiles() -> None:
    """If weights have a scale per group, an element of the result needs two accumulators (the sum of the group, and the total), so tiles
    are narrower."""
    assert tiles(quantised()) == [(8, 64), (16, 64), (32, 64), (64, 64), (64, 128)]
    assert tiles(quantised(bits=4, group=32)) == [(8, 64), (16, 64), (32, 64), (64, 64)]


def in_long_groups(num_columns: int) -> str:
    given = f"x: bf16[t, 512], q: u8[{num_columns}, 256], s: bf16[{num_columns}, 4]"
    body = '{ dataflow { w = dequantize(q, s, bits=4, group=128) y = linear(x, w, out_dtype="f32") } return y }'
    return f"func main({given}) -> object where t in 0..256 {body}"


def test_a_product_with_few_columns_has_thin_tiles_for_few_rows() -> None:
    """Narrow tiles of 64 columns would be blocks for less than half of the multiprocessors of an H100 (with bf16 weights: less than a
    quarter), so up to 8 rows get tiles of 32 columns."""
    others = [(32, 64), (64, 64), (128, 64), (64, 256)]
    assert tiles(in_long_groups(4096), "sm_90a") == [(8, 32), *others]
    assert tiles(in_long_groups(8192), "sm_90a") == [(8, 64), *others]
    assert [tiles(program(k=1024, n=n), "sm_90a")[0] for n in (2112, 4096)] == [(8, 32), (8, 64)], "of bf16, fewer columns"


def test_a_product_with_many_columns_has_tiles_for_lone_blocks() -> None:
    """If narrow tiles would be more blocks than run at once, more than 8 rows get wide tiles: for blocks that run alone, and for more rows
    also for pairs of blocks in a cluster."""
    assert tiles(in_long_groups(16896), "sm_90a") == [(8, 64), (32, 64), (64, 64), (128, 64), (64, 256)]
    assert tiles(in_long_groups(32768), "sm_90a") == [(8, 64), (64, 256), (64, 256)]
    *_, lone, paired = ops(in_long_groups(32768), "sm_90a")
    assert isinstance(lone, Wgmma) and isinstance(paired, Wgmma) and (lone.cluster, paired.cluster) == (1, 2)
    few = in_long_groups(32768).replace("0..256", "0..8")
    assert tiles(few, "sm_90a") == [(8, 64)], "no tile should have more rows than the product needs"


def test_blocks_that_leave_no_room_for_others_use_all_shared_memory() -> None:
    both = ops(program(k=1024), "sm_90a"), ops(program(k=1024, most=64), "sm_90a")
    alone, shared = ({op.fills for op in found if isinstance(op, Wgmma) and not op.is_thin} for found in both)
    assert (alone, shared) == ({True}, {False})


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("count", [1, 9, 129])
def test_the_meaning_stays(count: int, target: str) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((count, 64)).astype(BF16), rng.standard_normal((72, 64)).astype(BF16)
    found, meaning = (Interpreter(m).call("main", x, w) for m in (scheduled(program(), target), parse(program())))
    np.testing.assert_allclose(found, meaning, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("bits", "group", "target"), [(8, 0, "sm_80"), (8, 32, "sm_80"), (4, 0, "sm_80"), (4, 32, "sm_80"), (8, 0, "sm_90a"), (4, 0, "sm_90a")]
)
def test_the_meaning_of_integers_stays(bits: int, group: int, target: str) -> None:
    rng, text = np.random.default_rng(0), quantised(bits=bits, group=group, scale="bf16", x="bf16")
    q = rng.integers(0, 256, (72, 32)).astype(np.uint8) if bits == 4 else rng.integers(-128, 128, (72, 64)).astype(np.int8)
    args = rng.standard_normal((9, 64)).astype(BF16), q, rng.random((72, 64 // (group or 64))).astype(BF16)
    found, meaning = (Interpreter(m).call("main", *args) for m in (scheduled(text, target), parse(text)))
    np.testing.assert_allclose(found, meaning, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("group", "target", "name"), [(0, "sm_80", "mma"), (32, "sm_80", "mma"), (0, "sm_90a", "wgmma"), (32, "sm_90a", "mma")]
)
def test_floats_of_eight_bits_are_multiplied_as_bf16(group: int, target: str, name: str) -> None:
    assert {op.name for op in ops(quantised(group=group, kind="e4m3"), target)} == {f"{name}_product"}
    rng, text = np.random.default_rng(0), quantised(group=group, scale="bf16", x="bf16", kind="e4m3")
    q = rng.integers(0, 0x7F, (72, 64)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    args = rng.standard_normal((9, 64)).astype(BF16), q, rng.random((72, 64 // (group or 64))).astype(BF16)
    found, meaning = (Interpreter(m).call("main", *args) for m in (scheduled(text, target), parse(text)))
    np.testing.assert_allclose(found, meaning, rtol=1e-5, atol=1e-3)


# --- rows that choose one of several matrices --------------------------------------------------------------------------

EXPERTS = {
    "bf16": ("w: bf16[5, 72, 64]", ""),
    "int8": ("q: i8[5, 72, 64], s: bf16[5, 72, 1]", "w = dequantize(q, s)"),
    "int4": ("q: u8[5, 72, 32], s: bf16[5, 72, 2]", "w = dequantize(q, s, bits=4, group=32)"),
}


@pytest.mark.parametrize("format", EXPERTS)
def test_rows_that_choose_a_matrix_run_on_tensor_cores(format: str) -> None:
    """Products in which each row chooses a matrix run on tensor cores. The test has sequences of adjacent rows with the same choice, both
    longer and shorter than a block, and unsorted choices."""
    given, decoded = EXPERTS[format]
    text = (
        f"func main(x: bf16[t, 64], {given}, e: i32[t]) -> object where t in 0..256 "
        f'{{ dataflow {{ {decoded} y = expert_linear(x, w, e, out_dtype="f32") }} return y }}'
    )
    assert tiles(text) == [(8, 64), (16, 64), (32, 64), (64, 64)]
    rng = np.random.default_rng(0)
    experts = np.repeat([4, 0, 3, 0], [84, 3, 9, 1]).astype(np.int32)
    x = rng.standard_normal((len(experts), 64)).astype(BF16)
    weights = {
        "bf16": [rng.standard_normal((5, 72, 64)).astype(BF16)],
        "int8": [rng.integers(-128, 128, (5, 72, 64)).astype(np.int8), rng.random((5, 72, 1)).astype(BF16)],
        "int4": [rng.integers(0, 256, (5, 72, 32)).astype(np.uint8), rng.random((5, 72, 2)).astype(BF16)],
    }[format]
    found, meaning = (Interpreter(m).call("main", x, *weights, experts) for m in (scheduled(text), parse(text)))
    np.testing.assert_allclose(found, meaning, rtol=1e-5, atol=1e-6 * abs(meaning).max())
