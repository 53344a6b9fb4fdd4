"""Functions that are called by name, passed as values, chosen at run time, and called recursively."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiler.driver import compile_module
from compiler.ir.text.parser import parse
from runtime.session import Session

Compute = Callable[..., Any]

CHOICE = """
func main(c: bool[], x: f32[k]) -> object {
  f = if c { return @up } else { return @down }
  y = call f(x)
  z = add(x, y)
  return z
}
func up(x: f32[n]) -> f32[n] { y = exp(x) return y }
func down(x: f32[m]) -> f32[m] { y = negative(x) return y }
"""


@pytest.mark.parametrize("choice", [True, False])
def test_an_if_chooses_among_functions_that_differ_in_the_names_of_variables(compute: Compute, choice: bool) -> None:
    compute(CHOICE, np.array(choice), np.ones(3, np.float32))


def test_temporaries_of_a_called_function_lie_above_the_arena_of_its_caller(compute: Compute) -> None:
    """The temporaries of a called function do not overwrite values in the caller's part of the arena that the caller reads after the
    call."""
    program = """
    func main(x: f32[n, 16]) -> object {
      a = softmax(x)
      b = @inner(a, x)
      c = @inner(b, a)
      d = add(a, b)
      e = add(c, d)
      return e
    }
    func inner(x: f32[n, 16], y: f32[n, 16]) -> f32[n, 16] {
      a = softmax(x)
      b = @innermost(a)
      c = softmax(b)
      d = add(a, y)
      e = add(c, d)
      return e
    }
    func innermost(x: f32[n, 16]) -> f32[n, 16] { a = softmax(x) b = softmax(a) c = add(a, b) return c }
    """
    x = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    compute(program, x)
    session = Session(compile_module(parse(program)), device_threads=1)
    results = [session.call("main", x).tobytes() for _ in range(3)]  # in the first call the arena must grow for the called functions
    assert len(set(results)) == 1
    assert session.arena_bytes("inner", {"n": 5}) > 0


def test_a_function_that_calls_itself_keeps_its_temporaries_apart(compute: Compute) -> None:
    program = """
    func main(x: f32[n, 4]) -> object { y = @half(x) return y }
    func half(x: f32[n, 4]) -> f32[ndim=2] {
      t = shape_to_tensor(shape[n])
      limit = full(shape[1], dim(2), dtype=i64)
      more = less(limit, t)
      c = any(more)
      a = softmax(x)
      r: f32[ndim=2] = if c {
        h = slice(a, axis=0, begin=0, end=dim(n // 2))
        d = @half(h)
        e = match_cast d to f32[k, 4]
        p = concat(e, a, axis=0)
        return p
      } else {
        return a
      }
      return r
    }
    """
    compute(program, np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32))


@pytest.mark.parametrize(
    "called", ["y = @inner(x, w)", "f = @inner y = call f(x, w)", "f = if c { return @inner } else { return @inner } y = call f(x, w)"]
)
def test_a_function_with_weights_is_called_with_its_weights(compute: Compute, called: str) -> None:
    """The compiler prepares no weights of a function that another one calls, because the caller passes the weights as they are."""
    text = f"""
        func main(c: bool[], x: f32[n, 4], w: f32[4, 4]) -> object {{ {called} return y }}
        func inner(x: f32[n, 4], weight w: f32[4, 4]) -> f32[n, 4] {{ t = permute_dims(w) y = linear(x, t) return y }}
    """
    random = np.random.default_rng(0)
    compute(text, np.asarray(True), *(random.normal(size=shape).astype(np.float32) for shape in ((3, 4), (4, 4))))
