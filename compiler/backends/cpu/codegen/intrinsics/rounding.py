"""Round 16 f32 to bf16 by the machine's own instruction: what pairs of bf16 are multiplied by, made while they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from compiler.backends.cpu.codegen.intrinsics.amx import flushed
from compiler.backends.cpu.codegen.intrinsics.registry import Intrinsic, Operands
from compiler.ir.dtypes import DType
from compiler.llvm.ssa import Code, vec
from compiler.machine.target import Target

LANES = 16


def _meaning(arrays: tuple[NDArray[Any], ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    out, x = arrays
    out[:LANES] = flushed(x[:LANES]).astype(DType.BF16.numpy)


def _emit(code: Code, operands: Operands, target: Target) -> None:
    out, x = operands.pointers
    numbers, short, bits = vec("float", LANES), vec("bfloat", LANES), vec("i16", LANES)
    given = code.op(f"load {numbers}, ptr {x}, align 4")
    found = code.op(f"call {short} @llvm.x86.avx512bf16.cvtneps2bf16.512({numbers} {given})")
    code.do(f"store {bits} {code.op(f'bitcast {short} {found} to {bits}')}, ptr {out}, align 2")


ROUND_BF16 = Intrinsic(
    f"round_bf16(out, x): {LANES} f32 to the nearest bf16, ties to even; denormals count as zero",
    _meaning,
    lambda target: target.has("avx512bf16"),
    _emit,
)
