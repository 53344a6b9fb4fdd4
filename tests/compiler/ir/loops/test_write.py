"""Kernels written in the language of compiler/ir/loops/write.py equal the loop nests that they describe."""

from __future__ import annotations

import pytest

from compiler.ir.dims import Dim, DimVar
from compiler.ir.dtypes import DType
from compiler.ir.equal import assert_equal
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import ReduceFn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar, ScalarParam
from compiler.ir.loops.statements import Store
from compiler.ir.loops.write import Kernel, cast, equal, exp, fold, guard, index, largest, less, maximum, select, total
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_scalar

F32 = DType.F32
X, N = ScalarParam("x", F32), ScalarParam("n", DType.I32)


def test_a_kernel_is_the_nest_it_looks_like() -> None:
    n = DimVar("n")
    source, dest = Buffer("x", (n * 1, n * 1), F32), Buffer("y", (n * 1,), F32)
    k = Kernel()
    x, y = k.array(source), k.array(dest)
    with k.parallel("i", n) as i:
        acc = k.local("acc", 4)
        with k.vector(4) as lane:
            acc[lane] = 0.0
        with k.serial("r", n // 4) as r, k.vector(4) as lane:
            acc[lane] += x[i, r * 4 + lane] * 2.0
        first = k.let("first", i * 2, 2 * n)
        with k.when(less(first, n)):
            y[i] = acc[0] + acc[1] - exp(-acc[2])
        with k.orelse():
            y[i] = select(acc[3] < 1.0, acc[3], 1.0)
    wanted = prim("""
        prim f(x: f32[n, n], out y: f32[n]) {
          for parallel i in n {
            alloc local acc: f32[4] {
              for vector l in 4 { acc[l] = 0.0 }
              for r in n // 4 { for vector l in 4 { acc[l] = fma(x[i, r * 4 + l], 2.0, acc[l]) } }
              let first within 0..2 * n = dim(i * 2) {
                when dim(first) < dim(n) { y[i] = acc[0] + acc[1] - exp(-acc[2]) }
                else { y[i] = select(acc[3] < 1.0, acc[3], 1.0) }
              }
            }
          }
        }""")
    assert_equal(PrimFunc((source, dest), 1, k.body()), wanted)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (X + 1, "x + 1.0"),
        (1 - X * X, "1.0 - x * x"),
        (2 / X, "2.0 / x"),
        (-X + abs(X), "-x + abs(x)"),
        (N // 3 % 2, "n // 3:i32 % 2:i32"),
        ((N << 2) | (N >> 1) ^ 1, "n << 2:i32 | n >> 1:i32 ^ 1:i32"),
        ((X < 2) & (X >= 0.5), "x < 2.0 & 0.5 <= x"),
        (~equal(N, 1), "~(n == 1:i32)"),
        (maximum(cast(N, F32), 0) + index(Dim.of(3)) * 2, "max(cast(f32, n), 0.0) + dim(3) * 2"),
    ],
)
def test_operators_build_scalars(written: Scalar, text: str) -> None:
    assert print_scalar(written) == text


def test_a_fold_is_an_expression() -> None:
    n = DimVar("n")
    source, dest = Buffer("x", (Dim.of(n),), F32), Buffer("y", (Dim.of(1),), F32)
    k = Kernel()
    x, y = k.arrays(source, dest)
    top, bottom = largest((n,), lambda r: x[r]), fold(ReduceFn.MIN, (n,), lambda r: x[r])
    y[0] = top - bottom + total((n,), lambda r: guard(1, r, n, exp(x[r]), 0))
    wanted = """prim f(x: f32[n], out y: f32[1]) {
      y[0] = (max(r in n) x[r]) - (min(r in n) x[r]) + (sum(r in n) guard(1 <= r < n ? exp(x[r]) : 0.0))
    }"""
    assert_equal(PrimFunc((source, dest), 1, k.body()), prim(wanted))


def test_integers_are_added_apart_from_their_product() -> None:
    """A product and a sum of integers stay separate operations. A product and a sum of floats become one fused operation, which rounds only
    once."""
    counts = Buffer("c", (Dim.of(1),), DType.I32)
    k = Kernel()
    c = k.array(counts)
    c[0] += c[0] * 2
    store = k.body()
    assert isinstance(store, Store)
    assert print_scalar(store.value) == "c[0] + c[0] * 2:i32"


