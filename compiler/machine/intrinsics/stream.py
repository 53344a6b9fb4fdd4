"""Non-temporal stores of vectors, for results so large that caches would evict them before anyone reads them.

A store of a whole cache line does not read the line from memory first, and evicts no other line. On x86-64, other threads may see such a
store late, but not later than the next locked instruction of the storing thread. With such an instruction a thread reports that it has
finished its work (runtime/device/cpu/team.ll).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code, vec
from compiler.machine.intrinsics.base import Intrinsic
from compiler.machine.target import LINE_BYTES, Target

LANES = 16  # number of f32 in a cache line of 64 bytes; a store of half a line would first read the line


@tile_op
class Stream(Intrinsic):
    """stream(place, lanes): store 16 f32 at the place. The store bypasses the caches if the place is the beginning of a cache line."""

    name: ClassVar[str] = "stream"

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand("place", DType.F32, written=True), Operand("lanes", DType.F32)

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        out, lanes = arrays
        out[:LANES] = lanes[:LANES]

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        out, lanes = pointers
        value = code.op(f"load {vec('float', LANES)}, ptr {lanes}, align 4")
        offset = code.op(f"and i64 {code.op(f'ptrtoint ptr {out} to i64')}, {LINE_BYTES - 1}")
        with code.when(code.op(f"icmp eq i64 {offset}, 0")):
            code.do(f"store {vec('float', LANES)} {value}, ptr {out}, align {LINE_BYTES}, !nontemporal !{{i32 1}}")
        with code.when(code.op(f"icmp ne i64 {offset}, 0")):
            code.do(f"store {vec('float', LANES)} {value}, ptr {out}, align 4")
