"""Attention writes bf16 itself if its only reader is a cast to bf16."""

from __future__ import annotations

import numpy as np
import pytest

import compiler.ops
from compiler.backends.cuda.passes.round_attention import round_attention
from compiler.backends.cuda.pipeline import pipeline
from compiler.interpret.graph import Interpreter
from compiler.ir.graph.values import CallTir
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from compiler.machine.target import get

assert compiler.ops

Q = "f32[t, 4, 8]"


def program(more: str, result: str, dtype: str = "bf16", q: str = Q) -> str:
    return f"""
func main(q: {q}, cache: f32[1, 2, 3, 2, 128], tables: i32[s, p], ids: i32[t], at: i32[t]) -> object
    where t in 0..64, s in 0..8, p in 0..8 {{
  dataflow {{
    a = paged_attention(q, cache, tables, ids, at, 0, scale=0.3)
    r = reshape(a, shape[t, 32])
    c = cast(r, dtype="{dtype}")
    {more}
  }}
  return {result}
}}"""


def fused(text: str) -> IRModule:
    return pipeline(get("sm_80")).until("fuse")(parse(text))


def num_calls(module: IRModule) -> int:
    return sum(len(block.bindings) for block in module.graph("main").body.blocks)


def test_a_cast_is_done_by_attention_itself() -> None:
    module = fused(program("", "c"))
    found = round_attention(module)
    verify(found)
    assert num_calls(found) == num_calls(module) - 1, "expected no cast"
    rng = np.random.default_rng(0)
    args = rng.standard_normal((3, 4, 8), np.float32), rng.standard_normal((1, 2, 3, 2, 128), np.float32), np.array([[2, 0]], np.int32)
    args = *args, np.zeros(3, np.int32), np.array([0, 17, 20], np.int32)
    results = [Interpreter(m).call("main", *(a.copy() for a in args)) for m in (found, module)]
    np.testing.assert_array_equal(*(r.astype(np.float32) for r in results))


def test_a_result_that_something_else_reads_stays() -> None:
    for more, result in (("e = exp(a) d = (c, e)", "d"), ("d = (c, r)", "d")):
        module = fused(program(more, result))
        assert round_attention(module) is module


def test_a_cast_of_something_else_stays() -> None:
    module = fused(f'func main(x: {Q}) -> object where t in 0..8 {{ r = reshape(x, shape[t, 32]) c = cast(r, dtype="bf16") return c }}')
    assert round_attention(module) is module


def test_calls_without_operands_are_left_alone() -> None:
    module = fused(program('e = full(shape[t, 2], 1.0, dtype="f32")\n    d = (c, e)', "d"))
    assert any(not v.args for b in module.graph("main").body.bindings if isinstance(v := b.value, CallTir))
    assert num_calls(round_attention(module)) == num_calls(module) - 1, "expected one cast fewer"


@pytest.mark.parametrize(("source", "target"), [("bf16", "f32"), ("f16", "bf16"), ("f32", "i32"), ("f32", "bool")])
def test_a_cast_that_does_not_round_the_sums_of_attention_stays(source: str, target: str) -> None:
    """A result of 16 bits is rounded before it is cast."""
    module = fused(program("", "c", target, Q.replace("f32", source)))
    assert round_attention(module) is module
