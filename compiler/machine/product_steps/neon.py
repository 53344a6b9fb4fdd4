"""Steps for AArch64. Each step adds four products of bytes per lane: `usdot` (i8mm) multiplies unsigned by signed bytes, and `sdot` (dot
product) signed by signed bytes."""

from __future__ import annotations

from compiler.llvm.ssa import Code, broadcast
from compiler.machine.product_steps.step import Parts, Step, shuffle

LANES = 4


def _left(code: Code, x: str) -> Parts:
    return _right(code, broadcast(code, x, "i32", LANES))


def _right(code: Code, x: str) -> Parts:
    return (code.op(f"bitcast <4 x i32> {x} to <16 x i8>"),)


def _step(instruction: str, feature: str) -> Step:
    """Return the step that uses an instruction of NEON, which needs the CPU feature `feature`."""

    def add(code: Code, total: str, left: Parts, right: Parts) -> str:
        args = f"<4 x i32> {total}, <16 x i8> {right[0]}, <16 x i8> {left[0]}"
        return code.op(f"call <4 x i32> @llvm.aarch64.neon.{instruction}.v4i32.v16i8({args})")

    look_up = shuffle(LANES, "llvm.aarch64.neon.tbl1.v16i8")
    return Step(LANES, _left, _right, add, signed=instruction == "sdot", look_up=look_up, needs=frozenset([feature]))


SIGNED_BY_UNSIGNED = _step("usdot", "i8mm")
SIGNED_BY_SIGNED = _step("sdot", "dotprod")
