"""A stage of attention on AMX: vector instructions compute the softmax of some rows, while the unit multiplies queries by keys for the rows
after them, and weights by values for the rows before them.

The products in between keep the unit from falling asleep (`AmxStayAwake`). Measured on Emerald Rapids: up to 130 cycles after a tile
instruction, a core multiplies vectors of 512 bits on one port instead of two. So beside tile products, the multiplications of the softmax
take twice as long; its additions and integer operations do not.
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
SHARE_BITS = 16  # fractional bits of fixed-point numbers of rows


@tile_op
class AmxAttend(Intrinsic):
    """amx_attend(weights, scores, maximum, sums, rescale, later scores, queries, keys, products, earlier weights, values)
    dims(seen panels, key panels, value panels, earlier panels): compute

    softmax_rows(weights, scores, maximum, sums, rescale), of the first `seen panels` panels
    later scores[key panels, rows, 32] = queries[rows, depth] * keys[key panels, depth / 2, 64]
    products[value panels, rows, 32] = earlier weights[rows, earlier panels * 32] * values[value panels, earlier panels * 16, 64]

    Arrays have room for `panels` panels of keys. `seen panels`, the number of panels of scores that the softmax reads, is at least 1. The
    number of key panels, or of value panels, is 0 if the tile must not compute that product. Keys and values are interleaved in pairs, as
    in amx_bf16. The configuration of the unit is that of a product of `rows` rows. Each number of seen panels has separate code, with
    unrolled loops over these panels.
    """

    name: ClassVar[str] = "amx_attend"
    needs: ClassVar[Features] = Features([*AmxBf16.needs, *SoftmaxRows.needs])
    vector_bits: ClassVar[int] = 512
    rows: int  # number of rows of a product
    panels: int  # maximum number of panels of keys
    depth: int  # number of elements of a query
    value_panels: int  # maximum number of value panels

    @property
    def operands(self) -> tuple[Operand, ...]:
        keys = Operand("later scores", DType.F32, written=True), Operand("queries", DType.BF16), Operand("keys", DType.BF16)
        values = Operand("products", DType.F32, written=True), Operand("earlier weights", DType.BF16), Operand("values", DType.BF16)
        return *self.softmax.operands, *keys, *values

    @property
    def dims(self) -> tuple[str, ...]:
        return ("seen panels", "key panels", "value panels", "earlier panels")

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
        seen, key_panels, value_panels, earlier = dims
        self.softmax.meaning_of(softmax, self.rows, seen)
        for p in range(key_panels):
            unit.meaning((scores[p * self.rows * PANEL :], queries, keys[p * self.depth * PANEL :]), (self.depth, self.depth))
        for p in range(value_panels):
            unit.meaning((products[p * self.rows * PANEL :], weights, values[p * block * PANEL :]), (earlier * PANEL, block))

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        *of_softmax, scores, queries, keys, products, weights, values = pointers
        panels, key_panels, value_panels, earlier = map(str, dims)
        steps = self.depth // STEP
        of_keys, of_values = code.op(f"mul nsw i64 {key_panels}, {steps}"), code.op(f"mul nsw i64 {value_panels}, {earlier}")
        total = code.op(f"add nsw i64 {of_keys}, {of_values}")
        divisor = code.op(f"call i64 @llvm.smax.i64(i64 {total}, i64 1)")
        share = code.op(f"add nsw i64 {code.op(f'sdiv i64 {self.rows << SHARE_BITS}, {divisor}')}, 1")
        before, done = (code.op(f"mul nsw i64 {count}, {share}") for count in (of_keys, total))
        for seen in range(1, self.panels + 1):
            softmax = BlockSoftmax(code, *of_softmax, rows=self.rows, panels=self.panels, seen=seen)
            with code.when(code.op(f"icmp eq i64 {panels}, {seen}")):
                with code.loop("0", str(self.rows), runs=True) as row:
                    softmax.raise_maximum(row)
                softmax.find_rescale(str(self.rows))
                self._multiply(code, softmax, (scores, queries, keys), (key_panels, steps, str(steps)), ("0", share))
                self._multiply(code, softmax, (products, weights, values), (value_panels, self.panels, earlier), (before, share))
                softmax.weigh_rows(self._row(code, done), str(self.rows), target)

    def _multiply(
        self, code: Code, softmax: BlockSoftmax, operands: Sequence[str], extents: tuple[str, int, str], share: tuple[str, str]
    ) -> None:
        """Multiply rows by panels, and compute weights meanwhile. `extents` are the number of panels, the number of steps along k for which
        the arrays have room, and the number of steps to compute. `share` is the number of rows whose weights are computed before this
        product, and the number of rows whose weights are computed in each step. Both numbers have SHARE_BITS fractional bits."""
        (c, a, b), (panels, most, steps), (first, each) = operands, extents, share
        unit, stride, size = AmxBf16(self.rows, PANEL, fresh=True), most * TILE_BYTES, TILE_ROWS * ROW_BYTES
        with code.loop("0", panels) as panel:
            result, columns = (
                code.op(f"getelementptr [{n} x i8], ptr {base}, i64 {panel}") for base, n in ((c, self.rows * ROW_BYTES), (b, most * size))
            )
            with unit.accumulators(code, result), code.loop("0", steps, runs=True) as step:
                left = code.op(f"getelementptr [{TILE_BYTES} x i8], ptr {a}, i64 {step}")
                right = code.op(f"getelementptr [{size} x i8], ptr {columns}, i64 {step}")
                lefts = [code.op(f"getelementptr i8, ptr {left}, i64 {top * stride}") for top in range(0, self.rows, TILE_ROWS)]
                unit.step(code, lefts, right, str(stride))
                prefetch_lines(code, right, size, size, far=False)  # the columns that the next step multiplies
                number = code.op(f"add nsw i64 {code.op(f'mul nsw i64 {panel}, {steps}')}, {step}")
                begin = code.op(f"add nsw i64 {code.op(f'mul nsw i64 {number}, {each}')}, {first}")
                with code.loop(*(self._row(code, at) for at in (begin, code.op(f"add nsw i64 {begin}, {each}")))) as row:
                    softmax.weigh(row)

    def _row(self, code: Code, share: str) -> str:
        """Return the whole part of a number of rows with SHARE_BITS fractional bits, at most `rows`."""
        whole = code.op(f"lshr i64 {share}, {SHARE_BITS}")
        return code.op(f"call i64 @llvm.smin.i64(i64 {whole}, i64 {self.rows})")
