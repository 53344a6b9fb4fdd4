"""Ask for a cache line before it is read. Changes nothing but time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from compiler.backends.cpu.codegen.intrinsics.registry import Intrinsic, Operands
from compiler.llvm.ssa import Code
from compiler.machine.target import Target

LINE_BYTES = 64  # of a cache
AHEAD = 4096  # bytes of what is read in a row: what machines fetch by themselves ends with a page


def _meaning(arrays: tuple[NDArray[Any], ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    return


def ask(code: Code, place: str, *, far: bool) -> None:
    """For reading (0), data (1); into all levels (3), or (2) all but the first, which has few places for lines that are on their way."""
    code.do(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 {2 if far else 3}, i32 1)")


def ask_lines(code: Code, place: str, ahead: int, num_bytes: int, *, far: bool) -> None:
    """For the lines of so many bytes that begin so many behind the place."""
    for offset in range(ahead, ahead + num_bytes, LINE_BYTES):
        ask(code, code.op(f"getelementptr i8, ptr {place}, i64 {offset}") if offset else place, far=far)


def _emit(code: Code, operands: Operands, target: Target) -> None:
    attrs = operands.attrs
    for pointer in operands.pointers:
        ask_lines(code, pointer, attrs.get("ahead", 0), attrs.get("lines", 1) * LINE_BYTES, far=bool(attrs.get("far")))


PREFETCH = Intrinsic(
    "`lines` from the place on, or rather from `ahead` bytes behind it, will be read soon", _meaning, lambda _: True, _emit
)
