"""Attention on a GPU, in every variant that models use, gives results close to the interpreter's. The output of a token has the same bits
alone as in a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import compiler.ops
from compiler.backends.cuda.pipeline import pipeline
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from compiler.machine.target import get

assert compiler.ops

PAGES, KV_HEADS = 8, 2


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kind: str = "f32"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    size: int = 4
    value_size: int = 0  # if not 0, pages have only keys, and values are their beginnings
    columns: bool = False  # positions have the first and the last position that a token sees

    @property
    def program(self) -> str:
        scales = f", scales: f32[2, 2, {PAGES}, {KV_HEADS}, 16]" if self.kind == "i8" else ""
        sinks = f", sinks: f32[{self.heads}]" if self.sinks else ""
        extra = (", scales" if scales else "") + (", sinks" if sinks else "")
        q, cache = f"f32[t, {self.heads}, {self.size}]", f"{self.kind}[2, {self.halves}, {PAGES}, {KV_HEADS}, {16 * self.size}]"
        attributes = f"scale=0.2, window={self.window}, softcap={self.softcap}, value_size={self.value_size}"
        return f"""
func main(q: {q}, cache: {cache}, tables: i32[s, p], ids: i32[t], at: i32[t{", 2" if self.columns else ""}]{scales}{sinks}) -> object
    where t in 0..64, s in 0..8, p in 0..8 {{
  dataflow {{
    out = paged_attention(q, cache, tables, ids, at, 1{extra}, {attributes})
  }}
  return out
}}
"""

    @property
    def halves(self) -> int:
        return 1 if self.value_size else 2


CASES = [
    Case(),
    Case(kind="i8", softcap=3.0),
    Case(window=9, sinks=True),
    Case(heads=2, window=1),
    Case(kind="bf16", size=16, heads=6, softcap=3.0),
    Case(kind="bf16", size=32, window=9, sinks=True),
    Case(columns=True),
    Case(kind="bf16", size=16, columns=True),
]


def arguments(case: Case) -> list[Any]:
    rng = np.random.default_rng(1)
    rows = [(0, 30), (1, 0), (1, 1), (0, 15), (0, 16)]
    ids, at = np.array(rows, np.int32).T.copy()
    cache = rng.standard_normal((2, 2, PAGES, KV_HEADS, 16 * case.size))
    held = (cache * 40).clip(-127, 127).astype(np.int8) if case.kind == "i8" else cache.astype(DType(case.kind).numpy)
    args: list[Any] = [rng.standard_normal((len(rows), case.heads, case.size), np.float32), held]
    if case.columns:
        at = np.stack([np.maximum(at - 8, 0), at | 3], 1)
    args += [np.array([[3, 1], [5, 0]], np.int32), ids, at]
    if case.kind == "i8":
        args.append((rng.random((2, 2, PAGES, KV_HEADS, 16)) * 0.03).astype(np.float32))
    return args + [rng.standard_normal(case.heads).astype(np.float32)] * case.sinks


def attention_in(module: IRModule) -> PrimFunc:
    """Return the kernel of attention. Others make safe copies of its indices."""
    (prim,) = (prim for name, prim in module.prim_functions.items() if "clamp_indices" not in name)
    return prim


@pytest.mark.parametrize("case", CASES, ids=str)
def test_near_the_meaning_and_the_same_bits_alone(case: Case) -> None:
    module = pipeline(get("sm_80")).until("schedule_kernels")(parse(case.program))
    verify(module)
    prim = attention_in(module)
    rounds = case.kind == "bf16"  # queries and attention weights are rounded to bf16
    assert prim.attrs["schedule"] == ("tensor attention" if rounds else "attention")
    args = arguments(case)

    def run(m: Any, rows: slice) -> NDArray[np.float32]:
        q, cache, tables, ids, at, *rest = (a.copy() for a in args)
        return Interpreter(m).call("main", q[rows], cache, tables, ids[rows], at[rows], *rest)

    everything = slice(None)
    found = run(module, everything)
    np.testing.assert_allclose(found, run(parse(case.program), everything), rtol=1e-5, atol=6e-3 if rounds else 1e-5)
    for row in (0, 1, 4):  # a token that sees two pages, one that sees a single key, and one whose second page has a single key
        np.testing.assert_array_equal(run(module, slice(row, row + 1))[0], found[row])


LONG = [
    Case(kind="bf16", size=16),
    Case(kind="bf16", size=32, window=9, sinks=True),
    Case(kind="bf16", size=192, softcap=3.0),
    Case(kind="bf16", size=128, value_size=128),
    Case(kind="bf16", size=128, value_size=128, heads=6),  # three heads in a block do not divide its rows
]


@pytest.mark.parametrize("case", LONG, ids=str)
def test_long_runs_by_wgmma_are_near_the_meaning(case: Case) -> None:
    """The interpreter runs both launches: a chunk of a prompt is in the first one, a decode step in the second one."""
    module = pipeline(get("sm_90a")).until("schedule_kernels")(parse(case.program))
    verify(module)
    assert attention_in(module).attrs["schedule"] == "warpgroup attention"
    rng = np.random.default_rng(3)
    ids, at = np.array([*((0, 10 + i) for i in range(11)), (1, 5)], np.int32).T.copy()
    cache = rng.standard_normal((2, case.halves, PAGES, KV_HEADS, 16 * case.size)).astype(DType("bf16").numpy)
    args = [rng.standard_normal((len(ids), case.heads, case.size), np.float32), cache, np.array([[3, 1], [5, 0]], np.int32), ids, at]
    args += [rng.standard_normal(case.heads).astype(np.float32)] * case.sinks
    found, expected = (Interpreter(m).call("main", *(a.copy() for a in args)) for m in (module, parse(case.program)))
    np.testing.assert_allclose(found, expected, atol=1.2e-2)  # queries and attention weights are rounded to bf16; bound: 3 * 2^-8


@pytest.mark.parametrize("bias", [False, True])
def test_concatenated_texts_are_near_the_meaning(bias: bool) -> None:
    """Attention over concatenated texts and over pages is scheduled by the same code, both for up to FEW tokens and for more."""
    given, taken = (", b: f32[2, 9]", ", b") if bias else ("", "")
    program = f"""
func main(q: f32[t, 2, 3], k: f32[t, 2, 3], v: f32[t, 2, 3], ids: i32[t], starts: i32[s]{given}) -> f32[t, 2, 3]
    where t in 0..64, s in 1..8 {{
  dataflow {{
    out = ragged_attention(q, k, v, ids, starts{taken}, scale=0.3)
  }}
  return out
}}
"""
    module = pipeline(get("sm_80")).until("schedule_kernels")(parse(program))
    verify(module)
    rng = np.random.default_rng(2)
    for lengths in ((3, 7), (4, 2), (1,)):
        count = sum(lengths)
        args = [rng.standard_normal((count, 2, 3), np.float32) for _ in range(3)]
        args += [np.repeat(np.arange(len(lengths), dtype=np.int32), lengths), np.cumsum([0, *lengths]).astype(np.int32)]
        args += [rng.standard_normal((2, 9), np.float32)] * bias
        found, expected = (Interpreter(m).call("main", *(a.copy() for a in args)) for m in (module, parse(program)))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_heads_that_tensor_cores_do_not_take_are_computed_in_f32() -> None:
    prim = attention_in(pipeline(get("sm_80")).until("schedule_kernels")(parse(Case(kind="bf16", size=24).program)))
    assert prim.attrs["schedule"] == "attention"
