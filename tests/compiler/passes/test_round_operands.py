"""Rows are rounded before products that tolerate it, and before no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from compiler.passes.base import Pass
from compiler.passes.round_operands import round_operands


def test_a_tolerant_product_multiplies_what_was_rounded(becomes: Callable[[Pass, str, str], None]) -> None:
    before = """
        func main(x: f32[n, 8], w: bf16[6, 8], bias: f32[6]) -> f32[n, 6] { y = linear(x, w, bias, tolerates="bf16") return y }
    """
    expected = """
        func main(x: f32[n, 8], w: bf16[6, 8], bias: f32[6]) -> f32[n, 6] {
          r = cast(x, dtype="bf16")
          y = linear(r, w, bias, out_dtype="f32")
          return y
        }
    """
    becomes(round_operands, before, expected)


@pytest.mark.parametrize(
    ("x", "w", "tolerates"),
    [("f32", "bf16", ""), ("f32", "f32", ', tolerates="bf16"'), ("bf16", "bf16", ', tolerates="bf16"')],
    ids=["not said", "other weights", "round already"],
)
def test_others_stay(stays: Callable[[Pass, str], None], x: str, w: str, tolerates: str) -> None:
    stays(round_operands, f"func main(x: {x}[n, 8], w: {w}[6, 8]) -> {x}[n, 6] {{ y = linear(x, w{tolerates}) return y }}")
