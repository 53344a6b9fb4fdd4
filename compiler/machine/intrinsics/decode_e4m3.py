"""Decode a panel of 8-bit floats to the pairs of bf16 that a matrix unit multiplies. bf16 represents them exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code
from compiler.machine.formats import PANEL_E4M3
from compiler.machine.intrinsics.base import Features, Intrinsic
from compiler.machine.intrinsics.dot_e4m3 import BYTES, PANEL_BYTES, decoded_pairs, pairs_of_panel
from compiler.machine.intrinsics.prefetch import prefetch_twice
from compiler.machine.target import LINE_BYTES, Target


@tile_op
class DecodeE4m3(Intrinsic):
    """decode_e4m3(pairs, panel) dims(k): decode k numbers of each column of a panel in the format `PANEL_E4M3`.

    pairs[k * columns] bf16   the result in local memory, in the order in which the matrix unit reads a panel: [k / 2, columns, 2]
    panel                     address of the first number; k is a multiple of 4
    """

    name: ClassVar[str] = "decode_e4m3"
    needs: ClassVar[Features] = Features(["avx512bw", "avx512vbmi"])
    vector_bits: ClassVar[int] = 512
    columns: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand("pairs", DType.BF16, written=True), Operand("panel", DType.E4M3)

    @property
    def dims(self) -> tuple[str, ...]:
        return ("k",)

    def problems(self) -> Iterator[str]:
        if self.columns != PANEL_E4M3.columns:
            yield f"columns are {self.columns}, expected {PANEL_E4M3.columns}"

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (pairs, panel), (k,) = arrays, dims
        pairs[: k * self.columns] = pairs_of_panel(panel, k, self.columns)

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        (pairs, panel), (k,) = pointers, dims
        halves = range(PANEL_E4M3.depth // 2)
        with code.loop("0", code.op(f"sdiv i64 {k}, {PANEL_E4M3.depth}")) as line:
            begin = code.op(f"getelementptr [{PANEL_BYTES} x i8], ptr {panel}, i64 {line}")
            made = code.op(f"getelementptr [{2 * PANEL_BYTES} x i8], ptr {pairs}, i64 {line}")
            prefetch_twice(code, begin, PANEL_BYTES)
            for part, offset in enumerate(range(0, PANEL_BYTES, LINE_BYTES)):
                stored = code.op(f"load {BYTES}, ptr {code.op(f'getelementptr i8, ptr {begin}, i64 {offset}')}, align 1")
                for half, decoded in zip(halves, decoded_pairs(code, stored), strict=True):
                    place = code.op(f"getelementptr i8, ptr {made}, i64 {half * PANEL_BYTES + part * LINE_BYTES}")
                    code.do(f"store <{LINE_BYTES // 2} x bfloat> {decoded}, ptr {place}, align 64")
