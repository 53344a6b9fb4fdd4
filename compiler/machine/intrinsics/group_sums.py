"""Sums of groups of bytes; each sum is multiplied by a negative constant. These are the initial values of the sums of `dot_widened`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code, splat
from compiler.machine.intrinsics.base import Features, Intrinsic
from compiler.machine.target import Target

BYTES = 32  # bytes of a register
_WORDS = "<8 x i32>"


@tile_op
class GroupSums(Intrinsic):
    """group_sums(sums, a) dims(count): sums[g] = -times * sum(a[g * group : (g + 1) * group]) for `count` groups of i8."""

    name: ClassVar[str] = "group_sums"
    needs: ClassVar[Features] = Features(["avx512vl", "avx512vnni"])
    vector_bits: ClassVar[int] = 256
    group: int  # a multiple of 32
    times: int  # 1 to 255

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand("sums", DType.I32, written=True), Operand("a", DType.I8)

    @property
    def dims(self) -> tuple[str, ...]:
        return ("count",)

    def problems(self) -> Iterator[str]:
        if self.group % BYTES or not 1 <= self.times < 256:
            yield f"a group is {self.group} and times is {self.times}, expected a multiple of {BYTES}, and 1 to 255"

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (sums, a), (count,) = arrays, dims
        sums[:count] = -self.times * a[: count * self.group].reshape(count, -1).sum(1, dtype=np.int32)

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        (sums, a), (count,), kind = pointers, dims, f"<{BYTES} x i8>"
        with code.loop("0", str(count)) as g:
            group = code.op(f"getelementptr [{self.group} x i8], ptr {a}, i64 {g}")
            total = splat("0", "i32", 8)
            for first in range(0, self.group, BYTES):
                some = code.op(f"load {kind}, ptr {code.op(f'getelementptr i8, ptr {group}, i64 {first}')}, align 1")
                times = splat(str(self.times), "i8", BYTES)
                total = code.op(f"call {_WORDS} @llvm.x86.avx512.vpdpbusd.256({_WORDS} {total}, {kind} {times}, {kind} {some})")
            found = code.op(f"call i32 @llvm.vector.reduce.add.v8i32({_WORDS} {total})")
            code.do(f"store i32 {code.op(f'sub i32 0, {found}')}, ptr {code.op(f'getelementptr i32, ptr {sums}, i64 {g}')}, align 4")
