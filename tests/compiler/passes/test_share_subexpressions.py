"""Equal subexpressions are computed once."""

from __future__ import annotations

from collections.abc import Callable

from compiler.passes.base import Pass
from compiler.passes.share_subexpressions import share_subexpressions

Becomes = Callable[[Pass, str, str], None]


def test_equal_values_are_one(becomes: Becomes) -> None:
    before = """
        func main(x: f32[n]) -> tuple[f32[n], f32[n]] {
          a = exp(x)
          b = exp(x)
          c = add(a, 1.0)
          d = add(b, 1.0)
          r = (c, d)
          return r
        }
    """
    expected = """
        func main(x: f32[n]) -> tuple[f32[n], f32[n]] {
          a = exp(x)
          c = add(a, 1.0)
          r = (c, c)
          return r
        }
    """
    becomes(share_subexpressions, before, expected)


def test_equal_checks_are_made_once(becomes: Becomes) -> None:
    """Equal checks of a value are made once. So a step makes each check of its index operands once, not once per layer."""
    before = """
        func main(x: f32[n, m], y: object) -> tuple[f32[n, 4], f32[n, m], f32[n, m]] {
          a = match_cast x to f32[n, 4]
          b = match_cast x to f32[n, 4]
          c = match_cast y to f32[n, m]
          d = match_cast y to f32[n, m]
          r = (b, c, d)
          return r
        }
    """
    expected = """
        func main(x: f32[n, m], y: object) -> tuple[f32[n, 4], f32[n, m], f32[n, m]] {
          a = match_cast x to f32[n, 4]
          c = match_cast y to f32[n, m]
          r = (a, c, c)
          return r
        }
    """
    becomes(share_subexpressions, before, expected)


def test_a_branch_reuses_what_is_around_it_and_not_the_other_way(becomes: Becomes) -> None:
    before = """
        func main(c: bool[], x: f32[n]) -> f32[n] {
          a = exp(x)
          y: f32[n] = if c { b = exp(x) d = sin(b) return d } else { return x }
          z = sin(a)
          w = add(y, z)
          return w
        }
    """
    expected = before.replace("b = exp(x) d = sin(b)", "d = sin(a)")
    becomes(share_subexpressions, before, expected)


def test_different_attributes_impure_and_in_place_calls_stay(stays: Callable[[Pass, str], None]) -> None:
    stays(
        share_subexpressions,
        """
        func main(x: f32[4, 4]) -> object {
          a = permute_dims(x, axes=[1, 0])
          b = permute_dims(x, axes=[0, 1])
          c = call_tir_inplace @bump(a) [0] -> f32[4, 4]
          d = call_tir_inplace @bump(a) [0] -> f32[4, 4]
          r = (b, c, d)
          return r
        }
        prim bump(A: f32[n, m], out B: f32[n, m]) attrs {inplace=[[0, 1]]} { for i in n, j in m { B[i, j] = A[i, j] + 1.0 } }
        """,
    )


def test_numbers_that_only_compare_equal_are_not_the_same(stays: Callable[[Pass, str], None]) -> None:
    stays(
        share_subexpressions,
        "func main(x: f32[n]) -> object { a = multiply(x, 0.0) b = multiply(x, -0.0) r = (a, b) return r }",
    )
