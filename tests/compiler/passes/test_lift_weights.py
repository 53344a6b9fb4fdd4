"""Computations whose operands are weights alone run once, when the weights are bound."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from compiler.bind import bind_values
from compiler.driver import compile_module
from compiler.interpret.graph import Interpreter, MismatchError
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Var
from compiler.ir.graph.builder import Builder
from compiler.ir.graph.values import CallTir, MakeTuple
from compiler.ir.text.parser import parse
from compiler.ir.types import tensor
from compiler.ir.verify.module import verify
from compiler.ops.indices import BadIndex
from compiler.passes.base import Pass
from compiler.passes.lift_weights import PART_BYTES, lift_weights
from runtime.errors import ArgumentMismatch
from runtime.session import Session

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
        # Not lifted: the check that u has as many elements as the result needs would not precede it.
        f"""func step(x: f32[4], weight u: f32[n], weight v: f32[m]) -> f32[2*m] {{
              c = match_cast dim(n) to scalar[i64, 2*m]
              r = reshape(u, shape[2*m])
              y = call_tir @twice(r) -> f32[2*m]
              return y
            }} {TWICE}""",
        # Not lifted: the check that w has four elements would not precede it.
        """func step(x: f32[2, 2], weight w: f32[n]) -> f32[2, 2] {
             c = match_cast w to f32[4]
             r = reshape(w, shape[2, 2])
             y = add(x, r)
             return y
           }""",
        # Not lifted: the step checks that there is such a layer, and the call reads the number itself.
        """func step(x: f32[1], weight states: f32[2, 3, 4], weight sources: i32[1], weight layer: scalar[i64]) -> object {
             y = state_read(states, sources, layer)
             return y
           }""",
        # Not lifted: only the step sees that x and w are equally long.
        f"""func step(x: f32[n], weight w: f32[n]) -> f32[n] {{
              a = call_tir @twice(w) -> f32[n]
              y = call_tir @plus(x, a) -> f32[n]
              return y
            }} {TWICE} {ADD}""",
        # Not lifted: only the step knows the largest n.
        f"""func step(x: f32[m], weight w: f32[n]) -> f32[n] where m in 0.., n in 0..m {{
              y = call_tir @twice(w) -> f32[n]
              return y
            }} {TWICE}""",
        # Not lifted: the function has no weights.
        f"func step(x: f32[4]) -> f32[4] {{ a = call_tir @twice(x) -> f32[4] return a }} {TWICE}",
    ],
    ids=["length", "destroyed", "checked", "matched", "number", "shared", "bounded", "no weights"],
)
def test_what_each_call_must_do_stays(stays: Callable[[Pass, str], None], text: str) -> None:
    stays(lift_weights, text)


def test_a_weight_that_does_not_fit_an_input_is_refused() -> None:
    """All that the step needs of the weight is its sum, but the weight must be as long as the input."""
    module = parse("func main(x: f32[n], weight w: f32[n]) -> f32[n] { a = exp(w) s = sum(a) y = add(x, s) return y }")
    x, weights = np.zeros(4, np.float32), {"w": np.zeros(3, np.float32)}
    with pytest.raises(MismatchError, match="expected n = 4"):
        Interpreter(module).call("main", x, *weights.values())
    executable = compile_module(module)
    session = Session(executable, device_threads=1)
    bind_values(session, executable, "main", weights)
    with pytest.raises(ArgumentMismatch, match="expected n = 4, got 3"):
        session.call("main", x)
    session.close()


def test_a_preparation_has_all_weights_that_define_its_variables(becomes: Callable[[Pass, str, str], None]) -> None:
    """`a` has as many rows as `v`, so its preparation takes `v`, too. `b` stays: its preparation would take `w`, whose type mentions a
    variable of `z`."""
    spread = "prim spread(A: f32[1], out B: f32[n]) { for i in n { B[i] = A[0] } }"
    before = f"""
        func step(x: f32[1], weight u: f32[1], weight v: f32[k, 2*k], weight w: f32[l, 2*j], weight z: f32[j]) -> object {{
          a = call_tir @spread(u) -> f32[k]
          b = call_tir @spread(u) -> f32[l]
          y = (x, a, b)
          return y
        }}
        {spread}
    """
    expected = f"""
        func step(
          x: f32[1], weight u: f32[1], weight v: f32[k, 2*k], weight w: f32[l, 2*j], weight z: f32[j], weight a: f32[k]
        ) -> object {{
          b = call_tir @spread(u) -> f32[l]
          y = (x, a, b)
          return y
        }}
        {spread}
        func "step.weights.0"(u: f32[1], v: f32[k, 2*k]) -> tuple[f32[k]] {{
          dataflow {{ a = call_tir @spread(u) -> f32[k] prepared = (a) }}
          return prepared
        }}
    """
    becomes(lift_weights, before, expected)


@pytest.mark.parametrize(
    "text",
    [
        "func main(x: f32[m], weight w: f32[k]) -> f32[k] { a = exp(w) s = sum(a) y = add(x, s) return y }",
        "func main(x: f32[m], weight w: f32[k]) -> object { a = exp(w) s = sum(a) z = match_cast x to f32[k] y = add(z, s) return y }",
    ],
    ids=["annotation", "match_cast"],
)
def test_a_check_after_the_lifted_work_tests_the_variable_of_the_weight(text: str) -> None:
    module = parse(text)
    x, weights = np.zeros(4, np.float32), {"w": np.zeros(3, np.float32)}
    with pytest.raises(MismatchError, match="expected k = 3"):
        Interpreter(module).call("main", x, *weights.values())
    executable = compile_module(module)
    assert executable.preparations("main")
    session = Session(executable, device_threads=1)
    bind_values(session, executable, "main", weights)
    with pytest.raises(ArgumentMismatch, match="expected k = 3, got 4"):
        session.call("main", x)
    assert session.call("main", np.ones(3, np.float32)).tolist() == [4, 4, 4]
    session.close()


def test_a_weight_that_bounds_an_input_stays() -> None:
    """All that the step reads of the weight is its sum, but the input may be as long as the weight."""
    module = parse(f"""
        func main(x: f32[m], weight w: f32[k]) -> object where k in 0.., m in 0..k {{
          s = sum(w)
          t = call_tir @twice(x) -> f32[m]
          y = (s, t)
          return y
        }}
        {TWICE}
    """)
    executable = compile_module(module)
    session = Session(executable, device_threads=1)
    bind_values(session, executable, "main", {"w": np.ones(3, np.float32)})
    total, twice = session.call("main", np.ones(2, np.float32))
    assert total == 3
    assert twice.tolist() == [2, 2]
    with pytest.raises(ArgumentMismatch, match="m = 4 is outside its declared range 0 <= m <= 3"):
        session.call("main", np.ones(4, np.float32))
    session.close()


def test_a_weight_that_is_no_layer_is_refused() -> None:
    """Each step checks the number of the layer, so it also reads the layer. A preparation would read it before the check."""
    text = "func main(x: f32[1], weight states: f32[2, 3, 4], weight sources: i32[1], weight layer: scalar[i64]) -> object"
    module = parse(f"{text} {{ y = state_read(states, sources, layer) return y }}")
    x = np.zeros(1, np.float32)
    weights = {"states": np.zeros((2, 3, 4), np.float32), "sources": np.zeros(1, np.int32), "layer": 2}
    with pytest.raises(BadIndex, match="layer is 2, expected 0 <= layer < 2"):
        Interpreter(module).call("main", x, *weights.values())
    executable = compile_module(module)
    assert not executable.preparations("main")
    session = Session(executable, device_threads=1)
    bind_values(session, executable, "main", weights)
    with pytest.raises(ArgumentMismatch, match="layer"):
        session.call("main", x)
    session.close()


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
