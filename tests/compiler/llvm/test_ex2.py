"""A GPU computes exp2 by the instruction `ex2`, whose results are near powers of two. The software GPU runs it, and the general function
exp2."""

from __future__ import annotations

import numpy as np

from compiler.codegen.vector_math import definitions
from compiler.ir.loops.functions import Fn
from compiler.llvm.ex2 import ex2
from compiler.llvm.ssa import Code, symbol
from compiler.machine.target import get
from tests.gpu.kernels import Card, ptx_of

ARCH, BLOCK = "sm_90a", 256


def kernel() -> str:
    """Return LLVM IR of a kernel in which each thread computes a power of two in both ways."""
    code = Code()
    thread = code.op(f"zext i32 {code.op('call i32 @llvm.nvvm.read.ptx.sreg.tid.x()')} to i64")
    x, own, general = (code.op(f"getelementptr float, ptr addrspace(1) %{name}, i64 {thread}") for name in ("x", "own", "general"))
    value = code.op(f"load float, ptr addrspace(1) {x}")
    code.do(f"store float {ex2(code, value)}, ptr addrspace(1) {own}")
    code.do(f"store float {code.op(f'call float {symbol(Fn.EXP2, 1)}(float {value})')}, ptr addrspace(1) {general}")
    parameters = ", ".join(f"ptr addrspace(1) %{name}" for name in ("x", "own", "general"))
    body = f"define ptx_kernel void @both({parameters}) {{\nentry:\n{code.text()}\n  ret void\n}}"
    return "\n".join(["declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()", *definitions([(Fn.EXP2, 1)], get(ARCH)), body])


def test_both_are_the_instruction_and_near_powers_of_two() -> None:
    """Both ways give the same bits, near powers of two. 2^0 is exactly 1, and 2^-inf exactly 0: these are the weights of a key with the
    largest score, and of a key that a row does not see."""
    numbers = np.concatenate([np.array([0.0, -0.0, -np.inf, np.nan, -126.0, -127.0], np.float32), np.linspace(-130, 1, BLOCK - 6)])
    numbers = numbers.astype(np.float32)
    ptx, card = ptx_of(kernel(), ARCH), Card()
    assert "ex2.approx.ftz.f32" in ptx
    x, own, general = card.upload(numbers), card.empty(numbers.nbytes), card.empty(numbers.nbytes)
    card.run(card.load(ptx), "both", 1, BLOCK, x, own, general)
    found, other = (card.read(place, numbers.shape, np.float32) for place in (own, general))
    np.testing.assert_array_equal(found, other)
    expected = np.exp2(numbers.astype(np.float64))
    np.testing.assert_allclose(found, np.where(expected < 2.0**-126, 0, expected), rtol=2.0**-22)
    assert found[:3].tolist() == [1.0, 1.0, 0.0]
