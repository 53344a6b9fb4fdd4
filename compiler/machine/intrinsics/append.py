"""Append the numbers of the set lanes to a list, without a branch per lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code, broadcast, vec, vector_literal
from compiler.machine.intrinsics.base import Intrinsic
from compiler.machine.product_steps.avx512 import PACK_LANES
from compiler.machine.target import Target

LANES = 16


@tile_op
class Append(Intrinsic):
    """append(list, count, hits) dims(first): for each set lane l, write `first` + l at list[count] and increment `count`. The tile may
    overwrite all 16 places that start at list[count]."""

    name: ClassVar[str] = "append"

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand("list", DType.I32, written=True), Operand("count", DType.I64, written=True), Operand("hits", DType.I32)

    @property
    def dims(self) -> tuple[str, ...]:
        return ("first",)

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        found, count, hits = arrays
        numbers = dims[0] + np.flatnonzero(hits[:LANES])
        found[count[0] : count[0] + len(numbers)] = numbers
        count[0] += len(numbers)

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        """Emit the code of the tile. On a target without an instruction that packs lanes, packing is slow, so the code first tests whether
        any lane is set."""
        numbers, mask = vec("i32", LANES), vec("i1", LANES)
        lanes = code.op(f"load {numbers}, ptr {pointers[2]}, align 4")
        hit = code.op(f"icmp ne {numbers} {lanes}, zeroinitializer")
        bits = code.op(f"bitcast {mask} {hit} to i{LANES}")
        if target.features >= PACK_LANES:
            _pack(code, pointers, dims[0], hit, bits)
        else:
            with code.when(code.op(f"icmp ne i{LANES} {bits}, 0")):
                _pack(code, pointers, dims[0], hit, bits)


def _pack(code: Code, pointers: Sequence[str], first: int | str, hit: str, bits: str) -> None:
    """Emit the code that packs the numbers of the set lanes, which `hit` has as i1 per lane and `bits` as an integer."""
    found, count, _ = pointers
    numbers, mask = vec("i32", LANES), vec("i1", LANES)
    start = broadcast(code, code.op(f"trunc i64 {first} to i32"), "i32", LANES)
    every = code.op(f"add {numbers} {start}, {vector_literal('i32', range(LANES))}")
    packed = code.op(f"call {numbers} @llvm.experimental.vector.compress.v{LANES}i32({numbers} {every}, {mask} {hit}, {numbers} poison)")
    before = code.op(f"load i64, ptr {count}, align 8")
    place = code.op(f"getelementptr i32, ptr {found}, i64 {before}")
    code.do(f"store {numbers} {packed}, ptr {place}, align 4")
    num_hits = code.op(f"zext i{LANES} {code.op(f'call i{LANES} @llvm.ctpop.i{LANES}(i{LANES} {bits})')} to i64")
    code.do(f"store i64 {code.op(f'add i64 {before}, {num_hits}')}, ptr {count}, align 8")
