"""The pass rounds rows to bf16 before products that tolerate the rounding, and before no other products."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from compiler.ir.numbers import Kind
from compiler.passes.base import Pass
from compiler.passes.round_operands import RoundOperands


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
    becomes(RoundOperands(), before, expected)


@pytest.mark.parametrize(
    ("x", "w", "tolerates"),
    [("f32", "bf16", ""), ("f32", "f32", ', tolerates="bf16"'), ("bf16", "bf16", ', tolerates="bf16"')],
    ids=["not said", "other weights", "round already"],
)
def test_others_stay(stays: Callable[[Pass, str], None], x: str, w: str, tolerates: str) -> None:
    stays(RoundOperands(), f"func main(x: {x}[n, 8], w: {w}[6, 8]) -> {x}[n, 6] {{ y = linear(x, w{tolerates}) return y }}")


def test_rows_beside_integers_are_rounded_where_these_are_multiplied_as_numbers_of_bf16(
    becomes: Callable[[Pass, str, str], None], stays: Callable[[Pass, str], None]
) -> None:
    before = """
        func main(x: f32[n, 32], q: i8[6, 32], s: f32[6, 1]) -> f32[n, 6] { w = dequantize(q, s) y = linear(x, w) return y }
    """
    expected = """
        func main(x: f32[n, 32], q: i8[6, 32], s: f32[6, 1]) -> f32[n, 6] {
          w = dequantize(q, s)
          r = cast(x, dtype="bf16")
          y = linear(r, w, out_dtype="f32")
          return y
        }
    """
    becomes(RoundOperands(frozenset([Kind.INT])), before, expected)
    stays(RoundOperands(), before)


def test_of_products_with_experts_those_with_floats_of_eight_bits_are_rounded(
    becomes: Callable[..., None], stays: Callable[..., None]
) -> None:
    before = """
        func main(x: f32[n, 8], q: e4m3[3, 4, 8], s: f32[3, 4, 1], e: i32[n]) -> f32[n, 4] {
          w = dequantize(q, s, kind="e4m3")
          y = expert_linear(x, w, e, tolerates="bf16")
          return y
        }
    """
    expected = """
        func main(x: f32[n, 8], q: e4m3[3, 4, 8], s: f32[3, 4, 1], e: i32[n]) -> f32[n, 4] {
          w = dequantize(q, s, kind="e4m3")
          r = cast(x, dtype="bf16")
          y = expert_linear(r, w, e, out_dtype="f32")
          return y
        }
    """
    becomes(RoundOperands(frozenset([Kind.E4M3])), before, expected)
    integers = before.replace("e4m3", "i8").replace(', kind="i8"', "")
    becomes(RoundOperands(frozenset([Kind.INT]), of_experts=8), integers, expected.replace("e4m3", "i8").replace(', kind="i8"', ""))
    stays(RoundOperands(frozenset([Kind.INT])), before.replace("e4m3", "i8").replace(', kind="i8"', ""))


@pytest.mark.parametrize(
    ("w", "made", "kinds"),
    [
        ("w: bf16[3, 4, 64]", "", ()),
        ("q: i8[3, 4, 64], s: f32[3, 4, 1]", "w = dequantize(q, s)", (Kind.INT,)),
        ("q: u8[3, 4, 32], s: bf16[3, 4, 2]", 'w = dequantize(q, s, bits=4, group=32, kind="e2m1")', (Kind.E2M1,)),
    ],
    ids=["bf16", "integers", "floats of four bits"],
)
def test_where_all_products_with_experts_have_tiles_their_rows_are_rounded(
    becomes: Callable[..., None], stays: Callable[..., None], w: str, made: str, kinds: tuple[Kind, ...]
) -> None:
    given = f"func main(x: f32[n, 64], {w}, e: i32[n]) -> f32[n, 4] {{ {made}"
    before = f'{given} y = expert_linear(x, w, e, tolerates="bf16") return y }}'
    expected = f'{given} r = cast(x, dtype="bf16") y = expert_linear(r, w, e, out_dtype="f32") return y }}'
    becomes(RoundOperands(frozenset(kinds), of_experts=32), before, expected)
    stays(RoundOperands(frozenset(kinds)), before)


@pytest.mark.parametrize(
    ("depth", "w", "made"),
    [
        (64, "q: u8[3, 4, 32], s: bf16[3, 4, 4]", 'w = dequantize(q, s, bits=4, group=16, kind="e2m1")'),
        (64, "q: u8[3, 4, 32], s: bf16[3, 4, 4]", "w = dequantize(q, s, bits=4, group=16)"),
        (100, "q: i8[3, 4, 100], s: f32[3, 4, 1]", "w = dequantize(q, s)"),
        (100, "q: e4m3[3, 4, 100], s: f32[3, 4, 1]", 'w = dequantize(q, s, kind="e4m3")'),
        (100, "w: bf16[3, 4, 100]", ""),
    ],
    ids=["groups of 16 floats", "groups of 16 integers", "depth of integers", "depth of floats", "depth of bf16"],
)
def test_rows_of_experts_that_no_tile_multiplies_stay(stays: Callable[..., None], depth: int, w: str, made: str) -> None:
    rows = f"func main(x: f32[n, {depth}], {w}, e: i32[n]) -> f32[n, 4]"
    kinds = frozenset([Kind.INT, Kind.E4M3, Kind.E2M1])
    stays(RoundOperands(kinds, of_experts=32), f'{rows} {{ {made} y = expert_linear(x, w, e, tolerates="bf16") return y }}')


@pytest.mark.parametrize("kinds", [frozenset([Kind.E4M3]), frozenset([Kind.INT])], ids=["floats", "integers"])
@pytest.mark.parametrize("tolerates", [True, False])
def test_rows_beside_floats_of_eight_bits_are_rounded_if_they_tolerate_it(
    becomes: Callable[..., None], kinds: frozenset[Kind], tolerates: bool
) -> None:
    said = ', tolerates="bf16"' if tolerates else ""
    text = """
        func main(x: f32[n, 8], q: e4m3[4, 8], s: f32[4, 1]) -> f32[n, 4] {{
          w = dequantize(q, s, kind="e4m3")
          {}
          return y
        }}
    """
    rounded = 'r = cast(x, dtype="bf16")\n y = linear(r, w, out_dtype="f32")'
    plain = f"y = linear(x, w{said})"
    becomes(RoundOperands(kinds), text.format(plain), text.format(rounded if tolerates and Kind.E4M3 in kinds else plain))