def test_a_sum_of_a_product_is_rounded_twice_unless_it_is_added_in_place() -> None:
    source, dest = Buffer("x", (Dim.of(1),), F32), Buffer("y", (Dim.of(1),), F32)
    k = Kernel()
    x, y = k.arrays(source, dest)
    y[0] = y[0] + x[0] * 2.0
    y[0] += x[0] * 2.0
    wanted = "prim f(x: f32[1], out y: f32[1]) { y[0] = y[0] + x[0] * 2.0 y[0] = fma(x[0], 2.0, y[0]) }"
    assert_equal(PrimFunc((source, dest), 1, k.body()), prim(wanted))


def test_what_a_scope_allocates_ends_with_it() -> None:
    dest = Buffer("y", (Dim.of(2),), F32)
    k = Kernel()
    y = k.array(dest)
    for i in range(2):
        with k.scope():
            once = k.local("once", 1)
            once[0] = 1.0
            y[i] = once[0]
    wanted = """prim f(out y: f32[2]) {
      alloc local once: f32[1] { once[0] = 1.0 y[0] = once[0] }
      alloc local once: f32[1] { once[0] = 1.0 y[1] = once[0] }
    }"""
    assert_equal(PrimFunc((dest,), 1, k.body()), prim(wanted))


def test_a_number_stands_for_a_point_of_a_box() -> None:
    """`unravel` turns a flat index into an index per axis in row-major order: the last axis varies fastest."""
    n, m = DimVar("n"), DimVar("m")
    dest = Buffer("y", (n * 1, m * 1, Dim.of(4)), F32)
    k = Kernel()
    y = k.array(dest)
    with k.parallel("p", n * m * 4) as p:
        i, j, lane = k.unravel(p, [("i", Dim.of(n)), ("j", Dim.of(m)), ("lane", Dim.of(4))])
        y[i, j, lane] = 1.0
    wanted = """prim f(out y: f32[n, m, 4]) {
      for parallel p in n * m * 4 {
        let lane within 0..3 = dim(p % 4) {
          let j within 0..m - 1 = dim(p // 4 % m) {
            let i within 0..n - 1 = dim(p // 4 // m) { y[i, j, lane] = 1.0 }
          }
        }
      }
    }"""
    assert_equal(PrimFunc((dest,), 1, k.body()), prim(wanted))


def test_axes_of_one_name_are_unravelled_apart() -> None:
    k = Kernel()
    with k.serial("p", 12) as p:
        i, j = k.unravel(p, [("i", Dim.of(3)), ("i", Dim.of(4))])
    assert (i.var, j.var) != (None, None) and i.var is not j.var


def test_an_integer_knows_its_range() -> None:
    counts = Buffer("c", (Dim.of(1),), DType.I32)
    k = Kernel()
    found = k.let("p", k.array(counts)[0], 64, lower=8, multiple_of=4)
    assert found.var is not None
    assert (found.var.lower, found.var.upper, found.var.multiple_of) == (8, 64, 4)


def test_indices_may_be_a_list() -> None:
    """An array accepts its indices as a list, because unpacking with a star in a `with` statement gives a list."""
    source, dest = Buffer("x", (Dim.of(2), Dim.of(3)), F32), Buffer("y", (Dim.of(2),), F32)
    k = Kernel()
    x, y = k.arrays(source, dest)
    with k.nest(source.shape) as (*row, j):
        y[row] = x[*row, j]
    assert_equal(
        PrimFunc((source, dest), 1, k.body()), prim("prim f(x: f32[2, 3], out y: f32[2]) { for i in 2, j in 3 { y[i] = x[i, j] } }")
    )


def test_else_needs_a_condition() -> None:
    k = Kernel()
    y = k.array(Buffer("y", (Dim.of(1),), F32))
    y[0] = 1.0
    with pytest.raises(AssertionError, match="orelse must follow a when"), k.orelse():
        pass


def prim(text: str) -> PrimFunc:
    module: IRModule = parse(text)
    return module.prim("f")
