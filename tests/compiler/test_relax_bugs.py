"""Bugs that users reported in Apache TVM's implementation of Relax do not occur here. The numbers in test names are those of issues at
apache/tvm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiler.backends.cpu.pipeline import pipeline
from compiler.driver import compile_module
from compiler.ir.dims import Dim
from compiler.ir.errors import CompileError
from compiler.ir.graph.function import Body, If
from compiler.ir.graph.values import Alloc, CallTir, MatchCast
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.types import TensorType
from compiler.ir.verify.module import verify
from compiler.machine.target import host
from compiler.passes.fusion.fuse import fuse
from compiler.passes.legalize import legalize
from runtime.errors import ArgumentMismatch, BoundExceeded
from runtime.session import Session

Compute = Callable[..., Any]


def f32(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def planned(text: str) -> IRModule:
    return pipeline(host())(parse(text))


def allocations(body: Body) -> list[Alloc]:
    found: list[Alloc] = []
    for binding in body.bindings:
        if isinstance(binding.value, Alloc):
            found.append(binding.value)
        if isinstance(binding.value, If):
            found += allocations(binding.value.then) + allocations(binding.value.orelse)
    return found


# --- 1: aliases and the planner ----------------------------------------------------------------------------------------

ALIAS = """
func main(x: f32[n, 16]) -> object {
  a = softmax(x)
  b = match_cast a to f32[m, 16]
  c = softmax(b)
  d = softmax(c)
  e = softmax(d)
  s = add(e, b)
  return s
}
"""


def test_bug_20190_planner_respects_match_cast_alias(compute: Compute) -> None:
    """The memory of `a` is not reused while the alias `b` of `a` is still read, although `a` itself is not used any more."""
    x = f32(5, 16)
    result = compute(ALIAS, x)
    assert not np.allclose(result, compute(ALIAS.replace("add(e, b)", "add(e, e)"), x))


def test_bug_20190_planner_respects_views_and_tuples(compute: Compute) -> None:
    program = """
    func main(x: f32[n, 16]) -> object {
      a = softmax(x)
      flat = reshape(a, shape[16*n])
      pair = (flat, x)
      c = softmax(x)
      d = softmax(c)
      e = softmax(d)
      back = pair.0
      again = reshape(back, shape[n, 16])
      s = add(e, again)
      return s
    }
    """
    compute(program, f32(6, 16))


# --- 2: wrong values in the default pipeline -----------------------------------------------------------------------------


def test_bug_20207_match_cast_then_split(compute: Compute) -> None:
    program = """
    func main(x: f32[n, 8]) -> object {
      y = tanh(x)
      z = match_cast y to f32[m, 8]
      parts = split(z, axis=1, sizes=[3, 5])
      a = parts.0
      b = parts.1
      e = exp(a)
      s = softmax(b)
      r = concat(s, e, axis=1)
      return r
    }
    """
    x = f32(7, 8)
    y = np.tanh(x)
    s = np.exp(y[:, 3:]) / np.exp(y[:, 3:]).sum(1, keepdims=True)
    np.testing.assert_allclose(compute(program, x), np.concatenate([s, np.exp(y[:, :3])], 1), rtol=1e-5)


def test_bug_17835_the_default_pipeline_computes_what_the_program_says(compute: Compute) -> None:
    """A value that is read again after several operators is still intact, although these operators are fused and memory is planned."""
    program = """
    func main(x: f32[n, 32], w: f32[32, 32]) -> object {
      a = matmul(x, w)
      b = relu(a)
      c = matmul(b, w)
      d = add(c, a)
      e = softmax(d)
      r = multiply(e, b)
      return r
    }
    """
    for rows in (1, 3, 17):
        compute(program, f32(rows, 32), f32(32, 32), rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 3, 4, 4), (2, 1, 1, 5), (1, 1, 1, 1), (3, 16, 2, 1)])
def test_bug_20036_batch_norm_of_any_shape(compute: Compute, shape: tuple[int, ...]) -> None:
    program = """
    func main(x: f32[b, c, h, w], mean: f32[c], variance: f32[c], scale: f32[c], bias: f32[c]) -> object {
      m = expand_dims(mean, axes=[1, 2])
      v = expand_dims(variance, axes=[1, 2])
      s = expand_dims(scale, axes=[1, 2])
      o = expand_dims(bias, axes=[1, 2])
      centred = subtract(x, m)
      stable = add(v, 1.0e-5)
      inverse = rsqrt(stable)
      normal = multiply(centred, inverse)
      scaled = multiply(normal, s)
      y = add(scaled, o)
      return y
    }
    """
    c = shape[1]
    compute(program, f32(*shape), f32(c), np.abs(f32(c)) + 0.1, f32(c), f32(c))


# --- 3: branches and the planner -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [True, False])
def test_bug_20191_branches_share_no_storage_variable(compute: Compute, taken: bool) -> None:
    program = """
    func main(c: bool[], x: f32[n, 16]) -> object {
      r: f32[n, 16] = if c {
        a = softmax(x)
        b = softmax(a)
        return b
      } else {
        d = softmax(x)
        e = softmax(d)
        f = softmax(e)
        return f
      }
      s = softmax(r)
      return s
    }
    """
    verify(planned(program))
    compute(program, np.asarray(taken), f32(9, 16))


# --- 4: symbolic variables are dependencies ------------------------------------------------------------------------------

REORDER = """
func main(x: f32[n, 4], y: f32[...]) -> object {
  dataflow {
    a = exp(x)
    z = match_cast y to f32[m, 4]
    w = call_tir @spread(x) -> f32[m, 4]
    u = add(w, z)
    v = exp(u)
  }
  r = (v, a)
  return r
}

