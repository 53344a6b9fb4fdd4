"""`interleave_scales` stores bf16 scales behind the 4-bit weights of their group. It changes no results, and leaves other products as they
are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.backends.cpu.passes.interleave_scales import InterleaveScales
from compiler.backends.cpu.pipeline import pipeline
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.graph.deduce import type_of
from compiler.ir.graph.values import CallTir
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.types import TensorType
from compiler.ir.verify.module import verify
from compiler.machine.target import get
from compiler.passes.base import Pipeline

LINEAR = """
func main(x: f32[m, 64], q: u8[40, 32], s: bf16[40, 2]) -> object {
  dataflow { d = dequantize(q, s, bits=4, group=32) y = linear(x, d) }
  return y
}
"""
# A kernel that computes two products of the same rows.
GATED = """
func main(x: f32[m, 64], q: u8[40, 32], s: bf16[40, 2], u: u8[40, 32], t: bf16[40, 2]) -> object {
  dataflow {
    d = dequantize(q, s, bits=4, group=32) e = dequantize(u, t, bits=4, group=32)
    g = linear(x, d) h = linear(x, e) a = silu(g) y = multiply(a, h)
  }
  return y
}
"""
# The sum may overwrite the operand `b`, which comes after the weights.
ADDED = """
func main(x: f32[m, 64], q: u8[40, 32], s: bf16[40, 2], r: f32[m, 40]) -> object {
  dataflow { d = dequantize(q, s, bits=4, group=32) y = linear(x, d) b = exp(r) z = add(y, b) w = exp(z) }
  return w
}
"""
EXPERTS = """
func main(x: f32[m, 64], q: u8[3, 40, 32], s: bf16[3, 40, 2], e: i32[m]) -> object {
  dataflow { d = dequantize(q, s, bits=4, group=32) y = expert_linear(x, d, e) }
  return y
}
"""
LONG = LINEAR.replace("x: f32[m, 64], q: u8[40, 32], s: bf16[40, 2]", "x: f32[m, 1024], q: u8[40, 512], s: bf16[40, 32]")
SCALES_OF_F32 = LINEAR.replace("s: bf16", "s: f32")
LONG_GROUPS = LINEAR.replace("s: bf16[40, 2]", "s: bf16[40, 1]").replace("group=32", "group=64")


def arguments(module: IRModule) -> list[Any]:
    random, found = np.random.default_rng(3), list[Any]()
    for param in module.graph("main").params:
        type_ = type_of(param)
        assert isinstance(type_, TensorType) and type_.shape and type_.dtype
        shape = tuple(d.const if d.is_const else 5 for d in type_.shape)
        whole = {DType.U8: 256, DType.I32: 3}.get(type_.dtype)
        values = random.normal(size=shape) if whole is None else random.integers(0, whole, shape)
        found.append(values.astype(type_.dtype.numpy))
    return found


SHORT, EXPERT = ("2", "3", "1", "144"), ("3", "2", "3", "1", "144")


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        (LINEAR, [SHORT]),
        (LONG, [("4", "3", "2", "576")]),
        (GATED, [SHORT, SHORT]),
        (ADDED, [SHORT]),
        (EXPERTS, [EXPERT]),
        (SCALES_OF_F32, []),
        (LONG_GROUPS, []),
    ],
)
def test_results_stay_the_same(text: str, shapes: list[tuple[str, ...]]) -> None:
    """The pass changes no result. It moves scales behind the weights whose interleaved arrays have these `shapes`, and into no others."""
    module, passes = parse(text), pipeline(get("wasm-relaxed"))
    before, after = passes.until("pack_operands")(module), passes.until("interleave_scales")(module)
    verify(after)
    found = [
        tuple(map(str, type_.shape))
        for binding in after.graph("main").body.bindings
        if isinstance(binding.value, CallTir) and binding.value.func.startswith("interleave")
        for type_ in binding.value.out
        if isinstance(type_, TensorType) and type_.shape
    ]
    assert found == shapes
    others = Pipeline([step for step in passes.passes if not isinstance(step, InterleaveScales)])
    scheduled = [p.until("schedule_kernels")(module) for p in (others, passes)]
    for pair in ((before, after), scheduled):
        results = [Interpreter(m).call("main", *arguments(module)) for m in pair]
        np.testing.assert_array_equal(*results)


def test_native_code_reads_scales_from_their_own_buffer() -> None:
    assert not any(isinstance(step, InterleaveScales) for step in pipeline(get("x86-64-v3")).passes)
