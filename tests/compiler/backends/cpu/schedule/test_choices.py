"""Products in which each row chooses a matrix (its expert): the rows of a block all choose the same matrix, and a row's result depends on
its own choice alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from compiler.backends.cpu.pipeline import pipeline
from compiler.backends.cpu.schedule.product.ways import schedule_product
from compiler.interpret.graph import Interpreter
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import GroupedContraction
from compiler.ir.loops.statements import Tile
from compiler.ir.loops.visit import map_scalars, walk_scalars, walk_stmts
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from compiler.machine.products import product_tiles
from compiler.machine.target import get

BF16 = ml_dtypes.bfloat16
PLAIN = "func main(x: f32[m, k], w: f32[e, n, k], chosen: i32[m]) -> object where e in 1.. { y = expert_linear(x, w, chosen) return y }"
GATED = """
func main(x: f32[m, k], gate: bf16[5, n, k], up: bf16[5, n, k], bias: f32[5, n], chosen: i32[m]) -> object {
  dataflow { g = expert_linear(x, gate, chosen) u = expert_linear(x, up, chosen, bias) s = silu(g) y = multiply(s, u) }
  return y
}
"""
TWO_CHOICES = """
func main(x: f32[m, k], gate: f32[5, n, k], up: f32[5, n, k], one: i32[m], other: i32[m]) -> object {
  dataflow { g = expert_linear(x, gate, one) u = expert_linear(x, up, other) y = multiply(g, u) }
  return y
}
"""

PAIRS = """
func main(x: bf16[m, 128], gate: bf16[5, 64, 128], up: bf16[5, 64, 128], bias: f32[5, 64], chosen: i32[m]) -> object {
  dataflow { g = expert_linear(x, gate, chosen) u = expert_linear(x, up, chosen, bias) s = silu(g) y = multiply(s, u) }
  return y
}
"""
BYTES = """
func main(x: bf16[m, 128], q: i8[5, 64, 128], s: f32[5, 64, 1], chosen: i32[m]) -> object {
  dataflow { w = dequantize(q, s, bits=8) y = expert_linear(x, w, chosen) }
  return y
}
"""
WIDENED = """
func main(x: f32[m, 448], q: u8[5, 64, 224], s: f32[5, 64, 14], chosen: i32[m]) -> object {
  dataflow { w = dequantize(q, s, bits=4, group=32) y = expert_linear(x, w, chosen, tolerates="bf16") }
  return y
}
"""


def f32(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def choices(m: int, count: int, *, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, count, m).astype(np.int32)


@pytest.mark.parametrize("m", [0, 1, 2, 9, 40, 600])
@pytest.mark.parametrize("count", [1, 7])
def test_rows_in_order_of_their_choice(agree: Callable[..., Any], m: int, count: int) -> None:
    agree(PLAIN, f32(m, 20), f32(count, 35, 20), np.sort(choices(m, count)))


@pytest.mark.parametrize("m", [3, 300])
def test_rows_in_any_order(agree: Callable[..., Any], m: int) -> None:
    """Rows may be in any order. Rows that are not sorted by expert are divided into more blocks."""
    agree(PLAIN, f32(m, 20), f32(6, 35, 20), choices(m, 6))


def test_a_choice_of_no_matrix_reads_the_nearest_one(agree: Callable[..., Any]) -> None:
    x, w = f32(4, 20), f32(3, 35, 20)
    found = agree(PLAIN, x, w, np.int32([-7, 0, 2, 99]))
    np.testing.assert_array_equal(found, agree(PLAIN, x, w, np.int32([0, 0, 2, 2])))


def test_products_of_one_choice_share_a_tile(agree: Callable[..., Any], kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    found = kernels(GATED)
    assert sum(prim.attrs["schedule"] == "matmul" for prim in found.values()) == 1
    gate, up = (f32(5, 64, 24 + i)[..., :24].astype(BF16) for i in range(2))
    for m in (1, 2, 50):
        agree(GATED, f32(m, 24), gate, up, f32(5, 64), np.sort(choices(m, 5)))


def test_products_of_two_choices_stay_apart(agree: Callable[..., Any], kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    assert sum(prim.attrs["schedule"] == "matmul" for prim in kernels(TWO_CHOICES).values()) == 2
    agree(TWO_CHOICES, f32(30, 24), f32(5, 64, 24), f32(5, 64, 24), choices(30, 5), choices(30, 5, seed=1))


def test_a_row_has_the_same_bits_whatever_others_choose(agree: Callable[..., Any]) -> None:
    x, w = f32(70, 33), f32(4, 65, 33)
    alone = agree(PLAIN, x[:1], w, np.int32([2]))[0]
    for seed in range(3):
        chosen = choices(70, 4, seed=seed)
        chosen[0] = 2
        np.testing.assert_array_equal(agree(PLAIN, x, w, chosen)[0], alone)
        order = np.argsort(chosen, kind="stable")
        sorted_rows = agree(PLAIN, x[order], w, chosen[order])
        np.testing.assert_array_equal(sorted_rows[np.flatnonzero(order == 0)[0]], alone)


@pytest.mark.parametrize(("bits", "group", "kind", "k"), [(8, 0, "int", 64), (4, 32, "int", 96), (4, 32, "e2m1", 64), (4, 16, "e2m1", 64)])
def test_weights_of_integers(
    agree: Callable[..., Any], kernels: Callable[..., dict[str, PrimFunc]], bits: int, group: int, kind: str, k: int
) -> None:
    """Experts may have quantised weights. Two products with the same choice share a kernel; each expert has panels of its own, and rows are
    quantised, too. All targets compute the same bits."""
    held, length, groups = ("i8", k, 1) if bits == 8 else ("u8", k // 2, k // group)
    text = f"""
        func main(x: f32[m, {k}], gate: {held}[3, 40, {length}], up: {held}[3, 40, {length}], s: f32[3, 40, {groups}], chosen: i32[m])
            -> object {{
          dataflow {{
            a = dequantize(gate, s, bits={bits}, group={group}, kind="{kind}")
            b = dequantize(up, s, bits={bits}, group={group}, kind="{kind}")
            g = expert_linear(x, a, chosen)
            u = expert_linear(x, b, chosen)
            y = multiply(g, u)
          }}
          return y
        }}
    """
    found = kernels(text)
    assert any(prim.attrs["schedule"] in ("integer", "matmul") for prim in found.values())
    rng = np.random.default_rng(bits)
    gate, up = (rng.integers(-127, 128, (3, 40, length)).astype(np.int8 if bits == 8 else np.uint8) for _ in range(2))
    scale, x, chosen = rng.random((3, 40, groups)).astype(np.float32), f32(50, k), np.sort(choices(50, 3))
    whole = agree(text, x, gate, up, scale, chosen, rtol=2e-2)
    for row in (0, 17, 49):
        np.testing.assert_array_equal(agree(text, x[row : row + 1], gate, up, scale, chosen[row : row + 1], rtol=2e-2)[0], whole[row])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [(PAIRS, {"amx_bf16"}), (BYTES, {"amx_i8_u8"}), (WIDENED, {"amx_widening", "amx_channels"})],
    ids=["pairs", "bytes", "widened"],
)
def test_blocks_of_a_choice_on_a_matrix_unit(text: str, wanted: set[str]) -> None:
    """On a matrix unit, the scheduled kernel computes what the program computes. It multiplies blocks of rows that choose the same matrix,
    processes k in parts, and prefetches or widens the weights of the next part. The interpreter runs the kernel."""
    rng = np.random.default_rng(0)
    x, chosen, bias = f32(72, 128).astype(BF16), np.sort(choices(72, 2)), f32(5, 64)
    if text is BYTES:
        args = [x, rng.integers(-127, 128, (5, 64, 128)).astype(np.int8), rng.random((5, 64, 1)).astype(np.float32), chosen]
    elif text is WIDENED:
        q, s = rng.integers(0, 256, (5, 64, 224)).astype(np.uint8), rng.random((5, 64, 14)).astype(np.float32)
        args = [f32(72, 448), q, s, chosen]
    else:
        args = [x, f32(5, 64, 128).astype(BF16), f32(5, 64, 129)[..., :128].astype(BF16), bias, chosen]
    module = parse(text)
    scheduled = pipeline(get("amx")).until("schedule_kernels")(module)
    verify(scheduled)
    tiles = {stmt.op.name for prim in scheduled.prim_functions.values() for stmt in walk_stmts(prim.body) if isinstance(stmt, Tile)}
    assert wanted <= tiles
    meant = pipeline(get("amx")).until("legalize")(module) if text is WIDENED else module  # widening rounds weights
    expected = Interpreter(meant).call("main", *args).astype(np.float32)
    found = Interpreter(scheduled).call("main", *args).astype(np.float32)
    assert np.abs(found - expected).max() < 1e-2 * np.abs(expected).max()


def test_a_sum_with_terms_is_not_widened() -> None:
    """The sums of a matrix unit begin at 0. A sum that begins with the terms of its groups needs another schedule."""
    target = get("amx")
    module = pipeline(target).until("lift_weights")(parse(WIDENED))
    (prim,) = (p for p in module.prim_functions.values() if any(isinstance(s, GroupedContraction) for s in walk_scalars(p.body)))
    with_terms = replace(
        prim,
        body=map_scalars(prim.body, lambda s: replace(s, term=s.factor) if isinstance(s, GroupedContraction) and s.term is None else s),
    )
    schedules = [found and found.attrs["schedule"] for found in (schedule_product(p, product_tiles(target)) for p in (prim, with_terms))]
    assert schedules == ["widened", None]