prim spread(A: f32[n, b], out B: f32[m, b]) where n in 1.. {
  for i in m, j in b { B[i, j] = A[i % n, j] }
}
"""


def test_bug_20195_fusion_keeps_a_call_behind_the_match_cast_that_defines_its_shape(compute: Compute) -> None:
    module = fuse(legalize(parse(REORDER)))
    verify(module)
    bindings = module.graph("main").body.bindings
    cast = next(i for i, b in enumerate(bindings) if isinstance(b.value, MatchCast))
    mentions = [i for i, b in enumerate(bindings) if isinstance(b.value, CallTir) and "m" in str(b.var.type)]
    assert mentions and min(mentions) > cast
    compute(REORDER, f32(3, 4), f32(5, 4))


def test_bug_20177_data_dependent_lengths_flow_through_fusion(compute: Compute) -> None:
    program = """
    func main(x: f32[n]) -> object {
      found = call_library "unique"(x) -> f32[ndim=1]
      u = match_cast found to f32[k]
      a = multiply(u, 2.0)
      b = exp(a)
      c = expand_dims(b, axes=[0])
      d = softmax(c)
      return d
    }
    """
    compute(program, np.array([0.5, 0.1, 0.5, -0.3], np.float32))


# --- 5: every variable of a fused function is bound ----------------------------------------------------------------------


def test_bug_20238_variables_that_no_operand_defines_are_passed(compute: Compute) -> None:
    """Variables that occur only in expressions in the operands' shapes, here h*w, are passed to the kernel."""
    program = """
    func main(x: f32[h*w, 4], s: shape[h, w]) -> object {
      a = exp(x)
      b = reshape(a, shape[h, w, 4])
      c = permute_dims(b, axes=[1, 0, 2])
      d = tanh(c)
      return d
    }
    """
    compute(program, f32(6, 4), (2, 3))


def test_bug_16045_a_fused_scalar_argument_keeps_its_dimension(compute: Compute) -> None:
    program = """
    func main(x: f32[n], m: shape[k]) -> object {
      dataflow {
        a = exp(x)
        b = call_tir @plus(a, k) -> f32[n]
        c = tanh(b)
      }
      return c
    }
    prim plus(A: f32[n], k: dim, out B: f32[n]) { for i in n { B[i] = A[i] * 0.125 + cast(f32, dim(k)) * 0.01 } }
    """
    compute(program, f32(5), (7,))


