"""Every loop nest is classified by the kind of its computation, which decides how it may fuse."""

from __future__ import annotations

import pytest

from compiler.ir.equal import assert_equal
from compiler.ir.text.parser import parse
from compiler.passes.fusion.annotate_patterns import annotate_patterns
from compiler.passes.legalize import legalize

KINDS = {
    "elementwise": "for i in n, j in m { B[i, j] = exp(A[i, j]) + A[i, j] }",
    "broadcast": "for i in n, j in m { B[i, j] = A[i, j] * V[j] }",
    "injective": "for i in n, j in m { B[i, j] = A[i, m - j - 1] }",
    "reduction": "for i in n, j in m { B[i, j] = max(r in m) A[i, r] }",
    "product": "for i in n, j in m { B[i, j] = contract(r in m) A[i, r] by W[r, j] }",
    "staged": """alloc global t: f32[n] {
        for i in n { t[i] = max(r in m) A[i, r] }
        for i in n, j in m { B[i, j] = A[i, j] - t[i] }
    }""",
    "opaque": "for i in n, j in m { B[i, j] = A[i, j] } for i in n, j in m { B[i, j] = B[i, j] + 1.0 }",
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind: str) -> None:
    module = parse(f"prim f(A: f32[n, m], V: f32[m], W: f32[m, m], out B: f32[n, m]) {{ {KINDS[kind]} }}")
    assert annotate_patterns(module).prim("f").attrs["pattern"] == kind


@pytest.mark.parametrize("value", ["sum(r in m) A[i, r] * W[r, j]", "sum(r in m) W[r, j] * A[i, r]"])
def test_a_sum_of_products_written_by_hand_is_a_contraction(value: str) -> None:
    text = "prim f(A: f32[n, m], W: f32[m, m], out B: f32[n, m]) {{ for i in n, j in m {{ B[i, j] = {} }} }}"
    expected = parse(text.format("contract(r in m) A[i, r] by W[r, j]"))
    assert_equal(annotate_patterns(parse(text.format(value))), annotate_patterns(expected))


def test_a_sum_of_squares_stays_a_fold() -> None:
    module = parse("prim f(A: f32[n, 4], out B: f32[n]) { for i in n { B[i] = sum(r in 4) A[i, r] * A[i, r] } }")
    assert annotate_patterns(module).prim("f").attrs["pattern"] == "reduction"


def test_a_store_that_misses_elements_is_opaque() -> None:
    module = parse("prim f(A: f32[n, 4], out B: f32[n, 4]) { for i in n, j in 3 { B[i, j] = A[i, j] } }")
    assert annotate_patterns(module).prim("f").attrs["pattern"] == "opaque"


def test_a_nest_that_reads_what_it_wrote_is_opaque() -> None:
    """A nest that reads its own output is opaque. An example is a running sum, whose expressions cannot move into another nest."""
    module = legalize(parse("func main(x: f32[t, 8]) -> object where t in 0..9 { dataflow { y = cumsum(x, axis=0) } return y }"))
    (prim,) = annotate_patterns(module).prim_functions.values()
    assert prim.attrs["pattern"] == "opaque"


def test_an_annotation_given_by_hand_stays() -> None:
    module = parse('prim f(A: f32[n], out B: f32[n]) attrs {pattern="opaque"} { for i in n { B[i] = A[i] } }')
    assert annotate_patterns(module) is module
