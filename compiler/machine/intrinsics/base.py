"""What the intrinsics of machines have in common: the features they need, and how they are written in LLVM IR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compiler.ir.tiles import TileOp
from compiler.llvm.ssa import Code
from compiler.machine.target import Target

Features = frozenset[str]
NONE = Features()


class Intrinsic(TileOp):
    __slots__ = ()
    needs: ClassVar[Features] = NONE
    vector_bits: ClassVar[int] = 0  # of the registers that it takes
    threads: ClassVar[int] = 1  # of a GPU's block, that run it together

    def runs_on(self, target: Target) -> bool:
        return self.needs <= target.features and self.vector_bits <= target.vector_bits

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        """Write the tile. There is a pointer per operand, and a number or a value of type i64 per dimension."""
        raise NotImplementedError
