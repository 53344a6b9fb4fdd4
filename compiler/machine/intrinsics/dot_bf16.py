"""Products of bf16 that add up pairs in f32 registers: `dot_bf16` for packed weights, and `dot_bf16_rows` for a right matrix that is not
packed.

In `dot_bf16`, the accumulators stay in registers for the whole of k. Every c[i, j] is summed in the order of k, for all values of `rows`
and `columns`. Of each pair, the second product is added first; a product and its addition are rounded once, together. An instruction may
treat denormals as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code, vec, vector_literal
from compiler.machine.intrinsics.base import Intrinsic
from compiler.machine.intrinsics.product import ProductOp, matrices
from compiler.machine.product_steps import avx512, portable
from compiler.machine.product_steps.step import Step
from compiler.machine.target import Target

PAIR = 2  # number of neighbours along k that fill 32 bits, which is the width of an accumulator


def _step(target: Target) -> Step:
    """Return the fastest instructions of the target that multiply and add pairs of bf16."""
    return avx512.BF16_PAIRS if avx512.BF16_PAIRS.runs_on(target) else portable.bf16_pairs(target.lanes(4))


@tile_op
class DotBf16(ProductOp):
    """dot_bf16(c, a, b) dims(k, stride): a product as in product.py. b is a panel in the order of the format `PAIRS`, k is even, and
    `columns` is a multiple of the lanes of a register (16, 8 or 4)."""

    name: ClassVar[str] = "dot_bf16"
    accumulator: ClassVar[DType] = DType.F32
    row_dtype: ClassVar[DType] = DType.BF16
    panel_dtype: ClassVar[DType] = DType.BF16

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        c, a, b = matrices(self, PAIR, arrays, dims)
        a, b = a.astype(np.float64), b.astype(np.float64)
        for g in range(a.shape[1]):
            for half in (1, 0):
                # The product of two bf16 is exact in f64. NumPy then rounds the sum twice, to f64 and to f32. This differs from a single
                # rounding only if the first result is a tie, which happens once in about 2^29 sums.
                c[...] = (c + a[:, g, half, None] * b[None, g, :, half]).astype(np.float32)

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        _Tile(self, code, pointers, dims, _step(target)).run()


class _Tile:
    """Emits the code of `DotBf16`."""

    def __init__(self, op: DotBf16, code: Code, pointers: Sequence[str], dims: Sequence[int | str], step: Step) -> None:
        self.code, self.step = code, step
        self.c, self.a, self.b = pointers
        self.k, self.stride = dims
        self.rows, self.columns = op.rows, op.columns
        assert self.columns % step.lanes == 0, (self.columns, step.lanes)
        self.vector = vec("float", step.lanes)
        self.vectors = range(self.columns // step.lanes)

    def run(self) -> None:
        """Emit the code: load the accumulators into registers, add the pairs along k, and store the accumulators."""
        code, step = self.code, self.step
        totals = {(i, j): code.alloca(self.vector) for i in range(self.rows) for j in self.vectors}
        for (i, j), total in totals.items():
            code.do(f"store {self.vector} {self._load(self._at(self.c, i * self.columns + j * step.lanes))}, ptr {total}")
        rows = [code.op(f"getelementptr bfloat, ptr {self.a}, i64 {self._row_offset(i)}") for i in range(self.rows)]
        groups = code.op(f"sdiv i64 {self.k}, {PAIR}")
        with code.loop("0", groups) as g:
            panel = code.op(f"getelementptr [{self.columns} x i32], ptr {self.b}, i64 {g}")
            loaded = [code.op(f"load {vec('i32', step.lanes)}, ptr {self._at(panel, j * step.lanes)}, align 4") for j in self.vectors]
            right = [step.right(code, x) for x in loaded]
            for i, row in enumerate(rows):
                one = code.op(f"load i32, ptr {code.op(f'getelementptr i32, ptr {row}, i64 {g}')}, align 2")
                left = step.left(code, one)
                for j in self.vectors:
                    self._add(totals[i, j], lambda old, j=j, left=left: step.add(code, old, left, right[j]))
        for (i, j), total in totals.items():
            code.do(f"store {self.vector} {self._load(total)}, ptr {self._at(self.c, i * self.columns + j * step.lanes)}, align 4")

    def _row_offset(self, row: int) -> str:
        return self.code.op(f"mul nsw i64 {self.stride}, {row}")

    def _at(self, base: str, offset: int) -> str:
        return self.code.op(f"getelementptr i32, ptr {base}, i64 {offset}")

    def _load(self, pointer: str) -> str:
        return self.code.op(f"load {self.vector}, ptr {pointer}, align 4")

    def _add(self, total: str, update: Callable[[str], str]) -> None:
        self.code.do(f"store {self.vector} {update(self._load(total))}, ptr {total}, align 4")


# --- a right matrix that is not packed ---------------------------------------------------------------------------------


@tile_op
class DotBf16Rows(Intrinsic):
    """dot_bf16_rows(c, a, upper, lower) dims(stride): c[i, j] += a[i, 0] * upper[j] + a[i, 1] * lower[j]. `upper` and `lower` are two rows
    of an unpacked right matrix; the tile interleaves them once for all rows of a. If `touching`, `lower` is not an operand."""

    name: ClassVar[str] = "dot_bf16_rows"
    rows: int
    columns: int
    touching: bool = False  # the lower row follows the upper row in memory, so one load reads both

    @property
    def operands(self) -> tuple[Operand, ...]:
        pair = [Operand("upper", DType.BF16), Operand("lower", DType.BF16)]
        return Operand("c", DType.F32, written=True), Operand("a", DType.BF16), *(pair[:1] if self.touching else pair)

    @property
    def dims(self) -> tuple[str, ...]:
        return ("stride",)

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (c, a, *rows), columns = arrays, self.columns
        upper, lower = (rows[0], rows[0][columns:]) if self.touching else rows
        pairs = np.stack([upper[:columns], lower[:columns]], -1).reshape(-1)
        DotBf16(self.rows, columns).meaning((c, a, pairs), (PAIR, *dims))

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        step, (c, a, *lines), (stride,) = _step(target), pointers, dims
        vector = vec("float", step.lanes)
        right = [step.right(code, x) for x in _interleaved(code, lines, self.columns, step.lanes)]
        for i in range(self.rows):
            place = code.op(f"getelementptr i16, ptr {a}, i64 {code.op(f'mul nsw i64 {stride}, {i}')}")
            left = step.left(code, code.op(f"load i32, ptr {place}, align 2"))
            for j, pairs in enumerate(right):
                total = code.op(f"getelementptr i32, ptr {c}, i64 {i * self.columns + j * step.lanes}")
                sums = step.add(code, code.op(f"load {vector}, ptr {total}, align 4"), left, pairs)
                code.do(f"store {vector} {sums}, ptr {total}, align 4")


def _interleaved(code: Code, rows: list[str], columns: int, lanes: int) -> list[str]:
    """Load two rows and interleave their elements into registers of pairs. If `rows` has a single address, the second row follows the first
    in memory, and one load reads both."""
    if len(rows) == 1:
        both = _some(code, rows[0], 0, PAIR * columns)
        return [_pairs(code, both, both, start, columns, lanes) for start in range(0, columns, lanes)]
    found: list[str] = []
    for first in range(0, columns, PAIR * lanes):
        length = min(PAIR * lanes, columns - first)
        upper, lower = (_some(code, row, first, length) for row in rows)
        found += [_pairs(code, upper, lower, start, length, lanes) for start in range(0, length, lanes)]
    return found


def _some(code: Code, row: str, first: int, length: int) -> str:
    return code.op(f"load {vec('i16', length)}, ptr {code.op(f'getelementptr i16, ptr {row}, i64 {first}')}, align 2")


def _pairs(code: Code, upper: str, lower: str, start: int, length: int, lanes: int) -> str:
    """Interleave `lanes` elements of two rows, beginning at `start`. If `upper` and `lower` are the same register, it holds both rows, and
    the second begins at element `length`."""
    kind = vec("i16", PAIR * length if upper is lower else length)
    order = vector_literal("i32", (half * length + start + lane for lane in range(lanes) for half in range(PAIR)))
    pairs = code.op(f"shufflevector {kind} {upper}, {kind} {lower}, {vec('i32', PAIR * lanes)} {order}")
    return code.op(f"bitcast {vec('i16', PAIR * lanes)} {pairs} to {vec('i32', lanes)}")
