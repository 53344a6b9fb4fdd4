"""Kernels use non-temporal stores for results that are larger than the caches. If the size of a result is unknown at compile time, the
kernel tests the size at run time. Both kinds of stores write the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiler.backends.cpu.schedule import streaming
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.statements import Tile, When
from compiler.ir.loops.visit import walk_stmts
from compiler.machine.intrinsics.stream import Stream

LARGEST = streaming.LARGE // 4  # number of f32 elements in the largest result that is written by normal stores


def program(call: str, rows: str, length: str = "80", dtype: str = "f32") -> str:
    return f"func main(x: {dtype}[{rows}, {length}], w: {dtype}[{length}]) -> object {{ y = {call} return y }}"


def ways(kernels: dict[str, PrimFunc]) -> tuple[int, int]:
    """Return (number of non-temporal stores in the code, number of those that run only if a test of the size at run time succeeds)."""
    stmts = [s for kernel in kernels.values() for s in walk_stmts(kernel.body)]
    streams = [s for s in stmts if isinstance(s, Tile) and isinstance(s.op, Stream)]
    return len(streams), len([s for s in stmts if isinstance(s, When) and any(t in walk_stmts(s) for t in streams)])


def test_the_size_is_asked_for_where_it_is_not_known(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    assert ways(kernels(program("add(x, w)", "s"))) == (1, 1)
    assert ways(kernels(program("add(x, w)", "1000"))) == (0, 0)
    assert ways(kernels(program("add(x, w)", str(LARGEST // 80 + 1)))) == (1, 0)
    assert ways(kernels(program("add(x, w)", "1000", str(LARGEST // 1000)))) == (0, 0)


def test_what_is_read_again_stays_in_the_cache(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    text = """
    func main(x: f32[s, 80]) -> object { y = call_tir @scaled(x) -> (f32[s, 80], f32[s, 80]) return y }
    prim scaled(A: f32[s, 80], out B: f32[s, 80], out C: f32[s, 80]) {
      alloc global total: f32[s] {
        for i in s, j in 80 { B[i, j] = A[i, j] + 1.0 }
        for i in s { total[i] = sum(j in 80) B[i, j] }
        for i in s, j in 80 { C[i, j] = B[i, j] * total[i] }
      }
    }
    """
    assert kernels(text)["scaled"].attrs["schedule"] == "rows"
    assert ways(kernels(text)) == (1, 1)


def test_a_little_in_a_large_tensor(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    text = """
    func main(x: f32[9, 80], at: i32[9]) -> object { y = call_tir @keep(x, at) -> f32[1000000, 80] return y }
    prim keep(A: f32[9, 80], I: i32[9], out B: f32[1000000, 80]) {
      for i in 9, j in 80 { let p within 0..999999 = I[i] { B[p, j] = A[i, j] } }
    }
    """
    assert ways(kernels(text)) == (0, 0)


def test_vectors_that_are_not_lines(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    assert ways(kernels(program("permute_dims(x, axes=[1, 0])", "s"))) == (1, 1)  # reads columns but writes whole rows
    assert ways(kernels(program("add(x, w)", "s", dtype="bf16"))) == (0, 0)


@pytest.mark.parametrize(("call", "length"), [("add(x, w)", 72), ("layer_norm(x, w, w, eps=1.0e-5)", 72), ("softmax(x)", 1100)])
def test_the_same_bits_either_way(agree: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, call: str, length: int) -> None:
    """Results have the same bits with non-temporal stores (8 rows) and with normal ones (6 rows). With rows of 72 elements, only every
    second row begins at a cache line."""
    monkeypatch.setattr(streaming, "LARGE", 4 * 7 * length)
    text = program(call, "s", str(length))
    x, w = (np.random.default_rng(length).normal(size=shape).astype(np.float32) for shape in ((8, length), (length,)))
    np.testing.assert_array_equal(agree(text, x, w)[:6], agree(text, x[:6], w))