def test_bug_14931_two_uses_of_one_function_at_different_shapes(compute: Compute) -> None:
    program = """
    func main(x: f32[n, m], y: f32[m, n]) -> object {
      dataflow {
        a = call_tir @twice(x) -> f32[n, m]
        b = call_tir @twice(y) -> f32[m, n]
        c = permute_dims(b, axes=[1, 0])
        d = add(a, c)
      }
      return d
    }
    prim twice(A: f32[p, q], out B: f32[p, q]) { for i in p, j in q { B[i, j] = A[i, j] * 2.0 } }
    """
    compute(program, f32(3, 5), f32(5, 3))


@pytest.mark.parametrize("name", ["fused", "exp_tanh", "main.weights", "kernel"])
def test_bug_20194_functions_may_have_any_name(compute: Compute, name: str) -> None:
    program = f"""
    func main(x: f32[n]) -> object {{
      dataflow {{ a = exp(x) b = tanh(a) c = call_tir @{name}(b) -> f32[n] }}
      return c
    }}
    prim {name}(A: f32[n], out B: f32[n]) {{ for i in n {{ B[i] = A[i] + 1.0 }} }}
    """
    compute(program, f32(4))


# --- 6: bounds of symbolic variables -------------------------------------------------------------------------------------


def test_bug_18663_a_lower_bound_alone_is_no_size(compute: Compute) -> None:
    program = """
    func main(x: f32[n, 16]) -> object where n in 4.. {
      a = softmax(x)
      b = softmax(a)
      c = softmax(b)
      return c
    }
    """
    arena = planned(program).graph("main").arena
    assert arena is not None and not arena.is_const
    compute(program, f32(4, 16))
    compute(program, f32(300, 16))


def test_bug_17322_a_bound_exceeded_is_an_error_that_names_it() -> None:
    module = parse("""
    func main(x: f32[batch, 16]) -> object where batch in 1..8 {
      a = softmax(x)
      b = softmax(a)
      return b
    }
    """)
    assert planned_bytes(module) == 2 * 8 * 16 * 4
    session = Session(compile_module(module), device_threads=1)
    session.call("main", f32(8, 16))
    with pytest.raises(BoundExceeded, match="main: batch = 9 is outside its declared range 1 <= batch <= 8"):
        session.call("main", f32(9, 16))


def planned_bytes(module: IRModule) -> int:
    arena = pipeline(host())(module).graph("main").arena
    assert arena is not None
    return arena.const


# --- 7: variables that occur only inside expressions ---------------------------------------------------------------------


def test_bug_17876_an_expression_waits_for_a_later_parameter(compute: Compute) -> None:
    """The shape of a parameter may use a variable that only a later parameter defines. Here a parameter with n + 1 rows precedes the shape
    parameter that defines n."""
    program = "func main(x: f32[n + 1, 2*n], s: shape[n]) -> object { y = exp(x) return y }"
    compute(program, f32(4, 6), (3,))
    session = Session(compile_module(parse(program)), device_threads=1)
    with pytest.raises(ArgumentMismatch, match=r"main: parameter 'x': dimension 0: expected n \+ 1 = 4, got 5"):
        session.call("main", f32(5, 6), (3,))


def test_bug_18491_a_variable_that_nothing_defines_is_named() -> None:
    with pytest.raises(CompileError, match=r"main.*no parameter defines n"):
        compile_module(parse("func main(x: f32[2*n]) -> object { y = exp(x) return y }"))


