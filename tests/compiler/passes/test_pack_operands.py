"""The right operand of a product is packed into panels of columns."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from compiler.driver import compile_module
from compiler.ir.text.parser import parse
from compiler.machine.formats import PAIRS
from compiler.machine.intrinsics.dot_bf16 import DotBf16
from compiler.machine.products import ProductTile
from compiler.passes.base import Pass
from compiler.passes.pack_operands import PackOperands


def test_panels_of_columns(becomes: Callable[[Pass, str, str], None]) -> None:
    """Six columns are packed into two panels of four columns; the second panel is padded."""
    before = """
        func main(x: f32[n, 8], w: f32[6, 8]) -> f32[n, 6] { y = call_tir @mm(x, w) -> f32[n, 6] return y }
        prim mm(A: f32[n, 8], B: f32[6, 8], out C: f32[n, 6]) { for i in n, j in 6 { C[i, j] = contract(r in 8) A[i, r] by B[j, r] } }
    """
    expected = """
        func main(x: f32[n, 8], w: f32[6, 8]) -> f32[n, 6] {
          p = call_tir @pack(w) -> f32[2, 8, 4]
          y = call_tir @mm_packed(x, p) -> f32[n, 6]
          return y
        }
        prim mm(A: f32[n, 8], B: f32[6, 8], out C: f32[n, 6]) { for i in n, j in 6 { C[i, j] = contract(r in 8) A[i, r] by B[j, r] } }
        prim pack(w: f32[6, 8], out p: f32[2, 8, 4]) {
          for i in 2, j in 8, k in 4 { p[i, j, k] = guard(0 <= 4*i + k < 6 ? w[4*i + k, j] : 0.0) }
        }
        prim mm_packed(A: f32[n, 8], B: f32[2, 8, 4], out C: f32[n, 6]) {
          for i in n, j in 6 { C[i, j] = contract(r in 8) A[i, r] by B[j // 4, r, j % 4] }
        }
    """
    becomes(PackOperands(4), before, expected)


def test_what_is_no_product_stays(stays: Callable[[Pass, str], None]) -> None:
    stays(
        PackOperands(4),
        """
        func main(x: f32[n, 8]) -> f32[n] { y = call_tir @total(x) -> f32[n] return y }
        prim total(A: f32[n, 8], out B: f32[n]) { for i in n { B[i] = sum(r in 8) A[i, r] } }
        """,
    )


def test_pairs_of_bf16(becomes: Callable[[Pass, str, str], None]) -> None:
    """For a machine that multiplies pairs of bf16, each pair in a panel consists of two elements that are adjacent along the contracted
    axis."""
    before = """
        func main(x: bf16[n, 8], w: bf16[6, 8]) -> f32[n, 6] { y = call_tir @mm(x, w) -> f32[n, 6] return y }
        prim mm(A: bf16[n, 8], B: bf16[6, 8], out C: f32[n, 6]) {
          for i in n, j in 6 { C[i, j] = contract(r in 8) cast(f32, A[i, r]) by cast(f32, B[j, r]) }
        }
    """
    expected = """
        func main(x: bf16[n, 8], w: bf16[6, 8]) -> f32[n, 6] {
          p = call_tir @pack(w) -> bf16[2, 4, 8]
          y = call_tir @mm_packed(x, p) -> f32[n, 6]
          return y
        }
        prim mm(A: bf16[n, 8], B: bf16[6, 8], out C: f32[n, 6]) {
          for i in n, j in 6 { C[i, j] = contract(r in 8) cast(f32, A[i, r]) by cast(f32, B[j, r]) }
        }
        prim pack(w: bf16[6, 8], out p: bf16[2, 4, 8]) {
          for i in 2, j in 4, k in 8 { p[i, j, k] = guard(0 <= 4*i + k // 2 < 6 ? w[4*i + k // 2, 2*j + k % 2] : 0.0:bf16) }
        }
        prim mm_packed(A: bf16[n, 8], B: bf16[2, 4, 8], out C: f32[n, 6]) {
          for i in n, j in 6 {
            C[i, j] = contract(r in 8) cast(f32, A[i, r]) by cast(f32, stored(pairs, r, B[j // 4, r // 2, 2*(j % 4) + r % 2]))
          }
        }
    """
    becomes(PackOperands(4, (ProductTile(DotBf16(rows=1, columns=4), PAIRS, depth=2),)), before, expected)


def test_an_extent_that_only_a_packed_operand_defines_is_passed(becomes: Callable[[Pass, str, str], None]) -> None:
    """The product declares k as its own, although its caller knows that k is 8. No extent of the panels is k."""
    product = """
        prim mm(A: bf16[n, 8], B: bf16[m, k], out C: f32[n, m]) {
          for i in n, j in m { C[i, j] = contract(r in 8) cast(f32, A[i, r]) by cast(f32, B[j, r]) }
        }
    """
    before = f"""
        func main(x: bf16[n, 8], w: bf16[m, 8]) -> f32[n, m] {{ y = call_tir @mm(x, w) -> f32[n, m] return y }}
        {product}
    """
    expected = f"""
        func main(x: bf16[n, 8], w: bf16[m, 8]) -> f32[n, m] {{
          p = call_tir @pack(w) -> bf16[(m + 3) // 4, 4, 8]
          y = call_tir @mm_packed(x, p, 8) -> f32[n, m]
          return y
        }}
        {product}
        prim pack(w: bf16[m, 8], out p: bf16[(m + 3) // 4, 4, 8]) {{
          for i in (m + 3) // 4, j in 4, k in 8 {{
            p[i, j, k] = guard(0 <= 4*i + k // 2 < m ? w[4*i + k // 2, 2*j + k % 2] : 0.0:bf16)
          }}
        }}
        prim mm_packed(A: bf16[n, 8], B: bf16[(m + 3) // 4, k // 2, 8], k: dim, out C: f32[n, m]) where k in 0.. {{
          for i in n, j in m {{
            C[i, j] = contract(r in 8) cast(f32, A[i, r]) by cast(f32, stored(pairs, r, B[j // 4, r // 2, 2*(j % 4) + r % 2]))
          }}
        }}
    """
    becomes(PackOperands(4, (ProductTile(DotBf16(rows=1, columns=4), PAIRS, depth=2),)), before, expected)


@pytest.mark.parametrize(
    "call",
    [
        "x: bf16[4, 8], w: bf16[17, n, k], e: i64[4]) -> object { y = expert_linear(x, w, e",
        "x: bf16[4, 8], w: bf16[n, k]) -> object { y = linear(x, w",
    ],
    ids=["expert_linear", "linear"],
)
def test_a_product_with_an_operand_of_unproved_extents_compiles(call: str) -> None:
    compile_module(parse(f'func main({call}, out_dtype="f32") return y }}'))
