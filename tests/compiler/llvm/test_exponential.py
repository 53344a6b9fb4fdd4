"""The short exp of numbers that are at most 0 has the bits of the exp for all numbers. Both run on the software GPU, where the short one is
used."""

from __future__ import annotations

import numpy as np

from compiler.codegen.vector_math import definitions, symbol
from compiler.ir.loops.functions import Fn
from compiler.llvm.exponential import exp_at_most_one
from compiler.llvm.ssa import Code
from compiler.machine.target import get
from tests.gpu.kernels import Card, ptx_of

ARCH, BLOCK = "sm_90a", 256


def kernel() -> str:
    """Return LLVM IR of a kernel in which each thread computes both for one number."""
    code = Code()
    block, thread = (code.op(f"call i32 @llvm.nvvm.read.ptx.sreg.{register}.x()") for register in ("ctaid", "tid"))
    first = code.op(f"mul i32 {block}, {BLOCK}")
    index = code.op(f"zext i32 {code.op(f'add i32 {first}, {thread}')} to i64")
    x, short, long = (code.op(f"getelementptr float, ptr addrspace(1) %{name}, i64 {index}") for name in ("x", "short", "long"))
    value = code.op(f"load float, ptr addrspace(1) {x}")
    code.do(f"store float {exp_at_most_one(code, value)}, ptr addrspace(1) {short}")
    code.do(f"store float {code.op(f'call float {symbol(Fn.EXP, 1)}(float {value})')}, ptr addrspace(1) {long}")
    parameters = ", ".join(f"ptr addrspace(1) %{name}" for name in ("x", "short", "long"))
    body = f"define ptx_kernel void @both({parameters}) {{\nentry:\n{code.text()}\n  ret void\n}}"
    declared = ["i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()", "i32 @llvm.nvvm.read.ptx.sreg.tid.x()"]
    declared += ["float @llvm.maximum.f32(float, float)", "float @llvm.fma.f32(float, float, float)"]
    return "\n".join([*(f"declare {name}" for name in declared), *definitions([(Fn.EXP, 1)], get(ARCH)), body])


def test_the_bits_are_those_of_the_long_exp() -> None:
    """Checked for the ends of the range, for results that are denormal or 0, and for samples of all numbers that are at most 0."""
    ends = [0.0, -0.0, -np.inf, -1e-45, -87.33654, -87.4, -103.27, -103.28, -103.97, -103.98, -104.0, -104.1, -3e38]
    everywhere = np.arange(1 << 31, 1 << 32, 99_991, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = np.linspace(-105, 0, 20_001).astype(np.float32)
    numbers = np.concatenate([np.array(ends, np.float32), everywhere[~np.isnan(everywhere)], near])
    numbers = np.resize(numbers, -(-len(numbers) // BLOCK) * BLOCK)
    card = Card()
    x, short, long = card.upload(numbers), card.empty(numbers.nbytes), card.empty(numbers.nbytes)
    card.run(card.load(ptx_of(kernel(), ARCH)), "both", len(numbers) // BLOCK, BLOCK, x, short, long)
    found, expected = (card.read(place, numbers.shape, np.uint32) for place in (short, long))
    np.testing.assert_array_equal(found, expected)
    assert len(np.unique(expected)) > 10_000
