"""Interpreting the attention node computes the formula of attention. The node can be parsed from text, and is compiled even if no schedule
accepts its operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiler.interpret.graph import Interpreter
from compiler.ir.text.parser import parse

Array = NDArray[Any]

HEADS, KV_HEADS, SIZE, FURTHEST, PAGE = 4, 2, 3, 2, 16
STARTS = np.array([0, 5, 6, 14], np.int32)
IDS = np.repeat(np.arange(3, dtype=np.int32), np.diff(STARTS))
OWN = np.concatenate([np.arange(n, dtype=np.int32) for n in np.diff(STARTS)])

OPTIONS = {"causal": "positions=at", "sinks": "sinks=sinks", "bias": "bias=bias"}


def program(source: str, options: tuple[str, ...], parameters: str) -> str:
    operands = "".join(f", {text}" for name, text in OPTIONS.items() if name in options)
    keys, held = {
        "ragged": ("ragged(keys=k, values=v, starts=starts)", "k: f32[t, 2, 3], v: f32[t, 2, 3], starts: i32[n]"),
        "paged": ("paged(cache=cache, tables=tables, layer=1)", "cache: f32[2, 2, 4, 2, 48], tables: i32[s, p]"),
    }[source]
    params = f"q: f32[t, 4, 3], {held}, ids: i32[t], at: i32[t], sinks: f32[4], bias: f32[4, 5]"
    names = ", ".join(part.split(":")[0] for part in params.split(", ") if ":" in part)
    return f"""
prim attend({params}, out o: f32[t, 4, 3]) {{
  attention(queries=q, keys={keys}, sequences=ids, out=o{operands}) {{{parameters}}}
}}

func main({params}) -> f32[t, 4, 3] {{
  dataflow {{
    o = call_tir @attend({names}) -> f32[t, 4, 3]
  }}
  return o
}}
"""


def formula(
    q: Array, k: Array, v: Array, sinks: Array, bias: Array, options: tuple[str, ...], scale: float, window: int, softcap: float
) -> Array:
    out = np.zeros_like(q)
    for t, (text, own) in enumerate(zip(IDS, OWN, strict=True)):
        at = np.arange(STARTS[text], STARTS[text + 1])
        distance = at - STARTS[text] - own
        if "causal" in options:
            visible = (distance <= 0) & (distance > -(window or len(IDS)))
            at, distance = at[visible], distance[visible]
        for h in range(HEADS):
            score = k[at, h // 2].astype(np.float64) @ q[t, h] * scale
            score = np.tanh(score / softcap) * softcap if softcap else score
            if "bias" in options:
                score = score + bias[h, np.clip(distance, -FURTHEST, FURTHEST) + FURTHEST]
            weights = np.exp(score)
            out[t, h] = weights @ v[at, h // 2] / (weights.sum() + ("sinks" in options) * np.exp(sinks[h]))
    return out


CAUSAL: list[tuple[tuple[str, ...], int, float]] = [(("causal",), 0, 0.0), (("causal", "sinks"), 3, 0.0), (("causal", "bias"), 0, 1.5)]
WHOLE: list[tuple[tuple[str, ...], int, float]] = [((), 0, 0.0), (("bias", "sinks"), 0, 2.0)]
CASES = [("ragged", *case) for case in CAUSAL + WHOLE] + [("paged", *case) for case in CAUSAL]


@pytest.mark.parametrize(("source", "options", "window", "softcap"), CASES, ids=str)
def test_every_combination_has_its_meaning(
    compute: Callable[..., Any], source: str, options: tuple[str, ...], window: int, softcap: float
) -> None:
    """Every combination of options computes the formula, also combinations that no operator produces and no schedule accepts. Examples are
    causal texts without padding, texts whose query heads share heads of keys and values, and pages with a bias."""
    rng = np.random.default_rng(4)
    q = rng.standard_normal((len(IDS), HEADS, SIZE), np.float32)
    k, v = (rng.standard_normal((len(IDS), KV_HEADS, SIZE), np.float32) for _ in range(2))
    sinks, bias = rng.standard_normal(HEADS, np.float32), rng.standard_normal((HEADS, 2 * FURTHEST + 1), np.float32)
    held: tuple[Array, ...] = (k, v, STARTS)
    if source == "paged":
        tables = np.array([[2], [0], [3]], np.int32)
        cache = np.full((2, 2, 4, KV_HEADS, PAGE * SIZE), np.nan, np.float32)
        for t, (text, own) in enumerate(zip(IDS, OWN, strict=True)):
            cache[1, 0, tables[text, 0]].reshape(KV_HEADS, SIZE, PAGE)[:, :, own] = k[t]
            cache[1, 1, tables[text, 0]].reshape(KV_HEADS, PAGE, SIZE)[:, own] = v[t]
        held = (cache, tables)
    text = program(source, options, f"scale=0.7, window={window}, softcap={softcap}")
    args = (q, *held, IDS, OWN, sinks, bias)
    wanted = formula(q, k, v, sinks, bias, options, 0.7, window, softcap)
    np.testing.assert_allclose(Interpreter(parse(text)).call("main", *args), wanted, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(compute(text, *args), wanted, rtol=2e-5, atol=1e-6)
