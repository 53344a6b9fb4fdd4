"""Lists of what was found: the numbers of the lanes that are set, written behind those found before, without a branch per lane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiler.backends.cpu.codegen.intrinsics.registry import Intrinsic, Operands
from compiler.llvm.ssa import Code, broadcast, vec, vector_literal
from compiler.machine.target import Target

LANES = 16


def _meaning(arrays: tuple[NDArray[Any], ...], dims: tuple[int, ...], attrs: Mapping[str, Any]) -> None:
    found, count, hits = arrays
    numbers = dims[0] + np.flatnonzero(hits[:LANES])
    found[count[0] : count[0] + len(numbers)] = numbers
    count[0] += len(numbers)


def _emit(code: Code, operands: Operands, target: Target) -> None:
    """Without an instruction that packs lanes it pays to look first whether there is anything to pack."""
    numbers, mask = vec("i32", LANES), vec("i1", LANES)
    lanes = code.op(f"load {numbers}, ptr {operands.pointers[2]}, align 4")
    hit = code.op(f"icmp ne {numbers} {lanes}, zeroinitializer")
    bits = code.op(f"bitcast {mask} {hit} to i{LANES}")
    if target.has("avx512f"):
        _pack(code, operands, hit, bits)
    else:
        with code.when(code.op(f"icmp ne i{LANES} {bits}, 0")):
            _pack(code, operands, hit, bits)


def _pack(code: Code, operands: Operands, hit: str, bits: str) -> None:
    found, count, _ = operands.pointers
    numbers, mask = vec("i32", LANES), vec("i1", LANES)
    start = broadcast(code, code.op(f"trunc i64 {operands.dims[0]} to i32"), "i32", LANES)
    every = code.op(f"add {numbers} {start}, {vector_literal('i32', range(LANES))}")
    packed = code.op(f"call {numbers} @llvm.experimental.vector.compress.v{LANES}i32({numbers} {every}, {mask} {hit}, {numbers} poison)")
    before = code.op(f"load i64, ptr {count}, align 8")
    place = code.op(f"getelementptr i32, ptr {found}, i64 {before}")
    code.do(f"store {numbers} {packed}, ptr {place}, align 4")
    num_hits = code.op(f"zext i{LANES} {code.op(f'call i{LANES} @llvm.ctpop.i{LANES}(i{LANES} {bits})')} to i64")
    code.do(f"store i64 {code.op(f'add i64 {before}, {num_hits}')}, ptr {count}, align 8")


APPEND = Intrinsic(
    "append(list, count, hits) dims(first): first + l is written at list[count ...] for each lane l that is set, and count goes on. "
    "All 16 places there may be overwritten",
    _meaning,
    lambda _: True,
    _emit,
)
