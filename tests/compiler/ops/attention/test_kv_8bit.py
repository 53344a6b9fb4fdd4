"""Attention over a cache that stores keys and values in 8 bits, with a scale per token and head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.driver import compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.module import IRModule
from compiler.ir.text.lexer import ParseError
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from runtime.session import Session

LAYERS, HEADS, KV_HEADS, SIZE, PAGES = 2, 8, 2, 32, 20

PROGRAM = """
impure func main(q: f32[t, 8, 32], k: f32[t, 2, 32], v: f32[t, 2, 32], slots: i32[t], tables: i32[s, p], ids: i32[t], at: i32[t],
    cache: i8[2, 2, pages, 2, 512], scales: f32[2, 2, pages, 2, 16]) -> f32[t, 8, 32]
    where t in 0..64, s in 0..4, p in 0..8 {{
  dataflow {{
    both = kv_append(cache, k, v, slots, 1, scales)
    new = both.0
    new_scales = both.1
    out = paged_attention(q, new, tables, ids, at, 1, new_scales, scale=0.17, window={window}, softcap={softcap})
  }}
  return out
}}
"""


def module(window: int, softcap: float) -> IRModule:
    program = parse(PROGRAM.format(window=window, softcap=softcap))
    verify(program)
    return program


def arguments(rng: np.random.Generator) -> list[Any]:
    """Return the operands of a step with two sequences. The first sequence already has 5 tokens in the cache."""
    q, k, v = (rng.standard_normal((40, h, SIZE), np.float32) for h in (HEADS, KV_HEADS, KV_HEADS))
    k[3] = 0.0  # this row gets a scale of 0
    tables = np.array([[3, 5, 7], [9, 2, 1]], np.int32)
    ids = np.array([0] * 30 + [1] * 10, np.int32)
    at = np.array([*range(5, 35), *range(10)], np.int32)
    slots = (tables[ids, at // 16] * 16 + at % 16).astype(np.int32)
    cache = rng.integers(-127, 128, (LAYERS, 2, PAGES, KV_HEADS, 16 * SIZE)).astype(np.int8)
    scales = (rng.random((LAYERS, 2, PAGES, KV_HEADS, 16)) * 0.02).astype(np.float32)
    return [q, k, v, slots, tables, ids, at, cache, scales]


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (7, 2.0)])
def test_compiled_equals_the_meaning(window: int, softcap: float) -> None:
    """The compiled program rounds queries and attention weights to 16 bits, so its results differ from the interpreter's by less than the
    quantisation to 8 bits changes them."""
    program = module(window, softcap)
    given = arguments(np.random.default_rng(0))
    wanted = Interpreter(program).call("main", *given)
    session = Session(compile_module(program), device_threads=2)
    own = [a.copy() for a in given]
    np.testing.assert_allclose(session.call("main", *own), wanted, rtol=2e-5, atol=2e-4)
    session.close()
    assert not np.array_equal(own[7], given[7]) and not np.array_equal(own[8], given[8]), "the cache was not updated in place"


def test_eight_bits_are_near_the_exact_answer() -> None:
    """The step also attends to the keys and values that it appends. Its result is close to exact attention, because quantisation to 8 bits
    is the only source of error."""
    given = arguments(np.random.default_rng(1))
    q, k, v, slots, tables, _, _, cache, scales = given
    ids, at = np.zeros(40, np.int32), np.arange(40, dtype=np.int32)
    slots = (tables[0, at // 16] * 16 + at % 16).astype(np.int32)
    got = Interpreter(module(0, 0.0)).call("main", q, k, v, slots, tables, ids, at, cache, scales)
    for t in (0, 17, 39):
        for head in range(HEADS):
            score = k[: t + 1, head // 4] @ q[t, head] * np.float32(0.17)
            weight = np.exp(score - score.max())
            exact = weight @ v[: t + 1, head // 4] / weight.sum()
            assert np.abs(got[t, head] - exact).max() < 0.03


def test_an_eight_bit_cache_without_scales_is_refused() -> None:
    text = """
func main(q: f32[t, 8, 32], tables: i32[s, p], ids: i32[t], at: i32[t], cache: i8[2, 2, pages, 2, 512]) -> f32[t, 8, 32] {
  out = paged_attention(q, cache, tables, ids, at, 1, scale=0.17)
  return out
}
"""
    with pytest.raises(ParseError, match="cache is i8, and its scales are missing"):
        parse(text)
