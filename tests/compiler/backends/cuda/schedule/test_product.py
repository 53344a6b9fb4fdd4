"""Which products go to tensor cores, and that they keep their meaning."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import compiler.ops
from compiler.backends.cuda.pipeline import pipeline
from compiler.interpret.graph import Interpreter
from compiler.ir.loops.statements import Tile
from compiler.ir.loops.visit import walk_stmts
from compiler.ir.module import IRModule
from compiler.ir.text.parser import parse
from compiler.ir.verify.module import verify
from compiler.machine.intrinsics.mma import Mma
from compiler.machine.target import get

assert compiler.ops

BF16 = ml_dtypes.bfloat16


def program(*, k: int = 64, n: int = 72, most: int = 256, x: str = "bf16", w: str = "bf16", more: str = "") -> str:
    tolerates = ', tolerates="bf16"' if x == "f32" else ""
    return (
        f"func main(x: {x}[t, {k}], w: {w}[{n}, {k}]) -> object where t in 0..{most} "
        f'{{ dataflow {{ y = linear(x, w, out_dtype="f32"{tolerates}){more} }} return y }}'
    )


def scheduled(text: str) -> IRModule:
    module = pipeline(get("sm_80")).until("schedule_kernels")(parse(text))
    verify(module)
    return module


def tiles(text: str) -> list[tuple[int, int]]:
    """Rows and columns of each."""
    found = [s.op for prim in scheduled(text).prim_functions.values() for s in walk_stmts(prim.body) if isinstance(s, Tile)]
    return [(op.rows, op.columns) for op in found if isinstance(op, Mma)]


def test_a_range_of_rows_has_a_tile_of_its_own() -> None:
    assert tiles(program()) == [(8, 64), (16, 64), (32, 64), (64, 64), (64, 128)]
    assert tiles(program(most=16)) == [(8, 64), (16, 64)], "no more than the rows that there can be"


@pytest.mark.parametrize("text", [program(k=48), program(w="f32"), program(x="f32", w="f16")], ids=["length", "weights", "formats"])
def test_what_the_tile_does_not_take_runs_on_the_reference_schedule(text: str) -> None:
    assert tiles(text) == []


def test_rows_that_tolerate_it_are_rounded() -> None:
    assert tiles(program(x="f32"))


@pytest.mark.parametrize("count", [1, 9, 65])
def test_the_meaning_stays(count: int) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((count, 64)).astype(BF16), rng.standard_normal((72, 64)).astype(BF16)
    found, meaning = (Interpreter(m).call("main", x, w) for m in (scheduled(program()), parse(program())))
    np.testing.assert_allclose(found, meaning, rtol=1e-5, atol=1e-5)
