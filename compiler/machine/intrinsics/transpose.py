"""Transpose a square of 16 rows of 16 elements in registers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code, vec, vector_literal
from compiler.machine.intrinsics.base import Intrinsic
from compiler.machine.target import Target

SIDE = 16


@tile_op
class Transpose(Intrinsic):
    """transpose(out, source) dims(stride): out[j, i] = source[i, j]. The rows of `source` follow each other; those of `out` are `stride`
    elements apart. An element has `width` bytes: 1, 2 or 4."""

    name: ClassVar[str] = "transpose"
    width: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand("out", None, written=True), Operand("source", None)

    @property
    def dims(self) -> tuple[str, ...]:
        return ("stride",)

    def problems(self) -> Iterator[str]:
        if self.width not in (1, 2, 4):
            yield f"width is {self.width}, expected 1, 2 or 4 bytes"

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (out, source), (stride,) = arrays, dims
        square = source[: SIDE * SIDE].reshape(SIDE, SIDE)
        for j in range(SIDE):
            out[j * stride : j * stride + SIDE] = square[:, j]

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        """Emit the code of the tile: exchange blocks of 8 by 8 elements, then blocks of 4 by 4 within each, then 2 by 2, then elements."""
        (out, source), (stride,) = pointers, dims
        element, row = f"i{8 * self.width}", vec(f"i{8 * self.width}", SIDE)
        places = [code.op(f"getelementptr {element}, ptr {source}, i64 {i * SIDE}") for i in range(SIDE)]
        rows = [code.op(f"load {row}, ptr {place}, align {self.width}") for place in places]
        size = SIDE // 2
        while size:
            for i in (i for i in range(SIDE) if not i & size):
                pair = rows[i], rows[i + size]
                rows[i] = _chosen(code, row, pair, [j if not j & size else SIDE + j - size for j in range(SIDE)])
                rows[i + size] = _chosen(code, row, pair, [j + size if not j & size else SIDE + j for j in range(SIDE)])
            size //= 2
        for j, found in enumerate(rows):
            place = code.op(f"getelementptr {element}, ptr {out}, i64 {code.op(f'mul nsw i64 {stride}, {j}')}")
            code.do(f"store {row} {found}, ptr {place}, align {self.width}")


def _chosen(code: Code, row: str, pair: tuple[str, str], order: Sequence[int]) -> str:
    return code.op(f"shufflevector {row} {pair[0]}, {row} {pair[1]}, <{SIDE} x i32> {vector_literal('i32', order)}")
