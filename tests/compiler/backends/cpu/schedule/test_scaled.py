"""Products of rows and 8-bit floats with a scale per group, for sizes that leave every remainder of a tile. A row of the result has
the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compiler.backends.cpu.pipeline import pipeline
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.text.parser import parse
from compiler.machine.target import NAMED, Target, host
from tests.compiler.backends.cpu.schedule.conftest import HERE

K = 256
PAIRS = NAMED["avx512-bf16-amd"]  # the target with a tile in registers for 8-bit floats
GATED = f"""
func main(x: f32[m, {K}], a: e4m3[72, {K}], sa: bf16[72, 2], b: e4m3[72, {K}], sb: bf16[72, 2]) -> object {{
  dataflow {{
    v = dequantize(a, sa, group=128, kind="e4m3") w = dequantize(b, sb, group=128, kind="e4m3")
    g = linear(x, v, tolerates="bf16") u = linear(x, w, tolerates="bf16") s = silu(g) y = multiply(s, u)
  }}
  return y
}}
"""


EXPERTS = f"""
func main(x: f32[m, {K}], q: e4m3[5, 72, {K}], s: f32[5, 72, 2], e: i32[m]) -> object {{
  dataflow {{ w = dequantize(q, s, group=128, kind="e4m3") y = expert_linear(x, w, e, tolerates="bf16") }}
  return y
}}
"""


def program(n: int, group: int, more: str = ', tolerates="bf16"') -> str:
    return f"""
func main(x: f32[m, {K}], q: e4m3[{n}, {K}], s: f32[{n}, {K // (group or K)}]) -> object {{
  dataflow {{ w = dequantize(q, s, group={group}, kind="e4m3") y = linear(x, w{more}) }}
  return y
}}
"""


def rows(count: int) -> Any:
    """Return rows that bf16 represents exactly, so that all targets multiply the same numbers."""
    return np.random.default_rng(count).standard_normal((count, K)).astype(DType.BF16.numpy).astype(np.float32)


def weights(n: int, groups: int, dtype: Any = np.float32) -> tuple[Any, Any]:
    """Return numbers with all patterns of bits but NaN, and their scales."""
    random = np.random.default_rng(n)
    numbers = random.choice(np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF]), (n, K)).view(DType.E4M3.numpy)
    return numbers, random.random((n, groups)).astype(dtype)


def ways(text: str, target: Target) -> set[Any]:
    module = pipeline(target).until("schedule_kernels")(parse(text))
    return {prim.attrs.get("schedule") for prim in module.prim_functions.values()}


def test_rows_that_tolerate_it_are_rounded_where_a_tile_multiplies_bf16() -> None:
    for target in (PAIRS, NAMED["amx"]):
        assert all("scaled" in ways(text, target) for text in (program(100, 128), GATED, EXPERTS))
        assert "matmul" in ways(program(100, 128, ""), target) and "matmul" in ways(program(100, 2), target)
    assert "matmul" in ways(program(100, 128), NAMED["aarch64-neon"])


def test_short_groups_get_the_tile_in_registers_beside_a_matrix_unit() -> None:
    both = replace(NAMED["amx"], features=NAMED["amx"].features | PAIRS.features)
    assert all("scaled" in ways(program(100, group), both) for group in (4, 128))


@pytest.mark.parametrize("group", [0, 4, 128])
@pytest.mark.parametrize("m", [1, 2, 9])
def test_scheduling_keeps_the_meaning(m: int, group: int) -> None:
    text, args = program(100, group), (rows(m), *weights(100, K // (group or K)))
    module = pipeline(PAIRS).until("schedule_kernels")(parse(text))
    found, meaning = (Interpreter(module).call("main", *args), Interpreter(parse(text)).call("main", *args))
    np.testing.assert_allclose(found, meaning, rtol=1e-5, atol=1e-5 * np.abs(meaning).max())


@pytest.fixture
def near(session_of: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns the result on this machine. It requires that all targets give results near the interpreter's."""

    def call(text: str, *args: Any) -> Any:
        expected = Interpreter(parse(text)).call("main", *args)
        found = [session_of(text, target, 3).call("main", *args) for target in HERE]
        for result in found:
            np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max(initial=0))
        return found[0]

    return call


@pytest.mark.parametrize("m", [0, 1, 3, 8, 15])
@pytest.mark.parametrize("n", [1, 33, 64, 129])
def test_sizes_around_the_tile(near: Callable[..., Any], m: int, n: int) -> None:
    near(program(n, 128), rows(m), *weights(n, 2))


@pytest.mark.parametrize("group", [0, 4, 128])
def test_a_row_has_the_same_bits_in_any_batch(near: Callable[..., Any], group: int) -> None:
    x, parts = rows(33), weights(100, K // (group or K))
    whole = near(program(100, group), x, *parts)
    for some in (slice(0, 1), slice(3, 18), slice(5, 22)):
        np.testing.assert_array_equal(near(program(100, group), x[some], *parts), whole[some])


def test_two_products_over_the_same_rows(near: Callable[..., Any]) -> None:
    x, parts = rows(11), (*weights(72, 2, DType.BF16.numpy), *weights(72, 2, DType.BF16.numpy))
    whole = near(GATED, x, *parts)
    np.testing.assert_array_equal(near(GATED, x[4:5], *parts), whole[4:5])


def test_each_row_multiplies_the_floats_of_its_expert(near: Callable[..., Any]) -> None:
    numbers, scales = weights(5 * 72, 2)
    parts = numbers.reshape(5, 72, K), scales.reshape(5, 72, 2)
    x, experts = rows(23), np.repeat([4, 0, 3, 0], [12, 3, 7, 1]).astype(np.int32)
    whole = near(EXPERTS, x, *parts, experts)
    for some in (slice(0, 1), slice(3, 18), slice(22, 23)):
        np.testing.assert_array_equal(near(EXPERTS, x[some], *parts, experts[some]), whole[some])


# A block has 256 rows. 576 elements with one scale are multiplied in three parts.
@pytest.mark.parametrize("m", [1, 40, 300])
@pytest.mark.parametrize("group", [64, 576])
def test_a_matrix_unit_multiplies_all_rows_of_a_block(
    amx: Target, session_of: Callable[..., Any], matrix_unit: Any, m: int, group: int
) -> None:
    k = 576
    text = (
        program(100, group).replace(f"[m, {K}]", f"[m, {k}]").replace(f", {K}]", f", {k}]").replace(f", {K // group}]", f", {k // group}]")
    )
    random = np.random.default_rng(m)
    x = random.standard_normal((m, k)).astype(DType.BF16.numpy).astype(np.float32)
    numbers = random.choice(np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF]), (100, k)).view(DType.E4M3.numpy)
    args = x, numbers, random.random((100, k // group)).astype(np.float32)
    found, expected = session_of(text, amx, 2).call("main", *args), Interpreter(parse(text)).call("main", *args)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    for some in (slice(0, 1), slice(m // 3, m // 3 + 33)):
        np.testing.assert_array_equal(session_of(text, amx, 2).call("main", x[some], *args[1:]), found[some])


@pytest.mark.skipif(not PAIRS.can_run_here, reason="this CPU has no instructions for the tile")
@pytest.mark.parametrize("m", [1, 13])
def test_the_tile_has_the_bits_of_its_meaning(session_of: Callable[..., Any], m: int) -> None:
    text, args = program(160, 128), (rows(m), *weights(160, 2))
    module = pipeline(host()).until("schedule_kernels")(parse(text))
    np.testing.assert_array_equal(session_of(text, host(), 1).call("main", *args), Interpreter(module).call("main", *args))
