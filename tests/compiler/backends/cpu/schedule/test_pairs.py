"""bf16 products by tiles that multiply pairs of numbers, for sizes that leave every possible remainder of a tile and with every kind of
operand. A row of the result has the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from compiler.backends.cpu.pipeline import pipeline
from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.dtypes import DType
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.text.printer import print_module
from compiler.machine.intrinsics.amx import AmxBf16
from compiler.machine.target import GPU, NAMED, get

PLAIN = 'func main(x: bf16[m, k], w: bf16[n, k]) -> object { y = linear(x, w, out_dtype="f32") return y }'
FIXED = 'func main(x: bf16[m, 64], w: bf16[n, 64]) -> object { y = linear(x, w, out_dtype="f32") return y }'
RANKS = "func main(x: bf16[b, m, 64], w: bf16[40, 64]) -> object { y = linear(x, w) return y }"
BATCHED = "func main(x: bf16[b, m, 64], w: bf16[b, 64, n]) -> object { y = matmul(x, w) return y }"
GATED = """
func main(x: bf16[m, 64], gate: bf16[n, 64], up: bf16[n, 64], residual: f32[m, n]) -> object {
  dataflow {
    g = linear(x, gate, out_dtype="f32") u = linear(x, up, out_dtype="f32") s = silu(g) y = multiply(s, u) r = add(y, residual)
  }
  return r
}
"""
TOLERANT = 'func main(x: f32[m, 64], w: bf16[40, 64]) -> object { y = linear(x, w, tolerates="bf16") return y }'


def bf16(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32).astype(DType.BF16.numpy)


@pytest.mark.parametrize("m", [0, 1, 2, 3, 7, 8, 15, 17, 33, 257])
@pytest.mark.parametrize("n", [1, 32, 65])
def test_sizes_around_the_tile(compute: Callable[..., Any], m: int, n: int) -> None:
    compute(FIXED, bf16(m, 64), bf16(n, 64))


@pytest.mark.parametrize("k", [1, 2, 31, 64])
def test_depths_that_are_not_known_to_be_even(compute: Callable[..., Any], k: int) -> None:
    compute(PLAIN, bf16(5, k), bf16(33, k))


def test_rows_of_several_axes(compute: Callable[..., Any]) -> None:
    compute(RANKS, bf16(3, 5, 64), bf16(40, 64), rtol=1e-2)
    compute(BATCHED, bf16(3, 5, 64), bf16(3, 64, 33), rtol=1e-2)


@pytest.mark.parametrize("m", [1, 4, 11])
def test_two_products_over_the_same_rows(compute: Callable[..., Any], m: int) -> None:
    residual = np.random.default_rng(0).normal(size=(m, 35)).astype(np.float32)
    compute(GATED, bf16(m, 64), bf16(35, 64), bf16(35, 64), residual, rtol=1e-4)


@pytest.mark.parametrize("n", [37, 32003])
def test_a_row_has_the_same_bits_in_any_batch(compute: Callable[..., Any], n: int) -> None:
    x, w = bf16(33, 64), bf16(n, 64)
    whole = compute(FIXED, x, w)
    for rows in (slice(0, 1), slice(3, 5), slice(2, 17), slice(15, 32)):
        np.testing.assert_array_equal(compute(FIXED, x[rows], w), whole[rows])


def test_rows_are_rounded_where_the_program_tolerates_it(compute: Callable[..., Any]) -> None:
    """Rows are rounded to bf16 if the program tolerates it and if the product becomes faster. The rounding of rows changes results less
    than the rounding of the weights to bf16 did."""
    x, w = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32), bf16(40, 64)
    compute(TOLERANT, x, w, rtol=4e-3)


# --- structure of scheduled kernels --------------------------------------------------------------------------------------


def paired(kernels: Callable[..., dict[str, PrimFunc]], program: str, target: str) -> list[PrimFunc]:
    return [p for p in kernels(program, target).values() if p.attrs.get("schedule") == "pairs"]


@pytest.mark.parametrize("program", [FIXED, RANKS, BATCHED, GATED, TOLERANT])
def test_machines_that_gain_by_it_multiply_pairs(kernels: Callable[..., dict[str, PrimFunc]], program: str) -> None:
    assert len(paired(kernels, program, "avx512-bf16-amd")) == 1
    assert not paired(kernels, program, "avx512-vnni-bf16") and not paired(kernels, program, "x86-64-v3")


def test_an_odd_depth_stays_with_single_products(kernels: Callable[..., dict[str, PrimFunc]]) -> None:
    assert not paired(kernels, PLAIN, "avx512-bf16-amd")


@pytest.fixture(scope="module")
def meaning() -> Callable[..., Any]:
    """Return a function that interprets a scheduled program. If two targets have the same scheduled program, the function interprets it
    only once."""
    known: dict[tuple[str, int], Any] = {}

    def call(module: IRModule, args: tuple[Any, ...]) -> Any:
        key = print_module(module), id(args)
        if key not in known:
            known[key] = Interpreter(module).call("main", *args)
        return known[key]

    return call


@pytest.mark.parametrize("target", sorted(t.name for t in NAMED.values() if t.system != GPU))
@pytest.mark.parametrize(
    ("program", "args"),
    [(FIXED, (bf16(11, 64), bf16(35, 64))), (GATED, (bf16(11, 64), bf16(35, 64), bf16(35, 64), np.ones((11, 35), np.float32)))],
    ids=["one sum", "two sums"],
)
def test_what_is_scheduled_computes_the_same(meaning: Callable[..., Any], target: str, program: str, args: tuple[Any, ...]) -> None:
    """Scheduled kernels compute what the unscheduled program computes. The interpreter runs them, so the test covers targets that this
    machine cannot run."""
    module = parse(program)
    scheduled = pipeline(get(target)).until("schedule_kernels")(module)
    np.testing.assert_allclose(meaning(scheduled, args), meaning(module, args), rtol=1e-4, atol=1e-4)


# --- products on matrix units --------------------------------------------------------------------------------------------

DEEP = """
func main(x: bf16[m, 288], gate: bf16[n, 288], up: bf16[n, 288], residual: f32[m, n]) -> object {
  dataflow {
    g = linear(x, gate, out_dtype="f32") u = linear(x, up, out_dtype="f32") s = silu(g) y = multiply(s, u) r = add(y, residual)
  }
  return r
}
"""


def test_blocks_of_rows_and_of_depth_compute_the_same() -> None:
    """Products on matrix units are computed in blocks of rows and of k. The sizes leave a remainder of rows, of k and of columns. A row has
    the same bits in the batch as alone."""
    args = bf16(67, 288), bf16(5, 288), bf16(5, 288), np.ones((67, 5), np.float32)
    module = parse(DEEP)
    scheduled = Interpreter(pipeline(get("amx")).until("schedule_kernels")(module))
    whole = scheduled.call("main", *args)
    np.testing.assert_allclose(whole, Interpreter(module).call("main", *args), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(scheduled.call("main", args[0][:1], *args[1:3], args[3][:1]), whole[:1])


def test_the_unit_is_told_the_height_once_for_all_tiles_of_it() -> None:
    assembly = compile_module(parse(DEEP), Options(get("amx"), texts=True)).texts["program.s"]
    kinds = 3  # tiles of full height, remaining rows in one register of rows, and in two
    assert assembly.count("ldtilecfg") == kinds
    assert assembly.count("tdpbf16ps") > kinds


WIDE = 'func main(x: bf16[m, 576], w: bf16[560, 576]) -> object { y = linear(x, w, out_dtype="f32") return y }'


def test_each_part_of_a_panel_prefetches_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """While tiles multiply one part of a panel, the kernel prefetches all cache lines of the next part. Otherwise the next part would begin
    with cache misses."""
    parts: list[tuple[int, int]] = []  # (address, number of 64-byte lines) of each part
    asked: list[tuple[int, set[int]]] = []

    def record(op: AmxBf16, arrays: Sequence[Any], dims: Sequence[int]) -> None:
        part, later = (a.ctypes.data for a in arrays[2:])
        depth, _, first, lines = dims
        if parts[-1:] != [(part, depth)]:
            parts.append((part, depth))
            asked.append((later, set()))
        asked[-1][1].update(range(first, first + lines * depth // 32))

    monkeypatch.setattr(AmxBf16, "meaning", record)
    scheduled = pipeline(get("amx")).until("schedule_kernels")(parse(WIDE))
    Interpreter(scheduled).call("main", bf16(96, 576), bf16(560, 576))
    assert len(parts) == 18 * 2  # 18 panels of 32 columns, each in two parts along k: 512 and 64 elements
    assert [later for later, _ in asked[:-1]] == [part for part, _ in parts[1:]]
    assert all(lines >= set(range(depth)) for (_, depth), (_, lines) in zip(parts, asked, strict=True))
