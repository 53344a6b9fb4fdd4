"""Attention in texts of different lengths is near the interpreter's. A text has the same bits among long texts, whose tiles have several
vectors, and among short ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.backends.cpu.schedule.attention.ragged import LONG
from compiler.interpret.graph import Interpreter
from compiler.ir.text.parser import parse
from compiler.machine.target import Target, get, host
from runtime.session import Session

HEADS, SIZE = 3, 20
TARGETS = [host(), *(target for name in ("x86-64-v3", "avx512") if (target := get(name)).can_run_here)]
LONG_TEXTS = ((200,), (3 * LONG, 1, 2 * LONG + 5), (LONG,), (1, 4 * LONG + 33))
SHORT_TEXTS = ((1,), (5, 16, 17, 3), (LONG - 1,), (40,) * 7)


def program(*, bias: bool) -> str:
    each = f"f32[t, {HEADS}, {SIZE}]"
    given, taken = (f", b: f32[{HEADS}, 9]", ", b") if bias else ("", "")
    return f"""
func main(q: {each}, k: {each}, v: {each}, ids: i32[t], starts: i32[s]{given}) -> {each} where t in 0..2048, s in 1..64 {{
  dataflow {{
    out = ragged_attention(q, k, v, ids, starts{taken}, scale=0.3)
  }}
  return out
}}
"""


def arguments(rows: Sequence[NDArray[np.float32]], lengths: Sequence[int], *, bias: bool) -> list[Any]:
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    table = np.random.default_rng(5).standard_normal((HEADS, 9), np.float32)
    return [*rows, ids, np.cumsum([0, *lengths]).astype(np.int32), *([table] * bias)]


def drawn(count: int, seed: int) -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((count, HEADS, SIZE), np.float32) for _ in range(3)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_near_the_meaning(session_of: Callable[[str, Target, int], Session], target: Target, bias: bool) -> None:
    session, interpreter = session_of(program(bias=bias), target, 2), Interpreter(parse(program(bias=bias)))
    for lengths in (*LONG_TEXTS, *SHORT_TEXTS):
        args = arguments(drawn(sum(lengths), len(lengths)), lengths, bias=bias)
        np.testing.assert_allclose(session.call("main", *args), interpreter.call("main", *args), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_text_has_the_same_bits_among_long_and_short_ones(session_of: Callable[[str, Target, int], Session], target: Target) -> None:
    session = session_of(program(bias=False), target, 2)
    for length in (1, 15, LONG - 1, LONG, 200):
        own = drawn(length, length)
        alone = session.call("main", *arguments(own, (length,), bias=False))
        for before, after in (((600,), ()), ((3,) * 50, (5,)), ((), (LONG * 3,)), ((7, 2), (1,) * 40)):
            rows = [np.concatenate([a, x, b]) for a, x, b in zip(drawn(sum(before), 1), own, drawn(sum(after), 2), strict=True)]
            found = session.call("main", *arguments(rows, (*before, length, *after), bias=False))
            np.testing.assert_array_equal(found[sum(before) : sum(before) + length], alone)
