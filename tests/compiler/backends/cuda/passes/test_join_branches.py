"""Nests that read only single elements of a product's result are joined with the product into one kernel call."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import compiler.ops
from compiler.backends.cuda.passes.join_branches import JoinBranches
from compiler.backends.cuda.pipeline import pipeline
from compiler.interpret.graph import Interpreter
from compiler.ir.graph.values import CallTir
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from compiler.machine.target import get

assert compiler.ops

ROPE = "rope(q, cos, sin)"


def program(rotated: str = ROPE, more: str = "", result: str = "(turned, after)", size: int = 64) -> str:
    """Return a program that projects to two heads of queries, one of keys and one of values. The program rotates queries and keys, and
    appends keys and values to the cache."""
    return f"""
func main(x: bf16[t, 32], cos: f32[t, {size // 2}], sin: f32[t, {size // 2}], slots: i32[t], cache: f32[1, 2, 3, 1, {16 * size}],
          weight w: bf16[{4 * size}, 32]) -> object where t in 0..64 {{
  dataflow {{
    a = linear(x, w, out_dtype="f32")
    r = reshape(a, shape[t, 4, {size}])
    q = slice(r, axis=1, begin=0, end=2)
    k = slice(r, axis=1, begin=2, end=3)
    v = slice(r, axis=1, begin=3, end=4)
    turned = {rotated}
    {more}
    keys = rope(k, cos, sin)
    after = kv_append(cache, keys, v, slots, 0)
    both = {result}
  }}
  return both
}}"""


def stages_of(text: str) -> tuple[IRModule, IRModule]:
    """Return the program before and after the pass `join_branches`."""
    passes = pipeline(get("sm_80"))
    return passes.until("pack_operands")(parse(text)), passes.until("join_branches")(parse(text))


def num_calls(module: IRModule) -> int:
    bindings = (b for block in module.graph("main").body.blocks for b in block.bindings)
    return sum(isinstance(b.value, CallTir) for b in bindings)


def arguments(size: int = 64) -> list[Any]:
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-3, 4, shape).astype(ml_dtypes.bfloat16) for shape in ((5, 32), (4 * size, 32)))
    angles = rng.standard_normal((2, 5, size // 2), np.float32)
    return [x, *angles, np.array([3, 40, 0, 17, 16], np.int32), np.zeros((1, 2, 3, 1, 16 * size), np.float32), w]


@pytest.mark.parametrize("size", [64, 128, 32])
def test_a_product_its_rotation_and_its_append_are_one_call(size: int) -> None:
    """A product, the rotation of its result and the append to the cache become one call, which gives the same bits as separate calls.
    Depending on the head size, a tile covers rotated pairs by one range of adjacent columns or by two ranges."""
    before, after = stages_of(program(size=size))
    verify(after)
    assert (num_calls(before), num_calls(after)) == (5, 3), "expected packing, a copy of the caller's cache, and the joined call"
    expected, found = (Interpreter(m).call("main", *(a.copy() for a in arguments(size))) for m in (before, after))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "text",
    [
        program(more="e = exp(r)", result="(turned, after, e, r)"),
        program("softmax(q)"),
        program(more="z = softmax(turned)", result="(z, after, turned)"),
        program(size=48),
    ],
    ids=["the product is a result", "rows are no elements", "a result is read before the last reader", "a tile has half of a pair"],
)
def test_what_cannot_wait_or_has_no_place_in_a_tile_stays(text: str) -> None:
    before, after = stages_of(text)
    assert num_calls(before) == num_calls(after)


def test_a_product_that_adds_another_one_is_no_branch_of_it() -> None:
    """If a program adds two products, each product keeps its own call. Layers that compute attention and the feed-forward network in
    parallel contain such sums."""
    before, after = stages_of("""
func main(x: bf16[t, 64], y: bf16[t, 96], z: f32[t, 64], weight w: bf16[64, 64], weight v: bf16[64, 96]) -> object where t in 0..64 {
  dataflow {
    a = linear(x, w, out_dtype="f32")
    s = add(a, z)
    b = linear(y, v, out_dtype="f32")
    c = add(s, b)
  }
  return c
}""")
    assert num_calls(before) == num_calls(after) == 4, "expected two packings and two products"


def test_a_module_without_products_is_the_same_object() -> None:
    module = parse("func main(x: f32[n]) -> object where n in 0..9 { dataflow { y = exp(x) } return y }")
    assert JoinBranches(lambda _: True)(module) is module
