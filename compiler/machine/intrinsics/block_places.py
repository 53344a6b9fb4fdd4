"""Give each thread of a GPU block the place of its first item, if the items of all threads are stored one after another. A warp adds up the
numbers of items of its lanes by shuffles. By `redux.sync`, it adds up those of earlier warps, and the numbers of other items, which precede
all these items."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.loops.write import halvings
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.base import Intrinsic
from compiler.machine.intrinsics.block_code import LANES, SHARED, WARPS, BlockCode
from compiler.machine.target import GPU, Target


@tile_op
class BlockPlaces(Intrinsic):
    """block_places(places, items, others): set places[t] to the sum of all `others`, plus the sum of `items` of the threads before t. Each
    array is in shared memory and has an integer for each of 128 threads."""

    name: ClassVar[str] = "block_places"
    threads: ClassVar[int] = WARPS * LANES

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand("places", DType.I32, written=True), Operand("items", DType.I32), Operand("others", DType.I32)

    def runs_on(self, target: Target) -> bool:
        return target.system == GPU

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        places, items, others = (array[: self.threads] for array in arrays)
        places[:] = others.sum() + np.cumsum(items) - items

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        _BlockPlaces(code, pointers).emit()


class _BlockPlaces(BlockCode):
    """Emits the code of `BlockPlaces`."""

    def __init__(self, code: Code, pointers: Sequence[str]) -> None:
        super().__init__(code)
        self.places, self.items, self.others = map(self.in_shared, pointers)

    def emit(self) -> None:
        """Emit the code of the tile. Each thread reads the numbers of its lane in all warps, so a warp can also sum the numbers of other
        warps."""
        code = self.code
        items = [self._number(self.items, warp) for warp in range(WARPS)]
        others = reduce(self._add, (self._number(self.others, warp) for warp in range(WARPS)))
        warp = code.op(f"trunc i64 {self.warp} to i32")
        own = reduce(lambda a, n: code.op(f"select i1 {code.op(f'icmp eq i32 {warp}, {n}')}, i32 {items[n]}, i32 {a}"), range(WARPS), "0")
        earlier = reduce(self._add, (self._if_before(n, warp, items[n]) for n in range(WARPS - 1)))
        before = self.over_warp("add", self._add(others, earlier))
        place = self._add(before, code.op(f"sub i32 {self._sum_up_to_own(own)}, {own}"))
        code.do(f"store i32 {place}, {SHARED} {self.gep(SHARED, self.places, self.thread, 'i32')}, align 4")

    def _sum_up_to_own(self, own: str) -> str:
        """Return the sum of the numbers of items of the lanes up to and including this one."""
        code, total, lane = self.code, own, self.code.op(f"trunc i64 {self.lane} to i32")
        for distance in sorted(halvings(LANES)):
            other = code.op(f"call i32 @llvm.nvvm.shfl.sync.up.i32(i32 -1, i32 {total}, i32 {distance}, i32 0)")
            has_other = code.op(f"icmp uge i32 {lane}, {distance}")
            total = self._add(total, code.op(f"select i1 {has_other}, i32 {other}, i32 0"))
        return total

    def _number(self, base: str, warp: int) -> str:
        """Load, from the array at `base`, the number of the thread of a warp that has the same lane as this thread."""
        place = self.gep(SHARED, self.gep(SHARED, base, self.lane, "i32"), str(4 * LANES * warp))
        return self.code.op(f"load i32, {SHARED} {place}, align 4")

    def _if_before(self, number: int, warp: str, value: str) -> str:
        return self.code.op(f"select i1 {self.code.op(f'icmp ugt i32 {warp}, {number}')}, i32 {value}, i32 0")

    def _add(self, a: str, b: str) -> str:
        return self.code.op(f"add i32 {a}, {b}")
