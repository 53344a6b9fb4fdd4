"""The schedules of `group_rows` and of short rows compute what the operators mean, for any number of rows."""

from __future__ import annotations

import numpy as np
import pytest

import compiler.ops
from compiler.backends.cuda.pipeline import pipeline
from compiler.interpret.graph import Interpreter
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from compiler.machine.target import get

assert compiler.ops

GROUPS = "func main(e: i32[t, 3]) -> object where t in 0..400 { dataflow { y = group_rows(e, count=5) } return y }"
SPARSE = """
func main(x: f32[t, 6], numbers: i32[6]) -> object where t in 0..400 {
  dataflow {
    a = top_experts(x, k=1)
    top = gather(x, a, axis=1)
    is_best = equal(numbers, a)
    d = subtract(top, x)
    m = abs(x)
    near = divide(d, m)
    s = softmax(near)
    z = where(is_best, s, x)
    b = top_experts(z, k=1)
    out = (a, b, z)
  }
  return out
}"""


def scheduled(text: str) -> IRModule:
    module = pipeline(get("sm_80")).until("schedule_kernels")(parse(text))
    verify(module)
    return module


@pytest.mark.parametrize("rows", [1, 2, 128, 171, 400])
def test_rows_are_grouped(rows: int) -> None:
    module = scheduled(GROUPS)
    assert [prim.attrs["schedule"] for prim in module.prim_functions.values()] == ["grouping"]
    e = np.random.default_rng(rows).integers(-1, 7, (rows, 3)).astype(np.int32)
    for found, meant in zip(*(Interpreter(m).call("main", e) for m in (module, parse(GROUPS))), strict=True):
        np.testing.assert_array_equal(found, meant)


def test_experts_that_are_chosen_one_after_another_are_one_launch() -> None:
    """As SparseMixer chooses them."""
    module = scheduled(SPARSE)
    assert [prim.attrs["schedule"] for prim in module.prim_functions.values()] == ["small rows"]
    x, numbers = np.random.default_rng(0).standard_normal((9, 6)).astype(np.float32), np.arange(6, dtype=np.int32)
    found, meant = (Interpreter(m).call("main", x, numbers) for m in (module, parse(SPARSE)))
    for a, b in zip(found, meant, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
