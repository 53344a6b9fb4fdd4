"""The base class of intrinsic tiles: the CPU features that they need, and their LLVM IR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compiler.ir.tiles import TileOp
from compiler.llvm.ssa import Code
from compiler.machine.target import Target

Features = frozenset[str]
NONE = Features()


class Intrinsic(TileOp):
    """A tile that is emitted as machine instructions. By default it runs on every target whose features and registers suffice."""

    __slots__ = ()
    needs: ClassVar[Features] = NONE  # features that the target must have
    vector_bits: ClassVar[int] = 0  # width in bits of the vector registers that the target must have; 0: any
    threads: ClassVar[int] = 1  # number of threads of a GPU block that run the intrinsic together; on a CPU, 1
    crowded: ClassVar[bool] = False  # whether threads of a GPU have no registers to spare while they run the intrinsic
    shared_alignment: ClassVar[int] = 16  # alignment in bytes of operands in the shared memory of a GPU

    @property
    def cluster(self) -> int:
        """The number of adjacent blocks of a GPU's grid that run the intrinsic together."""
        return 1

    @property
    def enough_blocks(self) -> int:
        """The number of blocks that must fit a multiprocessor of a GPU at once, which limits registers; 0: no limit is declared."""
        return 0

    @property
    def early(self) -> range:
        """The indices of the operands that the tile may read before the kernels that were launched earlier on the GPU have ended. If there
        are such operands, the tile itself waits for this end (`griddepcontrol.wait`) before it accesses other memory than these operands
        and shared memory."""
        return range(0)

    def runs_on(self, target: Target) -> bool:
        return self.needs <= target.features and self.vector_bits <= target.vector_bits

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        """Emit the code. `pointers` are the addresses of the operands; a dimension is an integer or the name of an i64 value."""
        raise NotImplementedError
