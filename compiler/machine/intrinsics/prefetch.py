"""Prefetch cache lines before they are read. A prefetch changes only the speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.base import Intrinsic
from compiler.machine.target import LINE_BYTES, Target

AHEAD = 4096  # bytes by which prefetches run ahead of sequential reads; the hardware prefetches only to the end of a memory page
# The distances of `prefetch_twice`: into the second-level cache, and from there into the first. A core reads 16 KB in about a microsecond,
# several times the latency of memory; 2 KB do not displace rows from the first-level cache. Half or twice the distances are as fast.
FAR_AHEAD, NEAR_AHEAD = 16384, 2048


@tile_op
class Prefetch(Intrinsic):
    """prefetch(place): prefetch `lines` cache lines that begin `ahead` bytes after the place."""

    name: ClassVar[str] = "prefetch"
    far: bool = False  # prefetch into all caches except L1, which supports few outstanding misses
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
    """Emit llvm.prefetch for a read (0) of data (1). Locality 3 means all caches, and 2 means all caches except L1."""
    code.do(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 {2 if far else 3}, i32 1)")


def prefetch_lines(code: Code, place: str, ahead: int, num_bytes: int, *, far: bool) -> None:
    """Prefetch the lines of a range of bytes that begins `ahead` bytes after the place."""
    for offset in range(ahead, ahead + num_bytes, LINE_BYTES):
        prefetch_line(code, code.op(f"getelementptr i8, ptr {place}, i64 {offset}") if offset else place, far=far)


def prefetch_twice(code: Code, place: str, num_bytes: int) -> None:
    """Emit two prefetches for code that reads a stream sequentially and now reads `num_bytes` bytes at `place`. The first fetches
    `num_bytes` bytes that are FAR_AHEAD after the place into the second-level cache, and the second fetches as many bytes that are
    NEAR_AHEAD after the place into L1.

    The function is for code with many instructions per line. The out-of-order window of a core then covers only a few lines, so without the
    second prefetch the core would wait even for the second-level cache."""
    prefetch_lines(code, place, FAR_AHEAD, num_bytes, far=True)
    prefetch_lines(code, place, NEAR_AHEAD, num_bytes, far=False)
