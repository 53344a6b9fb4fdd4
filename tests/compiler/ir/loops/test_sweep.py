"""`sweep` covers a range of indices with full vectors. A masked vector covers the end of the range unless full vectors provably suffice."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.interpret.loops import run_prim
from compiler.ir.dims import Dim, DimLike, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.equal import assert_equal
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.sweep import sweep
from compiler.ir.loops.write import Kernel
from compiler.ir.text.parser import parse

F32 = DType.F32


def vector_kernel(length: DimLike, parts: int | None) -> PrimFunc:
    """Return the kernel y = x + 1 in vectors of 4 lanes, on an array of `length` elements."""
    n = Dim.of(length)
    source, dest = Buffer("x", (n,), F32), Buffer("y", (n,), F32)
    k = Kernel()
    x, y = k.arrays(source, dest)
    for vector in sweep(k, Dim.of(0), n, 4, parts):
        with vector.lanes() as (_, index):
            y[index] = x[index] + 1.0
    return PrimFunc((source, dest), 1, k.body())


def test_a_sweep_has_full_vectors_and_a_masked_rest() -> None:
    wanted = """prim f(x: f32[n], out y: f32[n]) {
      for c in n // 4 { for vector l in 4 { y[c * 4 + l] = x[c * 4 + l] + 1.0 } }
      when dim(n // 4 * 4) < dim(n) {
        for vector l in 4 { when dim(n // 4 * 4 + l) < dim(n) { y[n // 4 * 4 + l] = x[n // 4 * 4 + l] + 1.0 } }
      }
    }"""
    assert_equal(vector_kernel(DimVar("n"), None), parse(wanted).prim("f"))


def test_a_sweep_that_full_vectors_suffice_for_has_no_rest() -> None:
    wanted = """prim f(x: f32[16], out y: f32[16]) {
      for c in 2 { for unroll u in 2 { for vector l in 4 { y[c * 8 + u * 4 + l] = x[c * 8 + u * 4 + l] + 1.0 } } }
    }"""
    assert_equal(vector_kernel(16, 2), parse(wanted).prim("f"))


@pytest.mark.parametrize("parts", [None, 1, 3])
@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 11, 12, 13, 24, 30])
def test_a_sweep_visits_every_element_once(length: int, parts: int | None) -> None:
    n = DimVar("n")
    dest = Buffer("y", (Dim.of(n),), F32)
    k = Kernel()
    y = k.array(dest)
    for vector in sweep(k, Dim.of(0), Dim.of(n), 4, parts):
        with vector.lanes() as (_, index):
            y[index] += 1.0
    visits = np.zeros(length, np.float32)
    run_prim(PrimFunc((dest,), 1, k.body()), [visits])
    np.testing.assert_array_equal(visits, np.ones(length))


def test_vectors_of_a_sweep_say_whether_they_are_full_and_which_part_they_are() -> None:
    k = Kernel()
    seen = [(vector.is_full, vector.part.is_const, vector.width) for vector in sweep(k, Dim.of(0), Dim.of(DimVar("n")), 4, 2)]
    assert seen == [(True, False, 4), (False, False, 4)]
    assert all(vector.part.const == 0 for vector in sweep(k, Dim.of(0), Dim.of(DimVar("n")), 4))
