"""Computations whose operands are weights alone run once, when the weights are bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.values import CallTir, MakeTuple
from compiler.ir.text.parser import parse
from compiler.ir.types import tensor
from compiler.ir.verify.module import verify
from compiler.passes.base import Pass
from compiler.passes.lift_weights import PART_BYTES, lift_weights

TWICE = "prim twice(A: f32[n], out B: f32[n]) { for i in n { B[i] = A[i] * 2.0 } }"
ADD = "prim plus(A: f32[n], B: f32[n], out C: f32[n]) { for i in n { C[i] = A[i] + B[i] } }"


def test_prepared_values_take_the_place_of_weights(becomes: Callable[[Pass, str, str], None]) -> None:
    before = f"""
        func step(x: f32[4], weight u: f32[4], weight v: f32[4]) -> f32[4] {{
          a = call_tir @twice(u) -> f32[4]
          b = call_tir @twice(a) -> f32[4]
          y = call_tir @plus(x, b) -> f32[4]
          z = call_tir @plus(y, v) -> f32[4]
          return z
        }}
        {TWICE} {ADD}
    """
    expected = f"""
        func step(x: f32[4], weight v: f32[4], weight b: f32[4]) -> f32[4] {{
          y = call_tir @plus(x, b) -> f32[4]
          z = call_tir @plus(y, v) -> f32[4]
          return z
        }}
        {TWICE} {ADD}
        func "step.weights.0"(u: f32[4]) -> tuple[f32[4]] {{
          dataflow {{
            a = call_tir @twice(u) -> f32[4]
            b = call_tir @twice(a) -> f32[4]
            prepared = (b)
          }}
          return prepared
        }}
    """
    becomes(lift_weights, before, expected)


def test_a_reshape_of_a_weight_is_prepared_with_what_reads_it(becomes: Callable[[Pass, str, str], None]) -> None:
    before = f"""
        func step(x: f32[4], weight u: f32[2, 2]) -> f32[4] {{
          a = reshape(u, shape[4])
          b = call_tir @twice(a) -> f32[4]
          y = call_tir @plus(x, b) -> f32[4]
          return y
        }}
        {TWICE} {ADD}
    """
    expected = f"""
        func step(x: f32[4], weight b: f32[4]) -> f32[4] {{
          y = call_tir @plus(x, b) -> f32[4]
          return y
        }}
        {TWICE} {ADD}
        func "step.weights.0"(u: f32[2, 2]) -> tuple[f32[4]] {{
          dataflow {{
            a = reshape(u, shape[4])
            b = call_tir @twice(a) -> f32[4]
            prepared = (b)
          }}
          return prepared
        }}
    """
    becomes(lift_weights, before, expected)


def test_shapes_are_no_weights(stays: Callable[[Pass, str], None]) -> None:
    """A computation whose result is a shape is not lifted, because prepared values are stored in a file of tensors, which has no place for
    shapes."""
    stays(lift_weights, "func step(x: f32[4], weight s: i64[2]) -> object { a = tensor_to_shape(s) return a }")


def test_a_weight_that_alone_defines_a_dimension_stays(becomes: Callable[[Pass, str, str], None]) -> None:
    before = """
        func step(x: f32[4], weight u: f32[n]) -> f32[2*n] {
          a = call_tir @double(u) -> f32[2*n]
          b = call_tir @shift(a, n) -> f32[2*n]
          return b
        }
        prim double(A: f32[n], out B: f32[2*n]) { for i in 2*n { B[i] = A[i // 2] } }
        prim shift(A: f32[m], n: dim, out B: f32[m]) { for i in m { B[i] = A[i] + cast(f32, dim(n)) } }
    """
    expected = """
        func step(x: f32[4], weight u: f32[n], weight a: f32[2*n]) -> f32[2*n] {
          b = call_tir @shift(a, n) -> f32[2*n]
          return b
        }
        prim double(A: f32[n], out B: f32[2*n]) { for i in 2*n { B[i] = A[i // 2] } }
        prim shift(A: f32[m], n: dim, out B: f32[m]) { for i in m { B[i] = A[i] + cast(f32, dim(n)) } }
        func "step.weights.0"(u: f32[n]) -> tuple[f32[2*n]] {
          dataflow { a = call_tir @double(u) -> f32[2*n] prepared = (a) }
          return prepared
        }
    """
    becomes(lift_weights, before, expected)


def test_prepared_values_of_one_name_are_told_apart() -> None:
    """Prepared values get different names, because they are bound by name. A pass numbers its new values from 0, so without care they would
    repeat names of the program."""
    builder = Builder(parse(TWICE + ADD))
    four = tensor([4], DType.F32)
    x, u = Var("x", four), Var("u", four)
    with builder.function("step", [x, u], num_inputs=1):
        a, b, c = (builder.emit(CallTir("twice", (w,), (four,)), "v0") for w in (u, u, u))
        y = builder.emit(CallTir("plus", (a, b), (four,)), "u")
        z = builder.emit(CallTir("plus", (x, y), (four,)))
        builder.returns(builder.emit(MakeTuple((z, a, c))))
    lifted = lift_weights(builder.finish())
    verify(lifted)
    assert [w.name for w in lifted.graph("step").weights] == ["v0", "u_1", "v0_1"]


@pytest.mark.parametrize(
    "text",
    [
        # Not lifted: the length n of the result differs from call to call.
        """func step(x: f32[n], weight w: f32[1]) -> f32[n] { y = call_tir @spread(w) -> f32[n] return y }
           prim spread(A: f32[1], out B: f32[n]) { for i in n { B[i] = A[0] } }""",
        # Not lifted: each step overwrites the value of `a`, so each step must compute `a` anew.
        f"""func step(x: f32[4], weight w: f32[4]) -> f32[4] {{
              a = call_tir @twice(w) -> f32[4]
              v = reshape(a, shape[4])
              y = call_tir_inplace @plus(v, x) [0] -> f32[4]
              return y
            }} {TWICE} {ADD.replace("{ for", "attrs {inplace=[[0, 2]]} { for")}""",
        # Not lifted: the function has no weights.
        f"func step(x: f32[4]) -> f32[4] {{ a = call_tir @twice(x) -> f32[4] return a }} {TWICE}",
    ],
    ids=["length", "destroyed", "no weights"],
)
def test_what_each_call_must_do_stays(stays: Callable[[Pass, str], None], text: str) -> None:
    stays(lift_weights, text)


def test_parts_have_a_limit_and_a_shared_value_holds_them_together(becomes: Callable[[Pass, str, str], None]) -> None:
    half = f"f32[{PART_BYTES // 8}]"
    twice, plus = (text.replace("f32[n]", half).replace("in n", f"in {PART_BYTES // 8}") for text in (TWICE, ADD))
    before = f"""
        func step(x: {half}, weight u: {half}, weight v: {half}, weight w: {half}) -> {half} {{
          a = call_tir @twice(u) -> {half}
          b = call_tir @twice(v) -> {half}
          c = call_tir @twice(a) -> {half}
          d = call_tir @twice(a) -> {half}
          e = call_tir @twice(w) -> {half}
          y0 = call_tir @plus(x, b) -> {half}
          y1 = call_tir @plus(y0, a) -> {half}
          y2 = call_tir @plus(y1, c) -> {half}
          y3 = call_tir @plus(y2, d) -> {half}
          y4 = call_tir @plus(y3, e) -> {half}
          return y4
        }}
        {twice} {plus}
    """
    expected = f"""
        func step(x: {half}, weight a: {half}, weight c: {half}, weight d: {half}, weight b: {half}, weight e: {half}) -> {half} {{
          y0 = call_tir @plus(x, b) -> {half}
          y1 = call_tir @plus(y0, a) -> {half}
          y2 = call_tir @plus(y1, c) -> {half}
          y3 = call_tir @plus(y2, d) -> {half}
          y4 = call_tir @plus(y3, e) -> {half}
          return y4
        }}
        {twice} {plus}
        func "step.weights.0"(u: {half}) -> tuple[{half}, {half}, {half}] {{
          dataflow {{
            a = call_tir @twice(u) -> {half}
            c = call_tir @twice(a) -> {half}
            d = call_tir @twice(a) -> {half}
            prepared = (a, c, d)
          }}
          return prepared
        }}
        func "step.weights.1"(v: {half}, w: {half}) -> tuple[{half}, {half}] {{
          dataflow {{
            b = call_tir @twice(v) -> {half}
            e = call_tir @twice(w) -> {half}
            prepared = (b, e)
          }}
          return prepared
        }}
    """
    becomes(lift_weights, before, expected)
