"""Emit the instruction of GPUs that computes a power of two."""

from __future__ import annotations

from typing import Final

from compiler.llvm.ssa import Code

LOG2_E: Final = 1.4426950408889634


def ex2(code: Code, x: str) -> str:
    """Emit 2^x for one f32. NVIDIA states a relative error of at most 2^-22. A denormal x counts as 0, a denormal result is 0, and 2^0 is
    1. LLVM may compute equal powers once, because the assembly has no side effects."""
    return code.op(f'call float asm "ex2.approx.ftz.f32 $0, $1;", "=f,f"(float {x})')
