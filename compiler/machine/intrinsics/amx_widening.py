"""Products on AMX that widen 4-bit weights while the unit multiplies (compiler/ops/products/widened.py).

The unit multiplies a part of a panel that is already widened. After each of its instructions, vector instructions widen some of the part
that is multiplied next. The core executes both at once, so the slower of the two determines the time. Widening costs as much as the product
with sixty rows, so blocks of fewer rows take the time of widening alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.amx import TILE_BYTES, TILE_ROWS, After, AmxI8ByI8
from compiler.machine.intrinsics.base import Features, Intrinsic
from compiler.machine.intrinsics.widen_panel import COLUMNS, STRETCH, WidenPanel
from compiler.machine.target import Target

SHARE_BITS = 16  # fractional bits of the number of items that a step widens


@tile_op
class AmxWidening(Intrinsic):
    """amx_widening(c, a, b, wide, panel, multipliers, later panel, later multipliers) dims(k, stride, rows, second, first, share, items):
    multiply one or two registers of rows, and widen some weights meanwhile. The product is added to c, or overwrites it if `fresh`.

    c [blocks * 16 * columns]  accumulators of each register of rows, of which the first `rows` rows are used
    a                          rows of i8, `stride` elements apart; with two registers, the second begins `second` rows after the first
    b                          a widened part of a panel, k elements of each column
    wide ...                   operands as in widen_panel, for another part of a panel

    An item is 32 weights of each of 16 columns; there are `items` of them. Step i along k, of 64 elements, widens the items `begin` to
    `end` - 1. `begin` is (first + i * share) / 2^16, and `end` is (first + (i + 1) * share) / 2^16; both are rounded down and at most
    `items`.
    """

    name: ClassVar[str] = "amx_widening"
    needs: ClassVar[Features] = Features([*AmxI8ByI8.needs, *WidenPanel.needs])
    vector_bits: ClassVar[int] = 512
    blocks: int  # number of registers of rows
    columns: int
    group: int  # elements along k that share a multiplier
    fresh: bool = False  # the product overwrites c; otherwise it is added to c

    @property
    def operands(self) -> tuple[Operand, ...]:
        product = Operand("c", DType.I32, written=True), Operand("a", DType.I8), Operand("b", DType.I8)
        return *product, *self.widening.operands

    @property
    def dims(self) -> tuple[str, ...]:
        return ("k", "stride", "rows", "second", "first", "share", "items")

    @property
    def widening(self) -> WidenPanel:
        return WidenPanel(self.columns, self.group)

    @property
    def unit(self) -> AmxI8ByI8:
        return AmxI8ByI8(self.blocks * TILE_ROWS, self.columns, fresh=self.fresh, cached_panel=True, in_block=True)

    def problems(self) -> Iterator[str]:
        yield from self.unit.problems()
        yield from self.widening.problems()

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (c, a, b, *parts), (k, stride, rows, second, first, share, items) = arrays, dims
        size = TILE_ROWS * self.columns
        for block in range(self.blocks):
            unit = AmxI8ByI8(rows, self.columns, fresh=self.fresh)
            unit.meaning((c[block * size :], a[block * second * stride :], b), (k, stride))
        begin, end = (min(at >> SHARE_BITS, items) for at in (first, first + k // TILE_BYTES * share))
        if begin < end:
            self._widen(parts, begin, end)

    def _widen(self, parts: Sequence[Array], begin: int, end: int) -> None:
        """Widen the items `begin` to `end` - 1, and leave the other elements of `wide` as they are."""
        wide, sides = parts[0], self.widening.sides
        length = -(-end // sides) * STRETCH
        all_of_it = np.zeros(-(-length // self.group) * self.group * self.columns, np.int8)
        self.widening.meaning((all_of_it, *parts[1:]), (-(-length // self.group) * self.group,))
        made, found = (x[: length * self.columns].reshape(-1, STRETCH // 4, sides, COLUMNS * 4) for x in (wide, all_of_it))
        for item in range(begin, end):
            made[item // sides, :, item % sides] = found[item // sides, :, item % sides]

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        (c, a, b, *parts), (k, stride, _, second, first, share, items) = pointers, dims
        unit, widening = self.unit, self.widening
        after = code.op(f"mul nsw i64 {stride}, {second}")
        lefts = [a, code.op(f"getelementptr i8, ptr {a}, i64 {after}")][: self.blocks]

        def each(step: str) -> After:
            """Find the items that this step widens, and return the function that widens a share of them after each product."""
            done, num_products = code.op(f"add nsw i64 {first}, {code.op(f'mul nsw i64 {step}, {share}')}"), self.blocks * widening.sides
            part = code.op(f"udiv i64 {share}, {num_products}")
            ends = [code.op(f"add nsw i64 {done}, {code.op(f'mul nsw i64 {part}, {i}')}") for i in range(num_products)]
            items_at = [self._item(code, at, items) for at in (*ends, code.op(f"add nsw i64 {done}, {share}"))]

            def widen(product: int) -> None:
                with code.loop(items_at[product], items_at[product + 1]) as item:
                    stretch = code.op(f"udiv i64 {item}, {widening.sides}")
                    widening.widen_side(code, parts, stretch, code.op(f"urem i64 {item}, {widening.sides}"))

            return widen

        with unit.accumulators(code, c):
            unit.steps(code, lefts, str(stride), b, k, each)

    @staticmethod
    def _item(code: Code, place: str, items: int | str) -> str:
        """Return the whole part of a number of items with SHARE_BITS fractional bits, at most `items`."""
        number = code.op(f"lshr i64 {place}, {SHARE_BITS}")
        return code.op(f"select i1 {code.op(f'icmp slt i64 {number}, {items}')}, i64 {number}, i64 {items}")
