"""Scans on a GPU: the results and states of sequences are those of the interpreter, and do not depend on how a prompt is cut into steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from runtime.session import Session
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda

pytestmark = [needs_pycuda, pytest.mark.gpu]

HEADS, KEYS, ROWS, SIZE, TOKENS = 2, 1, 6, 64, 5
SCAN = f"""
func main(states: f32[1, pages, {HEADS * ROWS * SIZE}], q: f32[t, {KEYS}, {ROWS}], k: f32[t, {KEYS}, {ROWS}], v: f32[t, {HEADS}, {SIZE}],
    decay: f32[t, {HEADS}], sources: i32[s], starts: i32[s + 1], saved: i32[m], places: i32[m], beta: f32[t, {HEADS}]) -> object
    where t in 0..16, s in 0..4, m in 0..8, pages in 1..8 {{
  dataflow {{ y = state_scan(states, q, k, v, decay, sources, starts, saved, places, 0, beta) }}
  return y
}}
"""


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def test_a_sequence_that_is_cut_has_the_bits_of_one_that_is_not(software_gpu: SoftwareGpu) -> None:
    """Beside another sequence, a sequence begins with zeros. Later it goes on from the state that was saved after its third token."""
    rng, module = np.random.default_rng(0), parse(SCAN)
    states = rng.standard_normal((1, 4, HEADS * ROWS * SIZE), np.float32)
    q, k = (rng.standard_normal((TOKENS + 1, KEYS, ROWS), np.float32) for _ in range(2))
    v = rng.standard_normal((TOKENS + 1, HEADS, SIZE), np.float32)
    decay, beta = (rng.random((TOKENS + 1, HEADS), np.float32) for _ in range(2))
    lists = ints(0, 3), ints(0, TOKENS, TOKENS + 1), ints(2, TOKENS - 1, TOKENS), ints(1, 2, 3)
    session = Session(compile_module(module, Options(get("sm_80"))))
    out, left = session.call("main", states.copy(), q, k, v, decay, *lists, beta)
    expected, kept = Interpreter(module).call("main", states.copy(), q, k, v, decay, *lists, beta)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(left, kept, rtol=1e-5, atol=1e-5)
    rest = (x[3:TOKENS] for x in (q, k, v, decay))
    later, after = session.call("main", np.array(left), *rest, ints(1), ints(0, 2), ints(1), ints(2), beta[3:TOKENS])
    np.testing.assert_array_equal(later, out[3:TOKENS])
    np.testing.assert_array_equal(after[:, 2], left[:, 2])
