"""Prefetch cache lines before they are read. Changes nothing but time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.base import Intrinsic
from compiler.machine.target import LINE_BYTES, Target

AHEAD = 4096  # bytes of what is read in a row: what machines prefetch by themselves ends with a page


@tile_op
class Prefetch(Intrinsic):
    """prefetch(place): `lines` cache lines, from `ahead` bytes behind the place on."""

    name: ClassVar[str] = "prefetch"
    far: bool = False  # into all caches but the first, which has few places for lines that are on their way
    ahead: int = 0
    lines: int = 1

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (Operand("place", None),)

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        return

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        prefetch_lines(code, pointers[0], self.ahead, self.lines * LINE_BYTES, far=self.far)


def prefetch_line(code: Code, place: str, *, far: bool) -> None:
    """llvm.prefetch: read (0), data cache (1); locality 3 is all levels, 2 all but the first."""
    code.do(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 {2 if far else 3}, i32 1)")


def prefetch_lines(code: Code, place: str, ahead: int, num_bytes: int, *, far: bool) -> None:
    """Prefetch the lines of a range of bytes that begins at a distance behind the place."""
    for offset in range(ahead, ahead + num_bytes, LINE_BYTES):
        prefetch_line(code, code.op(f"getelementptr i8, ptr {place}, i64 {offset}") if offset else place, far=far)
