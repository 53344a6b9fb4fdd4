"""Interleave rows in pairs, for matrix units, which multiply pairs of bf16. So a right matrix is packed while it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code, broadcast, vec, vector_literal
from compiler.machine.intrinsics.base import Features, Intrinsic
from compiler.machine.target import Target

PAIRS = 8


@tile_op
class InterleavePairs(Intrinsic):
    """interleave_pairs(out, source) dims(out stride, stride): interleave 16 rows of `columns` bf16. Rows 2i and 2i + 1 become row i of
    pairs.

    With `masked`, dims are (out stride, stride, low, high), and the tile writes zeros instead of rows outside low .. high - 1. The rows
    outside may contain anything, even NaN.
    """

    name: ClassVar[str] = "interleave_pairs"
    needs: ClassVar[Features] = Features(["amx-bf16", "avx512bf16"])
    columns: int
    masked: bool = False

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand("out", DType.BF16, written=True), Operand("source", DType.BF16)

    @property
    def dims(self) -> tuple[str, ...]:
        return ("out stride", "stride", *(("low", "high") if self.masked else ()))

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (out, source), (out_stride, stride, *seen), columns = arrays, dims, self.columns
        low, high = seen or (0, 2 * PAIRS)
        for row in range(2 * PAIRS):
            at = row // 2 * out_stride + row % 2
            out[at : at + 2 * columns : 2] = source[row * stride : row * stride + columns] if low <= row < high else 0

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        (out, source), (out_stride, stride, *seen), columns = pointers, dims, self.columns
        row, both, words = vec("i16", columns), vec("i16", 2 * columns), vec("i32", columns)
        order = vector_literal("i32", (half * columns + c for c in range(columns) for half in range(2)))
        masks = _masks(code, *seen) if seen else None

        def at(base: str, number: int, row_stride: int | str) -> str:
            return code.op(f"getelementptr i16, ptr {base}, i64 {code.op(f'mul nsw i64 {row_stride}, {number}')}")

        def interleaved(pair: int) -> str:
            """Interleave two rows. If they are adjacent in memory, load them as one vector."""
            if stride == columns:
                given = code.op(f"load {both}, ptr {at(source, 2 * pair, stride)}, align 2")
                return code.op(f"shufflevector {both} {given}, {both} poison, <{2 * columns} x i32> {order}")
            rows = [code.op(f"load {row}, ptr {at(source, 2 * pair + half, stride)}, align 2") for half in range(2)]
            return code.op(f"shufflevector {row} {rows[0]}, {row} {rows[1]}, <{2 * columns} x i32> {order}")

        for pair in range(PAIRS):
            value = interleaved(pair)
            if masks is not None:
                mask = broadcast(code, code.op(f"extractelement {vec('i32', PAIRS)} {masks}, i64 {pair}"), "i32", columns)
                value = code.op(f"and {both} {value}, {code.op(f'bitcast {words} {mask} to {both}')}")
            code.do(f"store {both} {value}, ptr {at(out, pair, out_stride)}, align 2")


def _masks(code: Code, low: int | str, high: int | str) -> str:
    """Return a mask of 32 bits per pair of rows: bits are set for a row that is kept, and clear for a row that becomes zero."""
    kind, numbers = vec("i16", 2 * PAIRS), vector_literal("i16", range(2 * PAIRS))

    def compared(how: str, limit: int | str) -> str:
        """Compare the number of each row with a limit, which is first brought into the range from 0 to 16."""
        most = code.op(f"call i64 @llvm.smin.i64(i64 {limit}, i64 {2 * PAIRS})")
        within = code.op(f"call i64 @llvm.smax.i64(i64 {most}, i64 0)")
        every = broadcast(code, code.op(f"trunc i64 {within} to i16"), "i16", 2 * PAIRS)
        return code.op(f"icmp {how} {kind} {numbers}, {every}")

    flags = vec("i1", 2 * PAIRS)
    inside = code.op(f"and {flags} {compared('sge', low)}, {compared('slt', high)}")
    return code.op(f"bitcast {kind} {code.op(f'sext {flags} {inside} to {kind}')} to {vec('i32', PAIRS)}")
