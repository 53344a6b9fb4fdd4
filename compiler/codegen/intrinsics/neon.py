"""AArch64: four products of unsigned by signed bytes at a time, `usdot`."""

from __future__ import annotations

from compiler.codegen.intrinsics.steps import Parts, Step
from compiler.codegen.ssa import Code, broadcast


def _left(code: Code, x: str) -> Parts:
    return _right(code, broadcast(code, x, "i32", 4))


def _right(code: Code, x: str) -> Parts:
    return (code.op(f"bitcast <4 x i32> {x} to <16 x i8>"),)


def _add(code: Code, total: str, left: Parts, right: Parts) -> str:
    args = f"<4 x i32> {total}, <16 x i8> {right[0]}, <16 x i8> {left[0]}"
    return code.op(f"call <4 x i32> @llvm.aarch64.neon.usdot.v4i32.v16i8({args})")


SIGNED_BY_UNSIGNED = Step(4, _left, _right, _add)