def test_bug_20260_constants_fold_beside_symbolic_shapes(compute: Compute) -> None:
    program = """
    func main(x: f32[n, 2]) -> object {
      c = exp(const f32[2] [0.0, 1.0])
      wide = broadcast_to(c, shape[n, 2])
      s = shape[n, 2]
      flat = reshape(wide, shape[2*n])
      y = reshape(flat, s)
      z = add(y, x)
      return z
    }
    """
    compute(program, f32(3, 2))


def test_bug_18119_broadcasting_with_a_symbolic_extent_is_deduced(compute: Compute) -> None:
    program = "func main(x: f32[2, 3], y: f32[2, n]) -> object { z = add(x, y) return z }"
    result = parse(program).graph("main").body.bindings[0].var.type
    assert result == TensorType((Dim.of(2), Dim.of(3)), result.dtype)  # type: ignore[union-attr]
    compute(program, f32(2, 3), f32(2, 3))
    session = Session(compile_module(parse(program)), device_threads=1)
    with pytest.raises(ArgumentMismatch, match=r"main: add 'z', operand 1 '\w+', dimension 1: .* is neither 1 nor .*: expected 3, got 4"):
        session.call("main", f32(2, 3), f32(2, 4))


# --- 8: the default pipeline schedules every kernel ----------------------------------------------------------------------


def test_bug_18048_the_default_pipeline_schedules_every_kernel() -> None:
    module = planned("""
    func main(x: f32[n, 32], w: f32[16, 32]) -> object {
      dataflow { a = linear(x, w) b = gelu(a) c = softmax(b) d = exp(c) e = permute_dims(d, axes=[1, 0]) }
      return e
    }
    """)
    assert len(module.prim_functions) < 5, "nothing was fused"
    assert all("schedule" in prim.attrs for prim in module.prim_functions.values())


# --- 9: error messages name the line or operand --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "text", "words"),
    [
        (
            17217,
            "func first(x: f32[n, 4], y: f32[n, 5]) -> object { total = add(x, y) return total }",
            ["total", "f32[n, 4]", "f32[n, 5]", "dimension 1", "'first'"],
        ),
        (
            17231,
            "func second(x: f32[2, 3], w: f32[4, 5]) -> object { product = matmul(x, w) return product }",
            ["product", "f32[2, 3]", "f32[4, 5]", "contracted dimension", "'second'"],
        ),
        (
            17488,
            "func third(x: f32[4]) -> object { c = exp(x) cast = match_cast c to f32[3] return cast }",
            ["'cast'", "f32[3]", "f32[4]", "dimension 0", "'third'"],
        ),
        (
            16806,
            "func last(x: f32[n]) -> object { y = @g(x) return y } func g(a: i32[n]) -> i32[n] { return a }",
            ["y", "i32[n]", "f32[n]", "argument 0", "'last'"],
        ),
    ],
    ids=[17217, 17231, 17488, 16806],
)
def test_bug_errors_name_function_binding_annotations_and_dimension(number: int, text: str, words: list[str]) -> None:
    with pytest.raises(CompileError) as caught:
        verify(parse(text))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((f32(2, 5), f32(4)), ["main", "'x'", "dimension 1", "expected 4", "got 5"]),
        ((f32(9, 4), f32(4)), ["main", "n = 9", "1 <= n <= 8"]),
        ((f32(2, 4), f32(3)), ["main", "'w'", "dimension 0", "expected 4", "got 3"]),
        ((f32(2, 4), f32(4).astype(np.int32)), ["main", "'w'", "f32", "int32"]),
        ((f32(2, 4), f32(4, 1)), ["main", "'w'", "rank", "1", "2"]),
        ((f32(2, 4),), ["main", "2", "1"]),
    ],
)
def test_a_mismatch_at_run_time_names_parameter_dimension_and_values(args: tuple[Any, ...], words: list[str]) -> None:
    session = Session(
        compile_module(parse("func main(x: f32[n, 4], w: f32[4]) -> object where n in 1..8 { y = add(x, w) return y }")), device_threads=1
    )
    with pytest.raises(ArgumentMismatch) as caught:
        session.call("main", *args)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    session.close()
