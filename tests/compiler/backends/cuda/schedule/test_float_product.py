"""Products of f32 weights are computed in tiles of one or of many elements, which sum in the same order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import compiler.ops
from compiler.backends.cuda.pipeline import pipeline
from compiler.backends.cuda.schedule.float_product import FEW, TILE
from compiler.interpret.graph import Interpreter
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from compiler.machine.target import get

assert compiler.ops


def program(depth: int, most: int = 64) -> str:
    given = f"x: f32[n, {depth}], w: f32[11, {depth}], b: f32[11]"
    return f"func main({given}) -> f32[n, 11] where n in 0..{most} {{ dataflow {{ y = linear(x, w, b) }} return y }}"


def scheduled(text: str) -> IRModule:
    module = pipeline(get("sm_80")).until("schedule_kernels")(parse(text))
    verify(module)
    assert [prim.attrs["schedule"] for prim in module.prim_functions.values()] == ["float product"]
    return module


def arguments(rows: int, depth: int) -> list[NDArray[Any]]:
    rng = np.random.default_rng(rows)
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((rows, depth), (11, depth), 11)]


@pytest.mark.parametrize("depth", [32, 384], ids=["one warp", "four warps"])
@pytest.mark.parametrize("rows", [1, FEW, FEW + 1, 2 * TILE + 3])
def test_a_row_has_the_same_bits_alone(rows: int, depth: int) -> None:
    """One row, the most rows that tiles of one element compute, one more, and rows that fill the last tile in part."""
    module, (x, w, b) = scheduled(program(depth)), arguments(rows, depth)
    found = Interpreter(module).call("main", x, w, b)
    np.testing.assert_allclose(found, Interpreter(parse(program(depth))).call("main", x, w, b), rtol=1e-4, atol=1e-4)
    for row in (0, rows - 1):
        np.testing.assert_array_equal(Interpreter(module).call("main", x[row : row + 1], w, b)[0], found[row])


def test_few_rows_need_no_tiles() -> None:
    module, args = scheduled(program(32, most=FEW)), arguments(FEW, 32)
    np.testing.assert_allclose(Interpreter(module).call("main", *args), args[0] @ args[1].T + args[2], rtol=1e-4, atol=1e-4)


def test_a_depth_that_leaves_threads_without_work_has_the_schedule_of_rows() -> None:
    (prim,) = pipeline(get("sm_80")).until("schedule_kernels")(parse(program(33))).prim_functions.values()
    assert prim.attrs["schedule"] == "rows"
