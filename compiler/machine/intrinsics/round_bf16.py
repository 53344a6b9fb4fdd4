"""Round 16 f32 to bf16 with one instruction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code, vec
from compiler.machine.intrinsics.base import Features, Intrinsic
from compiler.machine.intrinsics.product import flushed
from compiler.machine.target import Target

LANES = 16


@tile_op
class RoundBf16(Intrinsic):
    """round_bf16(out, x): store the bf16 nearest to each of 16 f32, ties to even. Denormals count as zero."""

    name: ClassVar[str] = "round_bf16"
    needs: ClassVar[Features] = Features(["avx512bf16"])

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand("out", DType.BF16, written=True), Operand("x", DType.F32)

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        out, x = arrays
        out[:LANES] = flushed(x[:LANES]).astype(DType.BF16.numpy)

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        out, x = pointers
        numbers, short, bits = vec("float", LANES), vec("bfloat", LANES), vec("i16", LANES)
        given = code.op(f"load {numbers}, ptr {x}, align 4")
        found = code.op(f"call {short} @llvm.x86.avx512bf16.cvtneps2bf16.512({numbers} {given})")
        code.do(f"store {bits} {code.op(f'bitcast {short} {found} to {bits}')}, ptr {out}, align 2")
