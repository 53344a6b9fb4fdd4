"""What nothing uses goes: bindings and loop nests. What may have an effect stays."""

from __future__ import annotations

from collections.abc import Callable

from compiler.passes.base import Pass
from compiler.passes.eliminate_dead_code import eliminate_dead_code

Becomes = Callable[[Pass, str, str], None]


def test_chains_of_unused_values_go(becomes: Becomes) -> None:
    before = """
        func main(c: bool[], x: f32[n]) -> f32[n] {
          a = exp(x)
          b = sin(a)
          y: f32[n] = if c { d = exp(x) return x } else { return x }
          z = cos(y)
          return z
        }
    """
    expected = """
        func main(c: bool[], x: f32[n]) -> f32[n] {
          y: f32[n] = if c { return x } else { return x }
          z = cos(y)
          return z
        }
    """
    becomes(eliminate_dead_code, before, expected)


def test_a_match_cast_is_a_check_and_stays(stays: Callable[[Pass, str], None]) -> None:
    stays(eliminate_dead_code, "func main(x: f32[n]) -> f32[n] { unused = match_cast x to f32[4] return x }")


def test_loop_nests_that_nothing_calls_go(becomes: Becomes) -> None:
    before = """
        func main(x: f32[n]) -> f32[n] { y = @helper(x) return y }
        func helper(x: f32[n]) -> f32[n] { y = call_tir @one(x) -> f32[n] return y }
        func other(x: f32[n]) -> f32[n] { y = call_tir @two(x) -> f32[n] return x }
        prim one(A: f32[n], out B: f32[n]) { for i in n { B[i] = A[i] + 1.0 } }
        prim two(A: f32[n], out B: f32[n]) { for i in n { B[i] = A[i] + 2.0 } }
    """
    expected = """
        func main(x: f32[n]) -> f32[n] { y = @helper(x) return y }
        func helper(x: f32[n]) -> f32[n] { y = call_tir @one(x) -> f32[n] return y }
        func other(x: f32[n]) -> f32[n] { return x }
        prim one(A: f32[n], out B: f32[n]) { for i in n { B[i] = A[i] + 1.0 } }
    """
    becomes(eliminate_dead_code, before, expected)


def test_calls_of_impure_functions_stay(stays: Callable[[Pass, str], None]) -> None:
    stays(
        eliminate_dead_code,
        """
        impure func main(x: f32[n]) -> f32[n] { unused = @noisy(x) return x }
        impure func noisy(x: f32[n]) -> f32[n] { return x }
        """,
    )
