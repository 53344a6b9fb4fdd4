"""Pack rows of bytes into a panel of integers while they are read, for products with a right matrix that is not packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code, splat, vec, vector_literal
from compiler.machine.formats import FOUR, PANEL8, PANEL8_WORDS
from compiler.machine.intrinsics.base import Intrinsic
from compiler.machine.target import Target

LANES = 16  # number of columns of a register


@tile_op
class PackBytes(Intrinsic):
    """pack_bytes(out, source) dims(stride, panel stride): pack four rows of i8, which are `stride` elements apart, into one line of each
    panel that they fill. The format of the panels is `PANEL8`, or `PANEL8_WORDS` if `words`; a panel has `width` columns."""

    name: ClassVar[str] = "pack_bytes"
    columns: int  # number of columns of a row, a multiple of `width`
    width: int
    words: bool = False

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand("out", DType.U8, written=True), Operand("source", DType.I8)

    @property
    def dims(self) -> tuple[str, ...]:
        return "stride", "panel stride"

    @property
    def order(self) -> tuple[int, ...]:
        return (PANEL8_WORDS if self.words else PANEL8).order

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (out, source), (stride, panel_stride), width = arrays, dims, self.width
        rows = np.stack([source[j * stride : j * stride + self.columns] for j in self.order], -1)
        shifted = (rows.astype(np.int32) + PANEL8.offset).astype(np.uint8).reshape(-1, FOUR * width)
        for panel, line in enumerate(shifted):
            out[panel * panel_stride : panel * panel_stride + FOUR * width] = line

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        (out, source), (stride, panel_stride) = pointers, dims
        bytes_ = vec("i8", FOUR * LANES)
        for first, line in self._lines(code, source, stride):
            panel, column = divmod(first, self.width)
            at = code.op(f"getelementptr i8, ptr {out}, i64 {code.op(f'mul nsw i64 {panel_stride}, {panel}')}")
            place = code.op(f"getelementptr i8, ptr {at}, i64 {FOUR * column}")
            shifted = code.op(f"xor {bytes_} {line}, {splat('-128', 'i8', FOUR * LANES)}")
            code.do(f"store {bytes_} {shifted}, ptr {place}, align 1")

    def _lines(self, code: Code, source: str, stride: int | str) -> list[tuple[int, str]]:
        """Return the packed columns, in registers of LANES columns, each with the number of its first column."""
        columns, order = self.columns, self.order
        if stride == columns == LANES:
            return [(0, self._transposed(code, source))]
        row, both = vec("i8", columns), vec("i8", 2 * columns)
        given: list[str] = []
        for j in order:
            at = code.op(f"getelementptr i8, ptr {source}, i64 {code.op(f'mul nsw i64 {stride}, {j}')}")
            given.append(code.op(f"load {row}, ptr {at}, align 1"))
        places = vector_literal("i32", (half * columns + c for c in range(columns) for half in range(2)))
        words, found, pairs = vec("i16", columns), list[tuple[int, str]](), list[str]()
        for a, b in (given[:2], given[2:]):
            pair = code.op(f"shufflevector {row} {a}, {row} {b}, {vec('i32', 2 * columns)} {places}")
            pairs.append(code.op(f"bitcast {both} {pair} to {words}"))
        for first in range(0, columns, LANES):
            places = vector_literal("i32", (half * columns + first + c for c in range(LANES) for half in range(2)))
            line = code.op(f"shufflevector {words} {pairs[0]}, {words} {pairs[1]}, {vec('i32', 2 * LANES)} {places}")
            found.append((first, code.op(f"bitcast {vec('i16', 2 * LANES)} {line} to {vec('i8', FOUR * LANES)}")))
        return found

    def _transposed(self, code: Code, source: str) -> str:
        """Pack four adjacent rows of 16 bytes. First gather the words of four columns in each quarter of the register, then transpose each
        quarter."""
        words, bytes_, indices = vec("i32", LANES), vec("i8", FOUR * LANES), vec("i32", FOUR * LANES)
        given = code.op(f"load {words}, ptr {source}, align 1")
        places = vector_literal("i32", (j * FOUR + quarter for quarter in range(FOUR) for j in range(FOUR)))
        gathered = code.op(f"shufflevector {words} {given}, {words} poison, {words} {places}")
        gathered = code.op(f"bitcast {words} {gathered} to {bytes_}")
        places = vector_literal(
            "i32", (FOUR * (FOUR * quarter + j) + c for quarter in range(FOUR) for c in range(FOUR) for j in self.order)
        )
        return code.op(f"shufflevector {bytes_} {gathered}, {bytes_} poison, {indices} {places}")
