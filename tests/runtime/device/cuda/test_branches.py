"""A single kernel call computes queries, keys and values, rotates queries and keys, and appends keys and values to the cache. Its results
are accurate, and a token has the same bits in every batch."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.bind import bind_values
from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from runtime.session import Session
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda
from tests.runtime.device.cuda.test_products import TARGETS, random

pytestmark = [needs_pycuda, pytest.mark.gpu]

DEPTH, PAGES = 128, 9
COUNTS = (130, 64, 9, 1)  # numbers of rows: 130 rows use wide tiles, the others narrow tiles of several heights


def program(size: int, weight: str, interleaved: str) -> str:
    scale = f", weight scale: f32[{4 * size}, 1]" if weight == "i8" else ""
    given = "dequantize(w, scale)" if scale else "w"
    copied = f"m = {given}" if scale else "m = w"
    return f"""
func main(x: bf16[t, {DEPTH}], cos: f32[t, {size // 2}], sin: f32[t, {size // 2}], slots: i32[t],
          cache: bf16[2, 2, {PAGES}, 1, {16 * size}], b: f32[{4 * size}], weight w: {weight}[{4 * size}, {DEPTH}]{scale}) -> object
    where t in 0..256 {{
  dataflow {{
    {copied}
    p = linear(x, m, out_dtype="f32")
    a = add(p, b)
    r = reshape(a, shape[t, 4, {size}])
    q = slice(r, axis=1, begin=0, end=2)
    k = slice(r, axis=1, begin=2, end=3)
    v = slice(r, axis=1, begin=3, end=4)
    turned = rope(q, cos, sin, interleaved={interleaved})
    keys = rope(k, cos, sin, interleaved={interleaved})
    after = kv_append(cache, keys, v, slots, 1)
    both = (turned, after)
  }}
  return both
}}"""


@pytest.mark.covering(together=1)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("size", "weight", "interleaved"),
    [(128, "bf16", "false"), (64, "i8", "false"), (32, "bf16", "true")],
    ids=["apart", "near", "neighbours"],
)
def test_near_the_meaning_and_the_same_bits_in_every_batch(
    size: int, weight: str, interleaved: str, target: str, software_gpu: SoftwareGpu
) -> None:
    module = parse(program(size, weight, interleaved))
    executable = compile_module(module, Options(get(target)))
    assert [len(k.phases) for k in executable.meta.kernels] == [1, 1], "one kernel copies the caller's cache, the other does the rest"
    count = COUNTS[0]
    x, cos, sin, b = (
        random(i, *s, dtype=d)
        for i, (s, d) in enumerate((((count, DEPTH), "bf16"), *[((count, size // 2), "f32")] * 2, ((4 * size,), "f32")))
    )
    slots = np.random.default_rng(9).permutation(PAGES * 16)[:count].astype(np.int32)
    cache = np.zeros((2, 2, PAGES, 1, 16 * size), x.dtype)
    weights = {"w": random(5, 4 * size, DEPTH, dtype=weight)} | ({"scale": random(6, 4 * size, 1, dtype="f32")} if weight == "i8" else {})
    session = Session(executable)
    bind_values(session, executable, "main", weights)
    all_queries, all_cached = session.call("main", x, cos, sin, slots, cache.copy(), b)
    queries, cached = Interpreter(module).call("main", x, cos, sin, slots, cache.copy(), b, *weights.values())
    largest = abs(queries).max()
    np.testing.assert_allclose(all_queries, queries, rtol=1e-4, atol=1e-5 * largest)
    np.testing.assert_allclose(all_cached.astype(np.float32), cached.astype(np.float32), rtol=2**-7, atol=1e-5 * largest)
    for n in COUNTS[1:]:
        some_queries, some_cached = session.call("main", x[-n:], cos[-n:], sin[-n:], slots[-n:], cache.copy(), b)
        np.testing.assert_array_equal(some_queries, all_queries[-n:])
        pages, places = slots[-n:] // 16, slots[-n:] % 16
        as_values = (a[1, 1].reshape(PAGES, 16, size)[pages, places] for a in (some_cached, all_cached))
        as_keys = (a[1, 0].reshape(PAGES, size, 16)[pages, :, places] for a in (some_cached, all_cached))
        np.testing.assert_array_equal(*as_values)
        np.testing.assert_array_equal(*as_keys)
