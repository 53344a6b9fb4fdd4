"""Reductions along rows that are about as long as one vector or as several vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiler.ir.loops.buffers import Scope
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Apply, Load
from compiler.ir.loops.statements import Allocate, Store, Tile, When
from compiler.ir.loops.visit import walk_scalars, walk_stmts
from compiler.machine.intrinsics.prefetch import Prefetch

OPERATORS = {
    "softmax": "softmax(x)",
    "rms_norm": "rms_norm(x, w, eps=1.0e-5)",
    "layer_norm": "layer_norm(x, w, w, eps=1.0e-5)",
    "sum": "sum(x, axes=[-1])",
    "max": "max(x, axes=[-1])",
    "min": "min(x, axes=[-1], keepdims=true)",
    "mean": "mean(x, axes=[-1])",
}


def program(name: str) -> str:
    return f"func main(x: f32[n, k], w: f32[k]) -> object where k in 1.. {{ y = {OPERATORS[name]} return y }}"


def f32(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 1000])
@pytest.mark.parametrize("name", OPERATORS)
def test_lengths_around_the_vectors(agree: Callable[..., Any], name: str, length: int) -> None:
    agree(program(name), f32(3, length), f32(length), rtol=1e-5)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_row_has_the_same_bits_in_any_batch(agree: Callable[..., Any], name: str) -> None:
    x, w = f32(9, 77), f32(77)
    whole = agree(program(name), x, w)
    for rows in (slice(0, 1), slice(4, 9), slice(8, 9)):
        np.testing.assert_array_equal(agree(program(name), x[rows], w), whole[rows])


@pytest.mark.parametrize("name", ["max", "min", "softmax", "sum"])
def test_one_nan_is_seen_wherever_it_stands(agree: Callable[..., Any], name: str) -> None:
    x = f32(70, 70)
    x[np.arange(70), np.arange(70)] = np.nan
    assert np.isnan(agree(program(name), x, f32(70))).all()


@pytest.mark.parametrize("shape", [(70,), (2, 3, 70), (1, 1, 1, 5)])
def test_ranks(agree: Callable[..., Any], shape: tuple[int, ...]) -> None:
    dims = ", ".join("abcd"[: len(shape)])
    agree(f"func main(x: f32[{dims}]) -> object where {'abcd'[len(shape) - 1]} in 1.. {{ y = softmax(x) return y }}", f32(*shape))


@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_numbers_of_a_row_stay_in_registers(kernels: Callable[..., dict[str, PrimFunc]], name: str) -> None:
    """One pass over a row computes all stages and keeps the results of stages in registers, without a workspace in memory."""
    kernel = kernels(program(name))[name]
    assert kernel.attrs["schedule"] == "rows"
    buffers = [s.buffer for s in walk_stmts(kernel.body) if isinstance(s, Allocate)]
    assert buffers and all(b.scope is Scope.LOCAL for b in buffers)


def test_every_stage_that_reads_the_rows_fetches_the_next(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    """In a norm, each stage that reads the rows prefetches the next row. A kernel that only sums computes too little between its reads for
    prefetches to arrive in time, so it does not prefetch."""

    def fetched(name: str) -> int:
        kernel = kernels(program(name).replace("[n, k]", "[n, 64]").replace("[k]", "[64]").replace(" where k in 1..", ""))[name]
        return sum(isinstance(s, Tile) and isinstance(s.op, Prefetch) for s in walk_stmts(kernel.body))

    assert [fetched(name) for name in ("layer_norm", "rms_norm", "sum")] == [2 + 2, 1 + 2, 0]


@pytest.mark.parametrize("bits", ["8", "16", "16, cap=2.0"])
@pytest.mark.parametrize("group", [0, 32])
def test_a_norm_and_its_rounding_are_one_visit_to_a_row(
    agree: Callable[..., Any], kernels: Callable[..., dict[str, PrimFunc]], group: int, bits: str
) -> None:
    text = f"""
        func main(x: f32[n, 96], w: f32[96]) -> object {{
          dataflow {{ y = rms_norm(x, w, eps=1.0e-5) rows = quantize_rows(y, bits={bits}, group={group}) z = rows.0 }}
          return z
        }}
    """
    (kernel,) = kernels(text).values()
    assert kernel.attrs["schedule"] == "rows"
    assert all(s.buffer.scope is Scope.LOCAL for s in walk_stmts(kernel.body) if isinstance(s, Allocate))
    x, w = f32(5, 96), f32(96)
    np.testing.assert_array_equal(agree(text, x[2:3], w), agree(text, x, w)[2:3])


def test_the_cap_of_a_row_is_found_in_the_visit_that_rounds_it(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    """The cap is one number per row, in a thread's own memory; the groups of the row read it there."""
    text = "func main(x: f32[n, 96]) -> object { rows = quantize_rows(x, bits=16, group=32, cap=2.0) z = rows.0 return z }"
    (kernel,) = kernels(text).values()
    assert kernel.attrs["schedule"] == "rows"
    assert all(s.buffer.scope is Scope.LOCAL for s in walk_stmts(kernel.body) if isinstance(s, Allocate))


