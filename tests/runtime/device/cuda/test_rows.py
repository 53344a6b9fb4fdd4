"""Reductions along rows, and attention, on a GPU are accurate. The result of a row has the same bits whatever other rows are in the
batch."""

from __future__ import annotations

from typing import Any

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

ROWS = {
    "norm": "w = slice(x, axis=0, begin=0, end=1) y = reshape(w, shape[300]) out = rms_norm(x, y, eps=1e-5, weight_offset=0.0)",
    "softmax": "out = softmax(x)",
    "sum": "out = sum(x, axes=[1])",
    "sum down": "out = sum(x, axes=[0])",
}


@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str, software_gpu: SoftwareGpu) -> None:
    module = parse(f"func main(x: f32[n, 300]) -> object where n in 1..64 {{ dataflow {{ {ROWS[name]} }} return out }}")
    x = np.random.default_rng(0).standard_normal((5, 300)).astype(np.float32)
    session = Session(compile_module(module, Options(get("sm_80"))))
    found = session.call("main", x)
    np.testing.assert_allclose(found, Interpreter(module).call("main", x), rtol=1e-5, atol=1e-6)
    if name != "sum down":
        np.testing.assert_array_equal(session.call("main", x[:1])[0], found[0])


EMPTY = {
    "norm": "y = reshape(x, shape[0]) out = rms_norm(y, w, eps=1e-5, weight_offset=1.0)",
    "norm of each row": "out = layer_norm(x, w, w, eps=1e-5)",
    "sum": "out = sum(x, axes=[1])",
    "product of no numbers": "y = reshape(w, shape[4, 0]) out = linear(x, y)",
    "product of no columns": "y = reshape(w, shape[0, 0]) out = linear(x, y)",
}


@pytest.mark.parametrize("name", EMPTY)
def test_rows_of_no_elements(name: str, software_gpu: SoftwareGpu) -> None:
    module = parse(f"func main(x: f32[n, 0], w: f32[0]) -> object where n in 0..64 {{ dataflow {{ {EMPTY[name]} }} return out }}")
    session, w = Session(compile_module(module, Options(get("sm_80")))), np.zeros(0, np.float32)
    for n in (0, 3):
        x = np.zeros((n, 0), np.float32)
        found, expected = session.call("main", x, w), Interpreter(module).call("main", x, w)
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found, expected)


PAGES, SIZE, HEADS, KV_HEADS = 24, 24, 6, 2


def paged(kind: str, *, window: int = 0, softcap: float = 0.0) -> str:
    scales = f", scales: f32[1, 2, {PAGES}, {KV_HEADS}, 16]" if kind == "i8" else ""
    q, cache = f"f32[t, {HEADS}, {SIZE}]", f"{kind}[1, 2, {PAGES}, {KV_HEADS}, {16 * SIZE}]"
    return f"""
func main(q: {q}, cache: {cache}, tables: i32[s, p], ids: i32[t], at: i32[t], sinks: f32[{HEADS}]{scales}) -> object
    where t in 0..64, s in 0..8, p in 0..16 {{
  dataflow {{
    out = paged_attention(q, cache, tables, ids, at, 0{", scales" if scales else ""}, sinks, scale=0.2, window={window}, softcap={softcap})
  }}
  return out
}}
"""


def arguments(kind: str) -> list[NDArray[Any]]:
    """Return the inputs of attention for two sequences. Pages that belong to neither sequence hold NaN."""
    rng = np.random.default_rng(1)
    at = [300, 299, 130, 128, 127, 16, 0, 200, 5, 64, 40]
    cache = rng.standard_normal((1, 2, PAGES, KV_HEADS, 16 * SIZE))
    held = (cache * 40).clip(-127, 127).astype(np.int8) if kind == "i8" else cache.astype(np.float32)
    tables = np.stack([rng.permutation(PAGES - 1)[:19] for _ in range(2)]).astype(np.int32)[:, :19]
    if kind != "i8":
        held[:, :, PAGES - 1] = np.nan
    found: list[NDArray[Any]] = [rng.standard_normal((len(at), HEADS, SIZE)).astype(np.float32), held, tables]
    found += [np.array([i % 2 for i in range(len(at))], np.int32), np.array(at, np.int32), rng.standard_normal(HEADS).astype(np.float32)]
    return found + ([(rng.random((1, 2, PAGES, KV_HEADS, 16)) * 0.03).astype(np.float32)] if kind == "i8" else [])


@pytest.mark.parametrize(("kind", "options"), [("f32", {}), ("i8", {"window": 140, "softcap": 3.0})], ids=["plain", "variants"])
def test_a_token_has_the_same_bits_alone_and_beside_many(kind: str, options: dict[str, Any], software_gpu: SoftwareGpu) -> None:
    """A token has the same bits in a small batch, in which each split has its own block, and in a large batch, in which one block computes
    all splits of a token."""
    module = parse(paged(kind, **options).replace("p in 0..16", "p in 0..20"))
    args = arguments(kind)
    session = Session(compile_module(module, Options(get("sm_80"))))

    def run(rows: slice) -> NDArray[np.float32]:
        q, cache, tables, ids, at, *rest = args
        return session.call("main", q[rows], cache, tables, ids[rows], at[rows], *rest)

    everything = run(slice(None))
    np.testing.assert_allclose(everything, Interpreter(module).call("main", *args), rtol=1e-4, atol=1e-5)
    for rows in (slice(0, 1), slice(2, 5), slice(3, 11)):
        np.testing.assert_array_equal(run(rows), everything[rows])
