"""Values computed from constants alone are computed at compile time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from compiler.passes import fold_constants
from compiler.passes.base import Pass
from compiler.passes.fold_constants import FoldConstants


def test_constants_fold_through_operators_and_nests(becomes: Callable[[Pass, str, str], None]) -> None:
    before = """
        func main(x: f32[n, 2]) -> f32[n, 2] {
          a = add(const f32[2] [1.0, 2.0], 1.0)
          b = call_tir @twice(a) -> f32[2]
          y = multiply(x, b)
          return y
        }
        prim twice(A: f32[n], out B: f32[n]) { for i in n { B[i] = A[i] * 2.0 } }
    """
    expected = """
        func main(x: f32[n, 2]) -> f32[n, 2] {
          y = multiply(x, const f32[2] [4.0, 6.0])
          return y
        }
        prim twice(A: f32[n], out B: f32[n]) { for i in n { B[i] = A[i] * 2.0 } }
    """
    becomes(FoldConstants(), before, expected)


def test_what_depends_on_a_dimension_stays(stays: Callable[[Pass, str], None]) -> None:
    stays(FoldConstants(), "func main(x: f32[n]) -> f32[n, 1] { y = broadcast_to(const f32[1] [1.0], shape[n, 1]) return y }")


def test_a_program_does_not_grow(stays: Callable[[Pass, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A result that would be too large is not even computed, for it may be larger than the machine's memory."""
    monkeypatch.setattr(fold_constants, "evaluate", lambda *_: pytest.fail("computed a result that is too large"))
    text = "func main() -> f32[64, 64] { y = broadcast_to(const f32[1] [1.0], shape[64, 64]) return y }"
    stays(FoldConstants(most_bytes=64 * 64 * 4 - 1), text)