def test_a_choice_for_a_whole_row_is_made_once(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    """The kernel decides once per row whether it computes the row's second plane or clears it."""
    (kernel,) = kernels("func main(x: f32[n, 96]) -> object { rows = row_planes(x) z = rows.0 return z }").values()
    (choice,) = (s for s in walk_stmts(kernel.body) if isinstance(s, When) and isinstance(s.cond, Load))
    assert choice.orelse is not None and any(isinstance(s, Store) for s in walk_stmts(choice.orelse))
    assert not any(isinstance(s, Load | Apply) for s in walk_scalars(choice.orelse))


@pytest.mark.parametrize("read", ["n - 1 - i", "min(i + 1, n - 1)", "(i + 5) % n"])
def test_a_stage_may_read_an_output_of_other_rows(agree: Callable[..., Any], read: str) -> None:
    """The second stage reads the first output of other rows, so it must not run before all rows of the first output are written."""
    text = f"""
        func main(x: f32[n, 16]) -> object {{ t = call_tir @f(x) -> (f32[n], f32[n]) y = t.1 return y }}
        prim f(X: f32[n, 16], out A: f32[n], out B: f32[n]) {{
          for i in n {{ A[i] = sum(r in 16) X[i, r] }}
          for i in n {{ B[i] = A[{read}] }}
        }}
    """
    agree(text, f32(200, 16), rtol=1e-4)


def test_the_best_experts_of_a_token_are_found_in_one_pass(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    found = kernels("func main(x: f32[t, 3]) -> object { y = top_experts(x, k=3) return y }")
    assert [prim.attrs["schedule"] for prim in found.values()] == ["rows"]


LONG = "for i in n {{ S[i] = sum(r in {}) exp(X[i, r]) }}"
LAST = "for i in n, j in 16 { Y[i, j] = exp(X[i, j]) / S[i] }"


@pytest.mark.parametrize(
    "body",
    [
        LONG.format(8) + LAST,
        LONG.format(16) + "for i in n, j in 16 { Y[i, j] = 1.0 }" + LAST,
        "for i in n, j in 16 { T[i, j] = X[i, j] }"
        + LONG.format(16).replace("X", "T")
        + "for i in n, j in 16 { T[i, j] = 1.0 }"
        + LAST.replace("X", "T"),
    ],
    ids=["the fold has fewer values", "a stage overwrites the values", "a stage changes an operand"],
)
def test_the_last_stage_reads_stored_values_only_if_they_are_its_own(agree: Callable[..., Any], body: str) -> None:
    text = f"""
        func main(x: f32[n, 16]) -> object {{ t = call_tir @f(x) -> (f32[n, 16], f32[n], f32[n, 16]) y = t.2 return y }}
        prim f(X: f32[n, 16], out T: f32[n, 16], out S: f32[n], out Y: f32[n, 16]) {{
          for i in n, j in 16 {{ T[i, j] = X[i, j] }} {body}
        }}
    """
    agree(text, f32(20, 16), rtol=1e-5)


@pytest.mark.parametrize(
    ("reduced", "added", "written"),
    [("1024", "600", "1024"), ("1024", "1024", "512"), ("i + 1", "i + 1", "1024")],
)
def test_stages_with_other_lengths_are_no_softmax(agree: Callable[..., Any], reduced: str, added: str, written: str) -> None:
    """A softmax reduces and writes the same elements of a row."""
    text = f"""
        func main(x: f32[n, 1024]) -> object {{ y = call_tir @f(x) -> f32[n, {written}] return y }}
        prim f(X: f32[n, 1024], out Y: f32[n, {written}]) {{
          alloc global M: f32[n] {{
            alloc global S: f32[n] {{
              for i in n {{ M[i] = max(r in {reduced}) X[i, r] }}
              for i in n {{ S[i] = sum(r in {added}) exp(X[i, r] - M[i]) }}
              for i in n, j in {written} {{ Y[i, j] = X[i, j] / S[i] }}
            }}
          }}
        }}
    """
    agree(text, f32(5, 1024), rtol=1e-5)


SUMS = "alloc global S: f32[n] { for i in n { S[i] = sum(r in m) X[n - 1 - i, r] } for i in n, j in m { Y[i, j] = S[i] + X[i, j] } }"
SOFTMAX = """alloc global M: f32[n] { alloc global S: f32[n] {
  for i in n { M[i] = max(r in m) X[i, r] }
  for i in n { S[i] = sum(r in m) exp(X[i, r] - M[i]) }
  for i in n, j in m { Y[i, j] = exp(X[i, j] - M[i]) / S[i] + X[i, j] }
} }"""


@pytest.mark.parametrize("columns", [8, 600])
@pytest.mark.parametrize("body", [SUMS, SOFTMAX], ids=["sums of other rows", "stored values"])
def test_rows_that_overwrite_what_they_read(agree: Callable[..., Any], body: str, columns: int) -> None:
    text = f"""
        impure func main(x: f32[n, {columns}]) -> object {{ y = call_tir_inplace @f(x) [0] -> f32[n, {columns}] return y }}
        prim f(X: f32[n, m], out Y: f32[n, m]) {{ {body} }}
    """
    agree(text, np.random.default_rng(0).normal(size=(7, columns)).astype(np.float32))
