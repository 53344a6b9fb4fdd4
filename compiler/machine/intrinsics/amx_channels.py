"""Products on AMX of few rows by 4-bit weights, over the whole of k at once (compiler/ops/products/widened.py).

The sums of all rows stay in registers of the unit over the whole of k. While the unit multiplies a step of 64 elements, vector instructions
widen a later step into a ring in the first-level cache. So weights are read in the order in which they are stored, and prefetches are a
fixed number of bytes ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.amx import TILE_BYTES, TILE_ROWS, AmxI8ByI8
from compiler.machine.intrinsics.base import Features, Intrinsic
from compiler.machine.intrinsics.widen_panel import STRETCH, WidenPanel
from compiler.machine.target import Target

RING = 4  # number of steps that the ring has room for, a power of two
AHEAD = 2  # steps by which widening runs ahead of the product
FETCHED = 6  # steps by which prefetches run ahead of widening
MOST_REGISTERS = 3  # maximum number of registers of rows; the sums of 32 columns then fill six of the unit's eight registers
STEP = TILE_BYTES  # elements along k of a step


@tile_op
class AmxChannels(Intrinsic):
    """amx_channels(c, a, ring, panel, multipliers, next panel, next multipliers) dims(k, stride, rows, second, third, slot, following):
    multiply one to three registers of rows by a panel.

    c [registers * 16 * columns]  sums of each register of rows, of which the first `rows` rows are used; the tile overwrites c
    a                             rows of i8, `stride` elements apart; the second and third register begin at rows `second` and `third`
    ring [RING * 64 * columns]    widened steps along k in local memory. Step i of the panel is at slot (slot + i) % RING. Before
                                  the tile runs, the first AHEAD steps are there. After it, the first `following` steps of the next
                                  panel are there, as if they were more steps of this panel.
    panel, multipliers            addresses of the first weight of a panel, and of its multiplier
    next panel ...                the panel that is multiplied next

    `following` is AHEAD, or 0 if no panel follows. k is a multiple of 64, and at least AHEAD steps.
    """

    name: ClassVar[str] = "amx_channels"
    needs: ClassVar[Features] = Features([*AmxI8ByI8.needs, *WidenPanel.needs])
    vector_bits: ClassVar[int] = 512
    registers: int  # number of registers of rows
    columns: int
    group: int  # elements along k that share a multiplier

    @property
    def operands(self) -> tuple[Operand, ...]:
        product = Operand("c", DType.I32, written=True), Operand("a", DType.I8), Operand("ring", DType.I8, written=True)
        panels = Operand("panel", DType.U8), Operand("multipliers", DType.I8)
        return *product, *panels, Operand("next panel", DType.U8), Operand("next multipliers", DType.I8)

    @property
    def dims(self) -> tuple[str, ...]:
        return ("k", "stride", "rows", "second", "third", "slot", "following")

    @property
    def widening(self) -> WidenPanel:
        return WidenPanel(self.columns, self.group)

    def problems(self) -> Iterator[str]:
        yield from AmxI8ByI8(TILE_ROWS, self.columns).problems()
        yield from self.widening.problems()
        if not 1 <= self.registers <= MOST_REGISTERS:
            yield f"registers are {self.registers}, expected 1 to {MOST_REGISTERS}"

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        (c, a, ring, panel, multipliers, later, later_multipliers), (k, stride, rows, second, third, slot, following) = arrays, dims
        slots, steps = ring[: RING * STEP * self.columns].reshape(RING, -1), k // STEP
        wide = np.concatenate([self._widened(panel, multipliers, steps), self._widened(later, later_multipliers, following)])
        for step in range(AHEAD):
            wide[step] = slots[(slot + step) % RING]
        for register, first in enumerate((0, second, third)[: self.registers]):
            unit = AmxI8ByI8(rows, self.columns, fresh=True)
            unit.meaning((c[register * TILE_ROWS * self.columns :], a[first * stride :], wide.reshape(-1)), (k, stride))
        for step in range(AHEAD, steps + following):
            slots[(slot + step) % RING] = wide[step]

    def _widened(self, panel: Array, multipliers: Array, steps: int) -> Array:
        """Return the first steps of a panel, widened: [steps, STEP * columns]."""
        wide = np.zeros((steps, STEP * self.columns), np.int8)
        self.widening.meaning((wide.reshape(-1), panel, multipliers), (steps * STEP,))
        return wide

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        _Channels(self, code, pointers, dims).run()


class _Channels:
    """Emits the code of `AmxChannels`. While the unit multiplies a step, vector instructions widen the step AHEAD steps later."""

    def __init__(self, op: AmxChannels, code: Code, pointers: Sequence[str], dims: Sequence[int | str]) -> None:
        """Compute the addresses of the registers of rows and of the next panel. `pointers` and `dims` are those of the tile `op`."""
        self.op, self.code = op, code
        self.c, a, self.ring, self.panel, self.multipliers, following, following_multipliers = pointers
        k, self.stride, _, second, third, self.slot, self.following = dims
        self.sides, self.columns, self.widening = op.columns // TILE_ROWS, op.columns, op.widening
        self.steps = code.op(f"sdiv i64 {k}, {STEP}")
        tops = (0, second, third)[: op.registers]
        self.lefts = [self.at(a, code.op(f"mul nsw i64 {self.stride}, {top}")) for top in tops]
        # The steps of the next panel are numbered after those of this panel. These addresses are moved back, so that the number of a step
        # gives its place.
        rows = code.op(f"sdiv i64 {k}, {op.group}")
        self.next_panel = self.at(following, self.times(self.steps, -self.step_bytes))
        self.next_multipliers = self.at(following_multipliers, self.times(rows, -op.columns))

    @property
    def step_bytes(self) -> int:
        """The bytes of a step of the packed panel."""
        return STEP * self.columns // 2

    def run(self) -> None:
        """Emit the code of all steps. The sums begin with 0, and are stored at the end."""
        code = self.code
        # The last AHEAD steps widen the first steps of the following panel, if there is one.
        num_widening = code.op(f"add nsw i64 {self.steps}, {code.op(f'sub nsw i64 {self.following}, {AHEAD}')}")
        with AmxI8ByI8(self.op.registers * TILE_ROWS, self.columns, fresh=True).accumulators(code, self.c):
            with code.loop("0", num_widening) as step:
                self.step(step, widens=True)
            with code.loop(num_widening, self.steps) as step:
                self.step(step, widens=False)

    def step(self, step: str, *, widens: bool) -> None:
        """Multiply one step along k. If `widens`, spread the widening of a later step evenly between the unit's products."""
        right = self.at(self.ring, self.times(self.slot_of(step), STEP * self.columns))
        lefts = [self.at(left, self.times(step, STEP)) for left in self.lefts]
        items = list(self.items(step)) if widens else []
        num_products = len(lefts) * self.sides

        def after(product: int) -> None:
            share = slice(product * len(items) // num_products, (product + 1) * len(items) // num_products)
            for stretch, side, pointers, to in items[share]:
                self.widening.widen_side(self.code, pointers, stretch, side, to=to)

        if len(lefts) < MOST_REGISTERS:
            AmxI8ByI8(len(lefts) * TILE_ROWS, self.columns).step(self.code, lefts, right, str(self.stride), after)
        else:
            self.multiply_three(lefts, right, after)

    def multiply_three(self, lefts: Sequence[str], right: str, after: Callable[[int], None]) -> None:
        """Add the products of three registers of rows. The sums leave one register for rows and one for columns. The first product of each
        register of rows uses the columns that are still loaded from the last product of the register before."""
        held, number = None, 0
        for i, left in enumerate(lefts):
            self.code.do(f"call void @llvm.x86.tileloadd64(i8 6, ptr {left}, i64 {self.stride})")
            for j in range(self.sides) if i % 2 == 0 else reversed(range(self.sides)):
                if j != held:
                    self.code.do(f"call void @llvm.x86.tileloadd64(i8 7, ptr {self.at(right, j * TILE_BYTES)}, i64 {4 * self.columns})")
                self.code.do(f"call void @llvm.x86.tdpbssd(i8 {2 * i + j}, i8 6, i8 7)")
                after(number)
                held, number = j, number + 1

    def items(self, step: str) -> Iterator[tuple[str, int, tuple[str, ...], str]]:
        """Yield the arguments of `WidenPanel.widen_side` for the weights that are widened during `step`: the stretch along k, the side, the
        operands, and the stretch of the ring that receives the result."""
        code, op = self.code, self.op
        later = code.op(f"add nsw i64 {step}, {AHEAD}")
        fetched = code.op(f"add nsw i64 {later}, {FETCHED}")
        ahead = (self.at(place, FETCHED * n) for place, n in ((self.panel, self.step_bytes), (self.next_panel, self.step_bytes)))
        panel = self.chosen(later, self.panel, self.next_panel)
        multipliers = self.chosen(later, self.multipliers, self.next_multipliers)
        wanted = self.chosen(fetched, *ahead)
        rows = FETCHED * STEP // op.group * op.columns
        wanted_multipliers = self.chosen(fetched, self.at(self.multipliers, rows), self.at(self.next_multipliers, rows))
        slot = self.slot_of(later)
        for half in range(STEP // STRETCH):
            stretch, to = (code.op(f"add nsw i64 {self.times(x, STEP // STRETCH)}, {half}") for x in (later, slot))
            for side in range(self.sides):
                yield stretch, side, (self.ring, panel, multipliers, wanted, wanted_multipliers), to

    def chosen(self, step: str, own: str, following: str) -> str:
        """Return `own` if a step belongs to this panel, and `following` if it belongs to the next panel."""
        return self.code.op(f"select i1 {self.code.op(f'icmp slt i64 {step}, {self.steps}')}, ptr {own}, ptr {following}")

    def slot_of(self, step: str) -> str:
        """Return the slot of the ring for a step. Steps of the next panel are numbered after those of this panel."""
        return self.code.op(f"and i64 {self.code.op(f'add nsw i64 {step}, {self.slot}')}, {RING - 1}")

    def times(self, number: str, factor: int) -> str:
        return self.code.op(f"mul nsw i64 {number}, {factor}")

    def at(self, place: str, num_bytes: int | str) -> str:
        return self.code.op(f"getelementptr i8, ptr {place}, i64 {num_bytes}")
