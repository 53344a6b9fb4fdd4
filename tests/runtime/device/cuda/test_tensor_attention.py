"""Attention over bf16 pages on tensor cores, in every variant that models use. Results are close to the interpreter's, and a token has the
same bits alone, in a chunk of its prompt, and in a batch with other sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from runtime.session import Session
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda

pytestmark = [needs_pycuda, pytest.mark.gpu]

PAGES = 40
# (sequence, position) of each token: a chunk with more tokens than one block computes, whose later tokens attend to one more split; a short
# prompt; a decode step; and another token of the short prompt, which is not adjacent to the others.
ROWS = (*((0, 250 + i) for i in range(11)), (1, 5), (1, 6), (2, 130), (1, 7))


@dataclass(frozen=True)
class Case:
    heads: int = 8
    kv_heads: int = 2
    size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    value_size: int = 0  # if not 0, pages have only keys, and values are their beginnings
    rows: tuple[tuple[int, int], ...] = ROWS
    infinite_key: bool = False  # whether the first key of the first sequence has an infinite element; its rows are then NaN
    infinite: bool = False  # whether the last value vector of the first sequence has an infinite element; earlier tokens must not read it

    @property
    def program(self) -> str:
        given, taken = (f", sinks: f32[{self.heads}]", ", sinks") if self.sinks else ("", "")
        halves = 1 if self.value_size else 2
        q, cache = f"f32[t, {self.heads}, {self.size}]", f"bf16[2, {halves}, {PAGES}, {self.kv_heads}, {16 * self.size}]"
        attributes = f"scale={self.size**-0.5}, window={self.window}, softcap={self.softcap}, value_size={self.value_size}"
        return f"""
func main(q: {q}, cache: {cache}, tables: i32[s, p], ids: i32[t], at: i32[t]{given}) -> object
    where t in 0..64, s in 0..4, p in 0..{PAGES} {{
  dataflow {{
    out = paged_attention(q, cache, tables, ids, at, 1{taken}, {attributes})
  }}
  return out
}}
"""

    def arguments(self) -> list[Any]:
        """Return the operands of a step. Keys and values that no token may attend to are NaN: those in pages of no sequence, and those
        after the last position of each sequence."""
        rng = np.random.default_rng(3)
        pages = np.full((2, 2, PAGES, self.kv_heads, 16 * self.size), np.nan, ml_dtypes.bfloat16)
        last_of = {s: max(at for other, at in self.rows if other == s) for s, _ in self.rows}
        tables, free = np.zeros((3, max(last_of.values()) // 16 + 1), np.int32), iter(rng.permutation(np.arange(1, PAGES)))
        for sequence, last in last_of.items():
            count = last // 16 + 1
            for n in range(count):
                page = tables[sequence, n] = next(free)
                held = min(16, last + 1 - 16 * n)
                keys, values = (rng.standard_normal((2, self.kv_heads, *shape)) for shape in ((self.size, held), (held, self.size)))
                pages[:, 0, page].reshape(2, self.kv_heads, self.size, 16)[..., :held] = keys
                pages[:, 1, page].reshape(2, self.kv_heads, 16, self.size)[:, :, :held] = values
                if self.infinite and (sequence, n) == (0, count - 1):
                    pages[:, 1, page].reshape(2, self.kv_heads, 16, self.size)[:, :, held - 1, 3] = np.inf
        if self.infinite_key:
            pages[:, 0, tables[0, 0]].reshape(2, self.kv_heads, self.size, 16)[:, :, 3, 0] = np.inf
        pages = pages[:, :1] if self.value_size else pages
        ids, at = np.array(self.rows, np.int32).T.copy()
        queries = rng.standard_normal((len(self.rows), self.heads, self.size), np.float32)
        return [queries, pages, tables, ids, at, *([rng.standard_normal(self.heads).astype(np.float32)] if self.sinks else [])]


CASES = [
    Case(infinite=True),
    Case(heads=6, kv_heads=1, window=20, sinks=True),
    Case(heads=10, size=128, softcap=3.0),
    Case(16, 1, 80, value_size=64),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_near_the_meaning_and_the_same_bits_in_every_batch(case: Case, software_gpu: SoftwareGpu) -> None:
    module = parse(case.program)
    executable = compile_module(module, Options(get("sm_80")))
    launches = [len(k.phases) for k in executable.meta.kernels if "clamp_indices" not in k.name]
    assert launches == [1], "expected one launch of attention"
    session, args = Session(executable), case.arguments()

    def run(rows: slice) -> NDArray[np.float32]:
        q, cache, tables, ids, at, *sinks = args
        return session.call("main", q[rows], cache, tables, ids[rows], at[rows], *sinks)

    together = run(slice(None))
    meaning = Interpreter(module).call("main", *args)
    np.testing.assert_allclose(together, meaning, atol=1.2e-2)  # queries and attention weights are rounded to bf16; bound: 3 * 2^-8
    last = len(ROWS)
    for rows in (slice(0, 1), slice(10, 13), slice(13, 14), slice(1, 11), slice(5, last)):
        np.testing.assert_array_equal(run(rows), together[rows])
