"""Attention on a GPU with several blocks per token: the block that finishes last combines the results of all blocks. The bits are those of
a computation by a single block."""

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

HEADS, SIZE, PAGES = 4, 16, 40
PROGRAM = f"""
func main(q: f32[t, {HEADS}, {SIZE}], cache: f32[1, 2, {PAGES}, 2, {16 * SIZE}], tables: i32[s, p], ids: i32[t], at: i32[t]) -> object
    where t in 0..16, s in 0..4, p in 0..{PAGES} {{
  dataflow {{
    out = paged_attention(q, cache, tables, ids, at, 0, scale=0.25, window=0, softcap=0.0)
  }}
  return out
}}
"""


def arguments() -> list[Any]:
    """Return the inputs for nine tokens whose keys fill one to five splits."""
    rng = np.random.default_rng(3)
    cache = rng.standard_normal((1, 2, PAGES, 2, 16 * SIZE), np.float32)
    at = np.array([599, 3, 127, 128, 300, 598, 255, 256, 411], np.int32)
    tables = rng.permutation(PAGES).astype(np.int32)[None]
    return [rng.standard_normal((9, HEADS, SIZE), np.float32), cache, tables, np.zeros(9, np.int32), at]


def test_splits_side_by_side_have_the_bits_of_splits_in_a_row(software_gpu: SoftwareGpu) -> None:
    """The result has the same bits whether each split of a token has its own block (up to eight tokens) or one block computes all splits of
    a token (nine tokens). After each run the counters of finished blocks are zero again."""
    module = parse(PROGRAM)
    executable = compile_module(module, Options(get("sm_80")))
    launches = [len(k.phases) for k in executable.meta.kernels if "clamp_indices" not in k.name]
    assert launches == [1], "expected one launch of attention"
    session, (q, cache, tables, ids, at) = Session(executable), arguments()
    in_a_row = session.call("main", q, cache, tables, ids, at)
    np.testing.assert_allclose(in_a_row, Interpreter(module).call("main", q, cache, tables, ids, at), rtol=1e-4, atol=1e-5)
    for rows in (slice(0, 8), slice(0, 1), slice(3, 6), slice(1, 9)):
        np.testing.assert_array_equal(session.call("main", q[rows], cache, tables, ids[rows], at[rows]), in_a_row[rows])
