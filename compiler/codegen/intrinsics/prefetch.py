"""Ask for a cache line before it is read. Changes nothing but time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from compiler.codegen.intrinsics.registry import Intrinsic, Operands
from compiler.codegen.ssa import Code
from compiler.target import Target


def _meaning(arrays: tuple[NDArray[Any], ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    return


def _emit(code: Code, operands: Operands, target: Target) -> None:
    """For reading (0), data (1); into all levels (3), or (2) all but the first, which has few places for lines that are on their way."""
    level = 2 if operands.attrs.get("far") else 3
    for pointer in operands.pointers:
        code.do(f"call void @llvm.prefetch.p0(ptr {pointer}, i32 0, i32 {level}, i32 1)")


PREFETCH = Intrinsic("prefetch(place): the cache line of the place will be read soon", _meaning, lambda _: True, _emit)
