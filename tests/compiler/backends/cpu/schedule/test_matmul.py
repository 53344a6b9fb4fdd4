"""Matrix products of sizes that leave every possible remainder of a tile, with every kind of operand. A row of the result has the same bits
in any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiler.idioms.product import product_in
from compiler.ir.dims import Dim
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.statements import Allocate, LoopKind
from compiler.ir.loops.visit import walk_stmts
from compiler.ir.text.parser import parse

PLAIN = "func main(x: f32[m, k], w: f32[n, k]) -> object { y = linear(x, w) return y }"
FIXED = "func main(x: f32[m, 24], w: f32[40, 24]) -> object { y = linear(x, w) return y }"
TRANSPOSED = "func main(x: f32[m, k], w: f32[k, n]) -> object { y = matmul(x, w) return y }"
BATCHED = "func main(x: f32[b, m, k], w: f32[b, k, n]) -> object { y = matmul(x, w) return y }"
EPILOGUE = """
func main(x: f32[m, k], w: f32[n, k], bias: f32[n], residual: f32[m, n]) -> object {
  dataflow { y = linear(x, w) z = add(y, bias) a = gelu(z) r = add(a, residual) }
  return r
}
"""
SUMMED = "func main(x: f32[m, k, 1], w: f32[k, n]) -> object { dataflow { p = multiply(x, w) y = sum(p, axes=[1]) } return y }"
GATED = """
func main(x: f32[m, k], gate: f32[n, k], up: f32[n, k]) -> object {
  dataflow { g = linear(x, gate) u = linear(x, up) s = silu(g) y = multiply(s, u) }
  return y
}
"""
HALF = "func main(x: bf16[m, k], w: bf16[n, k]) -> object { y = linear(x, w) return y }"


def f32(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("m", [1, 2, 3, 7, 8, 9, 17, 257])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (5, 31), (64, 32), (33, 65)])
def test_sizes_around_the_tile(agree: Callable[..., Any], m: int, k: int, n: int) -> None:
    agree(PLAIN, f32(m, k), f32(n, k))


@pytest.mark.parametrize("m", [0, 1, 5])
def test_extents_known_when_compiled(agree: Callable[..., Any], m: int) -> None:
    agree(FIXED, f32(m, 24), f32(40, 24))


@pytest.mark.parametrize(("program", "shapes"), [(TRANSPOSED, [(5, 7), (7, 33)]), (BATCHED, [(3, 5, 7), (3, 7, 33)])])
def test_layouts(agree: Callable[..., Any], program: str, shapes: list[tuple[int, ...]]) -> None:
    agree(program, *(f32(*s) for s in shapes))


@pytest.mark.parametrize("m", [1, 4, 11])
def test_epilogues(agree: Callable[..., Any], m: int) -> None:
    agree(EPILOGUE, f32(m, 19), f32(35, 19), f32(35), f32(m, 35))


@pytest.mark.parametrize("m", [1, 4, 11])
def test_two_products_over_the_same_rows(agree: Callable[..., Any], m: int) -> None:
    agree(GATED, f32(m, 19), f32(35, 19), f32(35, 19) * 0.5, rtol=1e-4)


def test_a_row_has_the_same_bits_in_any_batch(agree: Callable[..., Any]) -> None:
    x, w = f32(23, 50), f32(37, 50)
    whole = agree(PLAIN, x, w)
    for rows in (slice(0, 1), slice(3, 5), slice(2, 19), slice(15, 23)):
        np.testing.assert_array_equal(agree(PLAIN, x[rows], w), whole[rows])


def test_bf16_rows_have_the_same_bits_in_any_batch(compute: Callable[..., Any]) -> None:
    """The result of a bf16 row has the same bits in any batch, also on a matrix unit if the machine has one."""
    import ml_dtypes

    x, w = (a.astype(ml_dtypes.bfloat16) for a in (f32(23, 64), f32(48, 64)))
    whole = compute(HALF, x, w, rtol=2e-2)
    for rows in (slice(0, 1), slice(3, 5), slice(2, 19)):
        np.testing.assert_array_equal(compute(HALF, x[rows], w, rtol=2e-2), whole[rows])


# --- structure of scheduled kernels --------------------------------------------------------------------------------------


def test_gate_and_up_are_one_kernel_over_one_visit_to_the_rows(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    scheduled = [p for p in kernels(GATED).values() if p.attrs["schedule"] == "matmul"]
    assert len(scheduled) == 1
    assert [d.name for d in scheduled[0].outputs] and len(scheduled[0].outputs) == 1


def test_a_product_of_elements_that_moves_into_a_sum_is_a_product_of_matrices(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    assert "matmul" in {p.attrs["schedule"] for p in kernels(SUMMED).values()}


def test_a_single_row_takes_two_panels_at_once(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    """With a single row, a product computes two panels at once, because one panel has too few accumulators to hide the latency of
    additions. Two products of the same row have enough accumulators with one panel each."""
    for program, widths in ((PLAIN, {1, 2}), (GATED, {1})):
        (kernel,) = [p for p in kernels(program).values() if p.attrs.get("schedule") == "matmul"]
        rows_of_one = [s.buffer.shape for s in walk_stmts(kernel.body) if isinstance(s, Allocate) and s.buffer.shape[:-2] == (Dim.of(1),)]
        vectors = [shape[1].const for shape in rows_of_one]
        assert {v // min(vectors) for v in vectors} == widths


def test_panels_are_shared_among_threads_and_columns_are_lanes(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    (kernel,) = [p for p in kernels(PLAIN).values() if p.attrs["schedule"] == "matmul"]
    kinds = {s.kind for s in walk_stmts(kernel.body) if hasattr(s, "kind")}
    assert {LoopKind.PARALLEL, LoopKind.VECTOR} <= kinds


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        ("contract(r in k) A[i, r] by B[j, r]", True),
        ("contract(r in k) A[i, r] by B[j, r] * 2.0", True),
        ("max(contract(r in k) A[i, r] by B[j, r], 0.0)", True),
        ("contract(r in k) B[j, r] by A[i, r]", False),  # the second factor, here A, must have the innermost axis j
        ("contract(r in k) A[i, r] * 2.0 by B[j, r]", False),  # each panel would multiply by the factor 2 again
        ("(contract(r in k) A[i, r] by B[j, r]) + (contract(r in 3) A[i, r] by B[j, r])", False),
        ("(contract(r in k) A[i, r] by B[j, r]) + (max(r in k) A[i, r])", False),
        ("sum(r in k) A[i, r] * B[j, r]", False),
    ],
)
def test_what_is_a_product(value: str, taken: bool) -> None:
    prim = parse(f"prim f(A: f32[m, k], B: f32[n, k], out C: f32[m, n]) {{ for i in m, j in n {{ C[i, j] = {value} }} }}").prim("f")
    assert (product_in(prim) is not None) is taken
