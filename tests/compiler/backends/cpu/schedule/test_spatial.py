"""Loop nests with independent iterations: with about as many iterations as a thread claims at a time, or as a vector has lanes, and with
indices that are read from memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiler.backends.cpu.schedule.spatial import CHUNK
from compiler.idioms.product import product_in
from compiler.idioms.spatial import match_spatial, stages
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.statements import For, LoopKind
from compiler.ir.loops.visit import walk_stmts
from compiler.ir.text.parser import parse


def f32(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_lengths_around_vectors_and_claims(agree: Callable[..., Any], length: int) -> None:
    agree("func main(x: f32[n]) -> object { y = exp(x) return y }", f32(length))


@pytest.mark.parametrize("shape", [(3, 0), (1, 1), (300, 40), (2, CHUNK + 3)])
def test_rows_of_any_shape(agree: Callable[..., Any], shape: tuple[int, int]) -> None:
    agree("func main(x: f32[n, m], y: f32[m]) -> object { z = multiply(x, y) return z }", f32(*shape), f32(shape[1]))


@pytest.mark.parametrize("n", [1, 5, 4096, 5000])
def test_short_rows_share_a_claim(agree: Callable[..., Any], n: int) -> None:
    agree("func main(x: f32[n, 3]) -> object { y = tanh(x) return y }", f32(n, 3))


def test_permuted_sliced_and_flipped(agree: Callable[..., Any]) -> None:
    program = """
    func main(x: f32[a, b, c]) -> object where b in 4.. {
      dataflow { y = permute_dims(x, axes=[2, 0, 1]) z = flip(y, axes=[0]) s = slice(z, axis=2, begin=1, stride=2) }
      return s
    }
    """
    agree(program, f32(5, 7, 19))


GATHER = """
func main(x: f32[n, m], i: i32[k]) -> object {{ y = call_tir @pick(x, i) -> f32[{out}] return y }}
prim pick(A: f32[n, m], I: i32[k], out B: f32[{out}]) {{ for i in {outer}, j in {inner} {{ {body} }} }}
"""


@pytest.mark.parametrize("rows", [True, False], ids=["a row per index", "an index per lane"])
def test_integers_read_from_memory(agree: Callable[..., Any], rows: bool) -> None:
    if rows:
        parts = {"out": "k, m", "outer": "k", "inner": "m", "body": "let p within 0..n - 1 = I[i] { B[i, j] = A[p, j] }"}
    else:
        parts = {"out": "n, k", "outer": "n", "inner": "k", "body": "let p within 0..m - 1 = I[j] { B[i, j] = A[i, p] }"}
    indices = np.array([3, 0, 4, 4, 1] * 5, np.int32)
    agree(GATHER.format(**parts), f32(5, 5), indices)


def test_outer_axes_are_parallel_and_the_innermost_is_vectors(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    kernel = kernels("func main(x: f32[n, m]) -> object { y = exp(x) return y }")["exp"]
    assert kernel.attrs["schedule"] == "spatial"
    loops = [s for s in walk_stmts(kernel.body) if isinstance(s, For)]
    assert loops[0].kind is LoopKind.PARALLEL and loops[-1].kind is LoopKind.VECTOR


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        ("for i in n { B[i] = A[i] }", True),
        ("for i in n { B[i] = B[i] + A[i] }", True),
        ("for i in n { B[i] = B[n - 1 - i] + A[i] }", False),  # Not independent: an iteration reads what another one writes.
        # Not independent: several iterations may add to one element.
        ("for i in n { let s within 0..n - 1 = S[i] { B[s] = B[s] + A[i] } }", False),
        # Not independent: the extent of the inner loop differs between iterations of the outer loop.
        ("for i in n { let p within 0..4 = 3 { for j in p { B[i] = A[j] } } }", False),
    ],
)
def test_what_is_independent(body: str, taken: bool) -> None:
    prim = parse(f"prim f(A: f32[n], S: i32[n], out B: f32[n]) {{ {body} }}").prim("f")
    assert (match_spatial(prim.body) is not None) is taken


def test_a_nest_that_no_rule_takes_still_runs(agree: Callable[..., Any]) -> None:
    """A recurrence has no schedule, so it runs as written, on one thread."""
    program = """
    func main(x: f32[n]) -> object { y = call_tir @running(x) -> f32[n] return y }
    prim running(A: f32[n], out B: f32[n]) { for i in n { B[i] = guard(1 <= i < n ? B[i - 1] : 0.0) * 0.5 + A[i] } }
    """
    agree(program, f32(50))


@pytest.mark.parametrize(
    "value", ["X[i, j] * 2.0", "sum(r in m) X[i, r] * X[j, r]", "contract(r in m) X[i, r] by X[j, r]"], ids=["elements", "rows", "product"]
)
def test_a_loop_may_end_where_an_outer_loop_says(agree: Callable[..., Any], value: str) -> None:
    """The extent of the inner loop depends on the outer one, so the elements are no rectangle of rows of equal length."""
    text = f"""
        func main(x: f32[n, m]) -> object {{ y = call_tir @lower(x) -> f32[n, n] return y }}
        prim lower(X: f32[n, m], out Y: f32[n, n]) {{
          for i in n, j in n {{ Y[i, j] = 0.0 }}
          for i in n, j in i + 1 {{ Y[i, j] = {value} }}
        }}
    """
    agree(text, np.random.default_rng(0).normal(size=(7, 9)).astype(np.float32))


def test_columns_whose_number_depends_on_the_row_are_no_product() -> None:
    text = (
        "prim f(X: f32[n, 8], W: f32[n, 8], out Y: f32[n, n]) { for i in n, j in EXTENT { Y[i, j] = contract(r in 8) X[i, r] by W[j, r] } }"
    )
    even, uneven = (parse(text.replace("EXTENT", extent)).prim("f") for extent in ("n", "i + 1"))
    assert product_in(even) is not None and product_in(uneven) is None


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        ("C[i, j] + contract(r in 8) X[i, r] by W[j, r]", True),
        ("contract(r in 8) C[i, r] by W[j, r]", False),
        ("C[i, 7 - j] + contract(r in 8) X[i, r] by W[j, r]", False),
    ],
)
def test_a_product_reads_no_element_that_another_iteration_writes(agree: Callable[..., Any], value: str, taken: bool) -> None:
    text = f"""
        impure func main(c: f32[n, 8], x: f32[n, 8], w: f32[8, 8]) -> object {{
          y = call_tir_inplace @f(c, x, w) [0] -> f32[n, 8]
          return y
        }}
        prim f(A: f32[n, 8], X: f32[n, 8], W: f32[8, 8], out C: f32[n, 8]) attrs {{inplace=[[0, 3]]}} {{
          for i in n, j in 8 {{ C[i, j] = {value} }}
        }}
    """
    assert (product_in(parse(text).prim("f")) is not None) is taken
    agree(text, f32(5, 8), f32(6, 8)[:5], f32(8, 8))


def test_a_sum_that_ends_where_a_loop_says_is_no_product(agree: Callable[..., Any]) -> None:
    text = """
        func main(x: f32[n, n], w: f32[n, m]) -> object { y = call_tir @f(x, w) -> f32[n, m] return y }
        prim f(X: f32[n, n], W: f32[n, m], out Y: f32[n, m]) { for i in n, j in m { Y[i, j] = sum(r in i + 1) X[i, r] * W[r, j] } }
    """
    agree(text, f32(7, 7), f32(7, 20))


def test_a_product_writes_each_element_once() -> None:
    text = "prim f(X: f32[n, 8], W: f32[8, 8], out C: f32[n, 8]) { for i in n, j in 8 { C[0, j] = contract(r in 8) X[i, r] by W[j, r] } }"
    assert product_in(parse(text.replace("C[0,", "C[i,")).prim("f")) is not None and product_in(parse(text).prim("f")) is None


@pytest.mark.parametrize(
    ("place", "are_apart"),
    [
        *[("i, j", True), ("j, i", True), ("n - 1 - i, j", True), ("i, 2*j + 1", True), ("i, j + 3", True), ("0, 8*i + j", True)],
        *[("0, n*j + i", True), ("0, 8*(n - 1 - i) + 7 - j", True)],
        *[("0, j", False), ("i, 0", False), ("i // 2, j", False), ("0, i + j", False), ("0, 7*i + j", False), ("i, j % 4", False)],
    ],
)
def test_iterations_are_independent_if_they_write_different_elements(place: str, are_apart: bool) -> None:
    """Of several iterations that write one element, the last one wins, so they must run in order."""
    text = f"prim f(X: f32[n, 8], out Y: f32[p, q]) {{ for i in n, j in 8 {{ Y[{place}] = X[i, j] }} }}"
    assert (match_spatial(parse(text).prim("f").body) is not None) is are_apart


@pytest.mark.parametrize(
    ("place", "are_apart"),
    [
        *[
            ("s, j", True),
            ("s, 7 - j", True),
            ("s // 16, 16*j + s % 16", True),
            ("s // 16, j + 8*(s % 16)", True),
            ("8*s, j + 1", True),
            ("l, 8*i + j", True),
        ],
        *[
            ("s, 0", False),
            ("s, j // 2", False),
            ("s // 16, 16*(j // 2) + s % 16", False),
            ("0, j", False),
            ("l, j", False),
            ("l, i", False),
        ],
        # Different slots name the same element here.
        *[("s // 2, j", False), ("s % 16, j", False), ("0, s + j", False), ("s // 16, j + s % 16", False), ("0, 8*i + s", False)],
    ],
)
def test_places_that_are_read_from_memory_differ_only_where_they_are_read(place: str, are_apart: bool) -> None:
    """Each iteration of `i` reads a slot, and all write to the same layer. Iterations of `j` that write one element must run in order."""
    body = f"for i in n {{ let l = L[0] {{ let s = S[i] {{ for j in 8 {{ Y[{place}] = X[i, j] }} }} }} }}"
    text = f"prim f(X: f32[n, 8], L: i64[1], S: i64[n], out Y: f32[p, q]) {{ {body} }}"
    assert (match_spatial(parse(text).prim("f").body) is not None) is are_apart


@pytest.mark.parametrize("place", ["s, 0", "s, j // 2"])
def test_the_last_of_several_iterations_that_write_to_a_slot_wins(agree: Callable[..., Any], place: str) -> None:
    text = f"""
        func main(x: f32[n, 64], slots: i32[n]) -> object {{ y = call_tir @f(x, slots) -> f32[n, 64] return y }}
        prim f(X: f32[n, 64], S: i32[n], out Y: f32[n, 64]) {{
          for i in n, j in 64 {{ Y[i, j] = 0.0 }}
          for i in n {{ let s within 0..n - 1 = S[i] {{ for j in 64 {{ Y[{place}] = X[i, j] }} }} }}
        }}
    """
    agree(text, f32(40, 64), np.random.default_rng(0).permutation(40).astype(np.int32))


@pytest.mark.parametrize(
    "body",
    [
        "for i in n { let s within 0..n - 1 = Y[i, 0] { for j in m { Y[s, j] = X[i, j] } } }",
        "for i in n { when Y[i, 0] < 1 { for j in m { Y[i, j] = X[i, j] } } }",
    ],
    ids=["an integer", "a condition"],
)
def test_an_iteration_that_reads_the_output_is_not_independent(body: str) -> None:
    text = f"prim f(X: i32[n, m], out Y: i32[n, m]) {{ {body} }}"
    others = text.replace("= Y[i, 0]", "= X[i, 0]").replace("when Y[", "when X[")
    assert match_spatial(parse(others).prim("f").body) is not None and match_spatial(parse(text).prim("f").body) is None


def test_an_integer_is_read_before_the_statements_that_use_it(agree: Callable[..., Any]) -> None:
    """The first of them changes the element from which the integer was read."""
    text = """
        func main(x: i32[1]) -> object { y = call_tir @f(x) -> i32[3] return y }
        prim f(X: i32[1], out Y: i32[3]) {
          Y[0] = X[0]
          let s within 0..100 = Y[0] { Y[0] = 7:i32 Y[1] = cast(i32, dim(s)) }
          Y[2] = 0:i32
        }
    """
    agree(text, np.array([5], np.int32))


def test_slots_that_share_a_row_are_written_in_order(agree: Callable[..., Any]) -> None:
    text = """
        func main(x: f32[n, 64], slots: i32[n]) -> object { y = call_tir @f(x, slots) -> f32[n, 64] return y }
        prim f(X: f32[n, 64], S: i32[n], out Y: f32[n, 64]) {
          for i in n, j in 64 { Y[i, j] = 0.0 }
          for i in n { let s within 0..n - 1 = S[i] { for j in 64 { Y[s // 8, j] = X[i, j] } } }
        }
    """
    agree(text, f32(400, 64), np.random.default_rng(0).permutation(400).astype(np.int32))


IN_PLACE = """
impure func main(x: i32[n, m]) -> object {{ y = call_tir_inplace @f(x) [0] -> i32[n, m] return y }}
prim f(X: i32[n, m], out Y: i32[n, m]) {{ {body} }}
"""


@pytest.mark.parametrize(
    ("shape", "body"),
    [
        ((1, 3), "let s within 0..100 = X[0, 0] { Y[0, 0] = 7:i32 Y[0, 1] = cast(i32, dim(s)) } Y[0, 2] = 0:i32"),
        ((3, 5000), "for i in n { let s within 0..100 = X[i, 0] { for j in m { Y[i, j] = cast(i32, dim(s + 1)) } } }"),
        ((3, 5000), "for i in n { when X[i, 0] < 50 { for j in m { Y[i, j] = 50:i32 } } }"),
        ((40, 300), "for i in n, j in m { Y[i, j] = X[n - 1 - i, j] }"),
        ((40, 300), "for i in n, j in m { Y[i, j] = X[i, j] * 2:i32 }"),
    ],
    ids=["a let around statements", "a let", "a condition", "other elements", "own elements"],
)
def test_a_call_in_place_reads_what_it_has_overwritten(agree: Callable[..., Any], shape: tuple[int, int], body: str) -> None:
    """The operand and the output are one memory, as in the interpreter: a statement reads what earlier ones have stored there."""
    agree(IN_PLACE.format(body=body), np.random.default_rng(0).integers(0, 50, shape).astype(np.int32))


@pytest.mark.parametrize(
    ("given", "value", "bounds"),
    [("i32", "S[i]", "within -8..7"), ("f32", "cast(i64, S[i])", "within 0..7")],
    ids=["negative integers", "rounded floats"],
)
def test_only_slots_are_taken_to_be_different(agree: Callable[..., Any], given: str, value: str, bounds: str) -> None:
    """Different negative integers name element 0 here, and different floats are cast to one integer."""
    text = f"""
        func main(x: f32[n, 64], s: {given}[n]) -> object {{ y = call_tir @f(x, s) -> f32[8, 64] return y }}
        prim f(X: f32[n, 64], S: {given}[n], out Y: f32[8, 64]) {{
          for i in 8, j in 64 {{ Y[i, j] = 0.0 }}
          for i in n {{ let s {bounds} = {value} {{ for j in 64 {{ Y[max(s, 0), j] = X[i, j] }} }} }}
        }}
    """
    *_, last = stages(parse(text).prim("f").body)
    assert match_spatial(last) is None
    numbers = np.random.default_rng(0).uniform(0 if given == "f32" else -8, 8, 400)
    agree(text, f32(400, 64), np.floor(numbers).astype(np.int32) if given == "i32" else numbers.astype(np.float32))
