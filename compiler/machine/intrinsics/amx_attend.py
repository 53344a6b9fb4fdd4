"""A stage of attention on AMX: the softmax of some rows, while the unit multiplies those of the rows before and after them.

The core executes the vector instructions of the softmax while the unit multiplies, so the unit does not fall asleep (`AmxStayAwake`).
Measured on Emerald Rapids: for 130 cycles after a tile instruction, vectors of 512 bits are multiplied on one port only. So products hide
what they take beside the multiplications of the softmax, but not more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.amx import TILE_BYTES, TILE_ROWS, AmxBf16
from compiler.machine.intrinsics.base import Features, Intrinsic
from compiler.machine.intrinsics.prefetch import prefetch_lines
from compiler.machine.intrinsics.softmax_rows import PANEL, ROW_BYTES, BlockSoftmax, SoftmaxRows
from compiler.machine.target import Target

STEP = TILE_BYTES // 2  # elements along k that a step of the unit multiplies
SHARE_BITS = 16  # fractional bits of a number of rows


@tile_op
class AmxAttend(Intrinsic):
    """amx_attend(weights, scores, maximum, sums, rescale, later scores, queries, keys, products, earlier weights, values)
    dims(key panels, value panels): compute

    softmax_rows(weights, scores, maximum, sums, rescale)
    later scores[panels, rows, 32] = queries[rows, depth] * keys[panels, depth / 2, 64]
    products[value panels, rows, 32] = earlier weights[rows, panels * 32] * values[value panels, panels * 16, 64]

    A dimension is 0 if the tile must not compute that product; otherwise it is the number of panels. Keys and values are interleaved in
    pairs, as in amx_bf16. The configuration of the unit is that of a product of `rows` rows.
    """

    name: ClassVar[str] = "amx_attend"
    needs: ClassVar[Features] = Features([*AmxBf16.needs, *SoftmaxRows.needs])
    vector_bits: ClassVar[int] = 512
    rows: int
    panels: int
    depth: int
    value_panels: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        keys = Operand("later scores", DType.F32, written=True), Operand("queries", DType.BF16), Operand("keys", DType.BF16)
        values = Operand("products", DType.F32, written=True), Operand("earlier weights", DType.BF16), Operand("values", DType.BF16)
        return *self.softmax.operands, *keys, *values

    @property
    def dims(self) -> tuple[str, ...]:
        return ("key panels", "value panels")

    @property
    def softmax(self) -> SoftmaxRows:
        return SoftmaxRows(self.rows, self.panels)

    @property
    def unit(self) -> AmxBf16:
        return AmxBf16(self.rows, PANEL, fresh=True, cached_panel=True)

    def problems(self) -> Iterator[str]:
        yield from self.unit.problems()
        if self.depth % STEP:
            yield f"depth is {self.depth}, expected a multiple of {STEP}"

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (*softmax, scores, queries, keys, products, weights, values), unit, block = arrays, self.unit, self.panels * PANEL
        self.softmax.meaning(softmax, (self.rows,))
        for p in range(dims[0]):
            unit.meaning((scores[p * self.rows * PANEL :], queries, keys[p * self.depth * PANEL :]), (self.depth, self.depth))
        for p in range(dims[1]):
            unit.meaning((products[p * self.rows * PANEL :], weights, values[p * block * PANEL :]), (block, block))

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        *of_softmax, scores, queries, keys, products, weights, values = pointers
        softmax = BlockSoftmax(code, *of_softmax, rows=self.rows, panels=self.panels)
        with code.loop("0", str(self.rows), runs=True) as row:
            softmax.raise_maximum(row)
        softmax.find_rescale(str(self.rows))
        steps = self.depth // STEP
        share = -(-(self.rows << SHARE_BITS) // (self.panels * (steps + self.value_panels)))
        key_panels, value_panels = map(str, dims)
        before = code.op(f"mul nsw i64 {key_panels}, {steps * share}")
        done = code.op(f"add nsw i64 {before}, {code.op(f'mul nsw i64 {value_panels}, {self.panels * share}')}")
        self._multiply(code, softmax, (scores, queries, keys), (key_panels, steps), ("0", share))
        self._multiply(code, softmax, (products, weights, values), (value_panels, self.panels), (before, share))
        softmax.weigh_rows(self._row(code, done), str(self.rows), target)

    def _multiply(
        self, code: Code, softmax: BlockSoftmax, operands: Sequence[str], extents: tuple[str, int], share: tuple[str, int]
    ) -> None:
        """Multiply rows by panels, and compute weights meanwhile. `extents` are the numbers of panels, and of steps along k. `share` is the
        number of rows whose weights are computed before, and that of each step; both have SHARE_BITS fractional bits."""
        (c, a, b), (panels, steps), (first, each) = operands, extents, share
        unit, stride, size = AmxBf16(self.rows, PANEL, fresh=True), steps * TILE_BYTES, TILE_ROWS * ROW_BYTES
        with code.loop("0", panels) as panel:
            result, columns = (
                code.op(f"getelementptr [{n} x i8], ptr {base}, i64 {panel}") for base, n in ((c, self.rows * ROW_BYTES), (b, steps * size))
            )
            with unit.accumulators(code, result), code.loop("0", str(steps), runs=True) as step:
                left = code.op(f"getelementptr [{TILE_BYTES} x i8], ptr {a}, i64 {step}")
                right = code.op(f"getelementptr [{size} x i8], ptr {columns}, i64 {step}")
                lefts = [code.op(f"getelementptr i8, ptr {left}, i64 {top * stride}") for top in range(0, self.rows, TILE_ROWS)]
                unit.step(code, lefts, right, str(stride))
                prefetch_lines(code, right, size, size, far=False)  # what the next step multiplies
                number = code.op(f"add nsw i64 {code.op(f'mul nsw i64 {panel}, {steps}')}, {step}")
                begin = code.op(f"add nsw i64 {code.op(f'mul nsw i64 {number}, {each}')}, {first}")
                with code.loop(*(self._row(code, at) for at in (begin, code.op(f"add nsw i64 {begin}, {each}")))) as row:
                    softmax.weigh(row)

    def _row(self, code: Code, share: str) -> str:
        whole = code.op(f"lshr i64 {share}, {SHARE_BITS}")
        return code.op(f"call i64 @llvm.smin.i64(i64 {whole}, i64 {self.rows})")
