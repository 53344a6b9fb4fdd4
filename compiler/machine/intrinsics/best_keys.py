"""Choose the largest keys of a row with one warp of a GPU. Each lane holds every 32nd key of the row in registers. The instruction
`redux.sync` finds the largest key of all lanes, and then the first index that has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.base import Intrinsic
from compiler.machine.intrinsics.block_code import LANES, SHARED, BlockCode
from compiler.machine.target import GPU, Target

LOWEST = -(1 << 31)  # stands for keys that are chosen already, and for keys after the end of the row
NOWHERE = (1 << 31) - 1  # an index after all keys


@tile_op
class BestKeys(Intrinsic):
    """best_keys(places, keys): write the indices of the `chosen` largest of `count` keys, in ascending order. Of equal keys, the one with
    the lower index ranks first. Keys and indices are in shared memory, and each key is larger than -2^31."""

    name: ClassVar[str] = "best_keys"
    threads: ClassVar[int] = LANES
    count: int
    chosen: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand("places", DType.I32, written=True), Operand("keys", DType.I32)

    def problems(self) -> Iterator[str]:
        if not 1 <= self.chosen <= self.count:
            yield f"chosen is {self.chosen}, expected 1 to count, {self.count}"

    def runs_on(self, target: Target) -> bool:
        return target.system == GPU

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        places, keys = arrays
        ranked = np.argsort(-keys[: self.count].astype(np.int64), kind="stable")
        places[: self.chosen] = np.sort(ranked[: self.chosen])

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        _BestKeys(code, self, pointers).emit()


class _BestKeys(BlockCode):
    """Emits the code of `BestKeys`."""

    def __init__(self, code: Code, op: BestKeys, pointers: Sequence[str]) -> None:
        """Compute the indices of the keys that this lane holds: every 32nd. `pointers` are those of the tile `op`."""
        super().__init__(code)
        self.op = op
        self.places, self.keys = map(self.in_shared, pointers)
        self.own = code.op(f"trunc i64 {self.lane} to i32")
        firsts = range(0, op.count, LANES)
        self.indices = [self.own if first == 0 else code.op(f"add i32 {self.own}, {first}") for first in firsts]

    def emit(self) -> None:
        """Emit the choice of one key after another. A chosen key counts as LOWEST from then on. At the end, write the indices."""
        keys = [self._key(number) for number in range(len(self.indices))]
        wins = ["false"] * len(keys)  # whether each key of this lane is chosen
        for _ in range(self.op.chosen):
            best = self.over_warp("max", reduce(lambda a, b: self._extreme("max", a, b), keys))
            found = [self._select(self._equal(key, best), index, NOWHERE) for key, index in zip(keys, self.indices, strict=True)]
            winner = self.over_warp("min", reduce(lambda a, b: self._extreme("min", a, b), found))
            won = [self._equal(index, winner) for index in self.indices]
            wins = [self.code.op(f"or i1 {before}, {now}") for before, now in zip(wins, won, strict=True)]
            keys = [self._select(now, LOWEST, key) for now, key in zip(won, keys, strict=True)]
        self._write(wins)

    def _key(self, number: int) -> str:
        """Load a key of this lane. Return LOWEST for a key that does not exist."""
        code, index = self.code, self.indices[number]
        if (number + 1) * LANES <= self.op.count:
            return code.op(f"load i32, {SHARED} {self._place(self.keys, index)}, align 4")
        exists = code.op(f"icmp ult i32 {index}, {self.op.count}")
        near = self._select(exists, index, self.op.count - 1)
        return self._select(exists, code.op(f"load i32, {SHARED} {self._place(self.keys, near)}, align 4"), LOWEST)

    def _write(self, wins: Sequence[str]) -> None:
        """Write the indices of the chosen keys in ascending order: first those among the first keys of all lanes, then those among the
        second keys of all lanes, and so on."""
        code = self.code
        below = code.op(f"sub i32 {code.op(f'shl i32 1, {self.own}')}, 1")  # mask of the lanes before this one
        first = "0"
        for index, won in zip(self.indices, wins, strict=True):
            ballot = code.op(f"call i32 @llvm.nvvm.vote.ballot.sync(i32 -1, i1 {won})")
            before = code.op(f"call i32 @llvm.ctpop.i32(i32 {code.op(f'and i32 {ballot}, {below}')})")
            with code.when(won):
                code.do(f"store i32 {index}, {SHARED} {self._place(self.places, code.op(f'add i32 {first}, {before}'))}, align 4")
            first = code.op(f"add i32 {first}, {code.op(f'call i32 @llvm.ctpop.i32(i32 {ballot})')}")

    def _place(self, base: str, index: str) -> str:
        """Return the address of the key or the index number `index` in the array at `base`."""
        return self.gep(SHARED, base, self.code.op(f"zext i32 {index} to i64"), "i32")

    def _extreme(self, which: str, a: str, b: str) -> str:
        return self.code.op(f"call i32 @llvm.s{which}.i32(i32 {a}, i32 {b})")

    def _equal(self, a: str, b: str) -> str:
        return self.code.op(f"icmp eq i32 {a}, {b}")

    def _select(self, cond: str, a: str | int, b: str | int) -> str:
        return self.code.op(f"select i1 {cond}, i32 {a}, i32 {b}")
