"""Products of f32 weights are computed in tiles of one or of many elements, which sum in the same order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import compiler.ops
from compiler.backends.cuda.pipeline import pipeline
from compiler.backends.cuda.schedule.float_product import FEW, TILE
from compiler.driver import Options, compile_module
from compiler.interpret.graph import Interpreter
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from compiler.machine.target import GPU, NAMED, get

assert compiler.ops

GPUS = [t.name for t in NAMED.values() if t.system == GPU]


def program(depth: int, most: int = 64, columns: int = 11) -> str:
    given = f"x: f32[n, {depth}], w: f32[{columns}, {depth}], b: f32[{columns}]"
    return f"func main({given}) -> f32[n, {columns}] where n in 0..{most} {{ dataflow {{ y = linear(x, w, b) }} return y }}"


def scheduled(text: str, target: str = "sm_80") -> IRModule:
    module = pipeline(get(target)).until("schedule_kernels")(parse(text))
    verify(module)
    assert [prim.attrs["schedule"] for prim in module.prim_functions.values()] == ["float product"]
    return module


def arguments(rows: int, depth: int, columns: int = 11) -> list[NDArray[Any]]:
    rng = np.random.default_rng(rows)
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((rows, depth), (columns, depth), columns)]


@pytest.mark.parametrize("depth", [32, 192, 384], ids=["one warp", "two warps", "four warps"])
@pytest.mark.parametrize(("rows", "columns"), [(FEW, 2), (FEW + 1, TILE + 1), pytest.param(2 * TILE + 3, 11, marks=pytest.mark.slow)])
def test_a_row_has_the_same_bits_alone(rows: int, columns: int, depth: int) -> None:
    """The most rows that tiles of one element compute, and more rows and columns, which fill the last tiles in part."""
    module, (x, w, b) = scheduled(program(depth, columns=columns)), arguments(rows, depth, columns)
    found = Interpreter(module).call("main", x, w, b)
    np.testing.assert_allclose(found, Interpreter(parse(program(depth, columns=columns))).call("main", x, w, b), rtol=1e-4, atol=1e-4)
    for row in (0, rows - 1):
        np.testing.assert_array_equal(Interpreter(module).call("main", x[row : row + 1], w, b)[0], found[row])


def test_no_rows_have_no_result() -> None:
    assert Interpreter(scheduled(program(384))).call("main", *arguments(0, 384)).shape == (0, 11)


@pytest.mark.parametrize("rows", [1, FEW + 1])
def test_long_rows(rows: int) -> None:
    x, w, b = arguments(rows, 4096, 2)
    found = Interpreter(scheduled(program(4096, columns=2))).call("main", x, w, b)
    np.testing.assert_allclose(found, x.astype(np.float64) @ w.T.astype(np.float64) + b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("depth", [4096, 2880, 7168, 96], ids=["", "of gpt-oss", "of DeepSeek", "short"])
def test_a_router_fits_the_shared_memory_of_every_card(depth: int, target: str) -> None:
    """The depth of gpt-oss is a multiple of 64, not of 128. Code for sm_80 and sm_89 runs on cards whose blocks have at most 99 KB."""
    text = program(depth)
    assert [p.attrs["schedule"] for p in scheduled(text, target).prim_functions.values()] == ["float product"]
    (kernel,) = compile_module(parse(text), Options(get(target))).meta.kernels
    assert all(phase.shared_bytes == 0 and phase.threads <= 128 for phase in kernel.phases), "a launch requests more than 48 KB"


def test_few_rows_need_no_tiles() -> None:
    module, args = scheduled(program(32, most=FEW)), arguments(FEW, 32)
    np.testing.assert_allclose(Interpreter(module).call("main", *args), args[0] @ args[1].T + args[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("depth", [33, 0], ids=["threads without work", "nothing to add"])
def test_other_depths_have_other_schedules(depth: int) -> None:
    (prim,) = pipeline(get("sm_80")).until("schedule_kernels")(parse(program(depth))).prim_functions.values()
    assert prim.attrs["schedule"] in ("rows", "elements")
