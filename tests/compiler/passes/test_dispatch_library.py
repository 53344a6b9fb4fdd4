"""Rows of patterns and predicates, with a BLAS as the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiler.driver import Options, compile_module
from compiler.ir.parser import parse
from compiler.ir.types import TensorType
from compiler.passes.base import Pass
from compiler.passes.dispatch_library import DispatchLibrary, Match, Op, Row, Wild
from runtime.library import LIBRARY, Routine
from runtime.session import Session


def static_depth(match: Match) -> bool:
    """As a BLAS asks for it: the contracted extent is a number."""
    a = match.type("a")
    return isinstance(a, TensorType) and a.shape is not None and a.shape[-1].is_const


PRODUCT = Op("matmul", (Wild("a"), Wild("b")))
WITH_BIAS = Row("gemm_bias", Op("add", (PRODUCT, Wild("bias"))), static_depth)
PLAIN = Row("gemm", PRODUCT, static_depth, lambda match: {"transposed": match.calls[0].attrs.get("transpose_b", False)})
BLAS = DispatchLibrary((WITH_BIAS, PLAIN))


def gemm(a: Any, b: Any, transposed: bool) -> tuple[Any, ...]:
    return (np.matmul(a, b.T if transposed else b),)


@pytest.fixture(autouse=True)
def blas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIBRARY, "gemm", Routine("gemm", ("a", "b"), ("transposed",), ("out",), gemm))
    routine = Routine("gemm_bias", ("a", "b", "bias"), (), ("out",), lambda a, b, bias: (np.matmul(a, b) + bias,))
    monkeypatch.setitem(LIBRARY, "gemm_bias", routine)


def test_the_first_row_that_fits_takes_its_part(becomes: Callable[[Pass, str, str], None]) -> None:
    before = """
        func main(x: f32[n, 8], w: f32[8, 8], b: f32[8]) -> object {
          y = matmul(x, w)
          z = add(y, b)
          r = relu(z)
          q = matmul(r, w, transpose_b=true)
          return q
        }
    """
    expected = """
        func main(x: f32[n, 8], w: f32[8, 8], b: f32[8]) -> object {
          z = call_library "gemm_bias"(x, w, b) -> f32[n, 8]
          r = relu(z)
          q = call_library "gemm"(r, w) {transposed=true} -> f32[n, 8]
          return q
        }
    """
    becomes(BLAS, before, expected)


def test_a_value_with_another_use_stays_outside(becomes: Callable[[Pass, str, str], None]) -> None:
    before = """
        func main(x: f32[n, 8], w: f32[8, 8], b: f32[8]) -> object {
          y = matmul(x, w)
          z = add(y, b)
          r = (y, z)
          return r
        }
    """
    becomes(BLAS, before, before.replace("y = matmul(x, w)", 'y = call_library "gemm"(x, w) {transposed=false} -> f32[n, 8]'))


@pytest.mark.parametrize(
    "body",
    ["y = matmul(x, w) return y", "y = exp(x) return y"],
    ids=["predicate", "pattern"],
)
def test_what_fits_no_row_stays(stays: Callable[[Pass, str], None], body: str) -> None:
    stays(BLAS, f"func main(x: f32[n, k], w: f32[k, 8]) -> object {{ {body} }}")


def test_a_wildcard_that_stands_twice_is_one_operand() -> None:
    square = DispatchLibrary((Row("gemm", Op("matmul", (Wild("a"), Wild("a"))), lambda _: True),))
    before = "func main(x: f32[4, 4], y: f32[4, 4]) -> object { a = matmul(x, y) return a }"
    assert square(module := parse(before)) is module


def test_dispatch_by_an_option_computes_the_same() -> None:
    program = """
        func main(x: f32[n, 8], w: f32[8, 16], b: f32[16]) -> object where n in 1..32 {
          y = matmul(x, w)
          z = add(y, b)
          s = softmax(z)
          return s
        }
    """
    random = np.random.default_rng(0)
    args = [random.normal(size=shape).astype(np.float32) for shape in ((5, 8), (8, 16), (16,))]
    plain, dispatched = Options(), Options(dispatch=(WITH_BIAS, PLAIN))
    assert plain.key != dispatched.key
    results = [Session(compile_module(parse(program), o), device_threads=1).call("main", *args) for o in (plain, dispatched)]
    np.testing.assert_allclose(*results, rtol=1e-5)
    instructions = compile_module(parse(program), dispatched).meta.functions["main"].instructions
    assert any(getattr(i, "callee", "") == "lib.gemm_bias" for i in instructions)
