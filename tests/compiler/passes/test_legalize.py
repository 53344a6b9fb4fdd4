"""Operators become loop nests and library calls, views stay, and what deduction could not prove is checked at run time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from compiler.ir.graph.values import CallTir
from compiler.ir.text.parser import parse
from compiler.ops.tables import UnknownShape
from compiler.passes.base import Pass
from compiler.passes.legalize import legalize

Becomes = Callable[[Pass, str, str], None]


def test_equal_operators_share_one_nest(becomes: Becomes) -> None:
    before = """
        func main(x: f32[n, 4], y: f32[n, 4]) -> f32[n, 4] {
          a = add(x, y)
          b = add(a, y)
          c = add(b, 1.0)
          return c
        }
    """
    expected = """
        func main(x: f32[n, 4], y: f32[n, 4]) -> f32[n, 4] {
          a = call_tir @add(x, y) -> f32[n, 4]
          b = call_tir @add(a, y) -> f32[n, 4]
          c = call_tir @add_1(b) -> f32[n, 4]
          return c
        }
        prim add(a: f32[n, 4], b: f32[n, 4], out out: f32[n, 4]) { for i in n, j in 4 { out[i, j] = a[i, j] + b[i, j] } }
        prim add_1(a: f32[n, 4], out out: f32[n, 4]) { for i in n, j in 4 { out[i, j] = a[i, j] + 1.0 } }
    """
    becomes(legalize, before, expected)


def test_numbers_that_only_compare_equal_give_two_nests() -> None:
    module = legalize(parse("func main(x: f32[n]) -> object { a = multiply(x, 0.0) b = multiply(x, -0.0) r = (a, b) return r }"))
    first, second = (b.value.func for b in module.graph("main").body.bindings if isinstance(b.value, CallTir))
    assert first != second


def test_an_unproved_extent_is_checked_first(becomes: Becomes) -> None:
    before = "func main(x: f32[4], y: f32[n]) -> f32[4] { z = add(x, y) return z }"
    expected = """
        func main(x: f32[4], y: f32[n]) -> f32[4] {
          ok = match_cast n to scalar[i64, 3*min(max(1 - n, n - 1), 1) + 1]
          z = call_tir @add(x, y) -> f32[4]
          return z
        }
        prim add(a: f32[4], b: f32[n], out out: f32[4]) { for i in 4 { out[i] = a[i] + b[min(i, n - 1)] } }
    """
    becomes(legalize, before, expected)


def test_a_variable_that_only_the_range_of_another_one_mentions_is_passed(becomes: Becomes) -> None:
    before = "func main(x: f32[m], w: f32[n]) -> f32[n] where m in 0.., n in 0..m { y = exp(w) return y }"
    expected = """
        func main(x: f32[m], w: f32[n]) -> f32[n] where m in 0.., n in 0..m { y = call_tir @exp(w, m) -> f32[n] return y }
        prim exp(a: f32[n], m: dim, out out: f32[n]) where m in 0.., n in 0..m { for i in n { out[i] = exp(a[i]) } }
    """
    becomes(legalize, before, expected)


def test_a_variable_may_be_passed_whose_range_mentions_an_extent(becomes: Becomes) -> None:
    before = "func main(x: f32[m], w: f32[k], s: shape[k]) -> i64[1] where m in 0.., k in 0..m { y = shape_to_tensor(shape[k]) return y }"
    expected = """
        func main(x: f32[m], w: f32[k], s: shape[k]) -> i64[1] where m in 0.., k in 0..m {
          y = call_tir @shape_to_tensor(k, m) -> i64[1]
          return y
        }
        prim shape_to_tensor(k: dim, m: dim, out out: i64[1]) where m in 0.., k in 0..m { out[0] = dim(k) }
    """
    becomes(legalize, before, expected)


def test_a_view_stays_and_its_count_is_checked_where_unproved(becomes: Becomes) -> None:
    before = "func main(x: f32[n, 4], s: shape[m]) -> f32[m] { y: f32[m] = reshape(x, shape[m]) return y }"
    expected = """
        func main(x: f32[n, 4], s: shape[m]) -> f32[m] {
          same = match_cast dim(4*n) to scalar[i64, m]
          y: f32[m] = reshape(x, shape[m])
          return y
        }
    """
    becomes(legalize, before, expected)


def test_a_host_routine_becomes_a_library_call(becomes: Becomes) -> None:
    before = "func main(x: f32[n, 4]) -> f32[n, 4] { y = sort(x, axis=1, descending=true) return y }"
    expected = """
        func main(x: f32[n, 4]) -> f32[n, 4] {
          y = call_library "sort"(x) {axis=1, descending=true} -> f32[n, 4]
          return y
        }
    """
    becomes(legalize, before, expected)


def test_the_inside_of_branches_too(becomes: Becomes) -> None:
    before = "func main(c: bool[], x: f32[n]) -> f32[n] { y: f32[n] = if c { a = exp(x) return a } else { return x } return y }"
    expected = """
        func main(c: bool[], x: f32[n]) -> f32[n] {
          y: f32[n] = if c { a = call_tir @exp(x) -> f32[n] return a } else { return x }
          return y
        }
        prim exp(a: f32[n], out out: f32[n]) { for i in n { out[i] = exp(a[i]) } }
    """
    becomes(legalize, before, expected)


def test_nothing_to_do(stays: Callable[[Pass, str], None]) -> None:
    stays(legalize, "func main(x: f32[n]) -> f32[n] { y = reshape(x, shape[n]) return y }")


def test_an_unknown_shape_is_an_error_with_a_remedy() -> None:
    module = parse("func main(x: f32[ndim=1]) -> f32[ndim=1] { y = exp(x) return y }")
    with pytest.raises(UnknownShape, match=r"exp \(y\): .*match_cast"):
        legalize(module)


def test_a_scalar_of_unknown_type_is_an_error_with_a_remedy() -> None:
    with pytest.raises(UnknownShape, match=r"multiply \(y\): the type or the extents of an operand .*match_cast"):
        legalize(parse("func main(x: f32[n], a: scalar[any]) -> object { y = multiply(x, a) return y }"))
