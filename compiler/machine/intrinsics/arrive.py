"""Find out which block of a GPU launch arrives last at a counter. The last block sees everything that the other blocks wrote before they
arrived, and can combine their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.base import Intrinsic
from compiler.machine.target import GPU, Target

_GLOBAL = "ptr addrspace(1)"
_FENCE = 'fence syncscope("device") acq_rel'
_BARRIER = "call void @llvm.nvvm.barrier.cta.sync.aligned.all(i32 0)"


@tile_op
class Arrive(Intrinsic):
    """block_arrive(is_last, counter) dims(count): count this block. Set `is_last`, in shared memory, to 1 in the last of `count` blocks and
    to 0 in the others. The counter must be 0 at first. The last block resets it to 0."""

    name: ClassVar[str] = "block_arrive"
    threads: ClassVar[int] = 128

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand("is_last", DType.I32, written=True), Operand("counter", DType.I32, written=True)

    @property
    def dims(self) -> tuple[str, ...]:
        return ("count",)

    def runs_on(self, target: Target) -> bool:
        return target.system == GPU

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (is_last, counter), (count,) = arrays, dims
        is_last[0] = counter[0] + 1 == count
        counter[0] = 0 if is_last[0] else counter[0] + 1

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        """Emit the code of the tile. The fence before the count publishes the block's writes; the fence after the count keeps later reads
        from moving before it."""
        is_last, counter = pointers
        code.do(_FENCE)
        code.do(_BARRIER)
        thread = code.op("call i32 @llvm.nvvm.read.ptx.sreg.tid.x()")
        with code.when(code.op(f"icmp eq i32 {thread}, 0")):
            place = code.op(f"addrspacecast ptr {counter} to {_GLOBAL}")
            before = code.op(f'atomicrmw add {_GLOBAL} {place}, i32 1 syncscope("device") monotonic, align 4')
            wanted = code.op(f"trunc i64 {code.op(f'sub i64 {dims[0]}, 1')} to i32")
            last = code.op(f"icmp eq i32 {before}, {wanted}")
            code.do(f"store i32 {code.op(f'zext i1 {last} to i32')}, ptr {is_last}, align 4")
            with code.when(last):
                code.do(f"store i32 0, {_GLOBAL} {place}, align 4")
        code.do(_BARRIER)
        code.do(_FENCE)
