"""`spread_rows` adds one cache line to the stride of rows that only products read. Other tensors keep their strides, and the results of the
program stay the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.backends.cpu.pipeline import pipeline
from compiler.interpret.graph import Interpreter
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.values import CallTir
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.types import TensorType
from compiler.ir.verify.module import verify
from compiler.machine.target import get

ROUNDED = """
func main(x: f32[m, 512], gate: bf16[40, 512], up: bf16[40, 512]) -> object {
  dataflow {
    a = multiply(x, x) g = linear(a, gate, tolerates="bf16") u = linear(a, up, tolerates="bf16") s = silu(g) y = multiply(s, u)
  }
  return y
}
"""
RETURNED = """
func main(x: f32[m, 512], w: bf16[40, 512]) -> object {
  dataflow { a = cast(x, dtype="bf16") y = linear(a, w, out_dtype="f32") r = (a, y) }
  return r
}
"""
QUANTISED = """
func main(x: f32[m, 1024], w: f32[40, 1024]) -> object {
  dataflow { both = quantize(w, bits=8) q = both.0 s = both.1 d = dequantize(q, s, bits=8) y = linear(x, d) }
  return y
}
"""
PLANES = QUANTISED.replace("1024", "512")
UNLIKE = ROUNDED.replace("512", "448")


def widths(module: IRModule) -> list[int]:
    """Return the row lengths of all kernel outputs whose rows were padded."""
    bindings = module.graph("main").body.bindings
    types = [t for b in bindings if isinstance(b.value, CallTir) for t in b.value.out]
    return [
        t.shape[-1].const
        for t in types
        if isinstance(t, TensorType) and t.shape and t.shape[-1].const in (512 + 32, 448 + 32, 512 + 64, 1024 + 64)
    ]


@pytest.mark.parametrize(("program", "wide"), [(ROUNDED, [544]), (RETURNED, []), (QUANTISED, [1088]), (PLANES, [576]), (UNLIKE, [])])
def test_rows_that_only_products_read(program: str, wide: list[int]) -> None:
    module = parse(program)
    passes = pipeline(get("amx"))
    before, after = passes.until("pack_operands")(module), passes.until("spread_rows")(module)
    verify(after)
    assert widths(after) == wide
    args: list[Any] = []
    for param in module.graph("main").params:
        type_ = type_of(param)
        assert isinstance(type_, TensorType) and type_.shape and type_.dtype
        shape = tuple(d.const if d.is_const else 5 for d in type_.shape)
        args.append(np.random.default_rng(0).normal(size=shape).astype(np.float32).astype(type_.dtype.numpy))
    results = [Interpreter(m).call("main", *args) for m in (before, after)]
    np.testing.assert_equal(results[0], results[1])


def test_machines_without_matrix_units_have_no_such_pass() -> None:
    assert widths(pipeline(get("avx512-bf16-amd")).until("schedule_kernels")(parse(ROUNDED))) == []
