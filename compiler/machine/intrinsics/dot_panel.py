"""Exact sums of products of signed by unsigned integers, in registers: `dot_panel` for rows of bytes, `dot_words` for rows of 16-bit
words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from compiler.ir.dtypes import DType
from compiler.ir.numbers import Kind
from compiler.ir.tiles import Array, Operand, tile_op
from compiler.llvm.ssa import Code
from compiler.machine.formats import FOUR, PANEL6, PANEL8_WORDS, TABLE_PANELS
from compiler.machine.intrinsics.dot_panel_code import Panel
from compiler.machine.intrinsics.product import ProductOp
from compiler.machine.product_steps import avx2, avx512, neon, portable, wasm
from compiler.machine.product_steps.step import Step
from compiler.machine.target import Target

MOST_SMALL = 127  # largest number that a table may have in steps for weights of 4 bits, which add two products in 16 bits

# The steps for rows of bytes and for rows of words, the fastest first. A tile uses the first one that the target supports.
_BYTES = (
    avx512.SIGNED_BY_UNSIGNED,
    avx2.SIGNED_BY_UNSIGNED,
    neon.SIGNED_BY_UNSIGNED,
    neon.SIGNED_BY_SIGNED,
    avx512.SIGNED_BY_SMALL,
    avx2.SIGNED_BY_SMALL,
    wasm.SIGNED_BY_SMALL,
    wasm.WIDE_BY_SMALL,
    portable.SIGNED_BY_SMALL,
)
_WORDS = (avx512.WORDS_BY_UNSIGNED, avx2.WORDS_BY_UNSIGNED, wasm.WORDS_BY_UNSIGNED, portable.WORDS_BY_UNSIGNED)


@dataclass(frozen=True, slots=True)
class _PanelOp(ProductOp):
    """A product by a panel in a format of compiler/machine/formats.py. Sums are modulo 2^32. `columns` is a multiple of the lanes of a
    register (16, 8 or 4).

    If the panel is in L1 (`cached_panel`), the product does not prefetch it. It can prefetch memory that is read later: for every 4
    elements along k (weights of 8 bits), 8 (4 bits) or 16 (6 or 2 bits), it prefetches the next cache line of each operand `later0`,
    `later1` and so on.
    """

    accumulator: ClassVar[DType] = DType.I32
    panel_dtype: ClassVar[DType] = DType.U8

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Return operands with a panel of any element type, because the format `ScaledPanels` stores panels in words."""
        given = Operand("c", self.accumulator, written=True), Operand("a", self.row_dtype), Operand("b", None)
        return *given, *(Operand(f"later{i}", None) for i in range(self.num_later))

    @property
    def num_later(self) -> int:
        """The number of operands `later0`, `later1` and so on."""
        raise NotImplementedError

    def step(self, target: Target) -> Step | None:
        """Return the instructions with which a target computes the product, or None if it cannot compute the product."""
        raise NotImplementedError

    def runs_on(self, target: Target) -> bool:
        return self.step(target) is not None

    def _add(self, fours: Array, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        """Add to c the product of the rows of a and `fours`: the weights of a panel, [k / 4, columns, 4]."""
        (c, a, *_), (k, stride), (rows, columns) = arrays, dims, (self.rows, self.columns)
        left = np.stack([a[i * stride : i * stride + k] for i in range(rows)]).astype(np.int32)
        c[: rows * columns] += (left @ fours.swapaxes(1, 2).reshape(k, columns).astype(np.int32)).reshape(-1)

    def _panel(
        self,
        bits: int,
        code: Code,
        pointers: Sequence[str],
        dims: Sequence[int | str],
        target: Target,
        *,
        cached: bool,
        table: Sequence[int] = (),
    ) -> Panel:
        """Return the object that emits the product with instructions of the target, which must have such instructions. `bits` is the number
        of bits of a weight; `cached` says whether the panel is in L1; `table` has the unsigned numbers that codes stand for."""
        step = self.step(target)
        assert step is not None, (target, self)
        # A single row needs prefetches too: a core computes so much for each byte that its outstanding loads cover too few bytes.
        return Panel(self, bits, code, pointers, dims, step, table, prefetches=not cached)


@tile_op
class DotPanel(_PanelOp):
    """dot_panel(c, a, b) dims(k, stride): a product as in product.py. 32 bits of a column hold 4 weights of 8 bits, 8 of 4 bits
    or 16 of 2 bits, and 96 bits hold 16 weights of 6 bits. So k is a multiple of 4 (8 bits), 8 (4 bits) or 16 (2 or 6 bits)."""

    name: ClassVar[str] = "dot_panel"
    row_dtype: ClassVar[DType] = DType.I8
    bits: int  # bits of an element of b: 8, 6, 4 or 2
    kind: str = Kind.INT  # the kind of numbers of b. If it has a table, b is a panel of `TABLE_PANELS`
    cached_panel: bool = False  # b is in L1, so the product does not prefetch it
    later: int = 0  # number of operands `later0`, `later1` and so on
    # Each row of a consists of two planes, `stride` apart: the upper plane, whose numbers count 256 times and are zero except for outliers
    # (the few numbers that need 16 bits), and the lower plane. Zeros of upper planes are skipped.
    capped: bool = False

    def problems(self) -> Iterator[str]:
        if self.kind != Kind.INT and self.kind not in TABLE_PANELS:
            yield f"kind is {self.kind}, expected {Kind.INT} or one of {', '.join(TABLE_PANELS)}"
        elif self.bits not in (known := (8, 6, 4) if self.kind == Kind.INT else (TABLE_PANELS[Kind(self.kind)].bits,)):
            yield f"bits are {self.bits}, expected {' or '.join(map(str, known))} for numbers of kind {self.kind}"
        if self.capped and (self.bits == 6 or self.later):
            yield f"bits are {self.bits} and later is {self.later}, expected 8, 4 or 2, and 0 with capped rows"

    @property
    def table(self) -> tuple[int, ...]:
        """The unsigned number for each pattern of 4 bits; empty if the patterns are the numbers."""
        if self.kind == Kind.INT or self.bits != 4:
            return ()
        format = TABLE_PANELS[Kind(self.kind)]
        return tuple(int(n) + format.offset for n in format.numbers)

    @property
    def num_later(self) -> int:
        return self.later

    def step(self, target: Target) -> Step | None:
        step = next((s for s in _BYTES if s.runs_on(target)), None)
        if step is None or self.bits > step.bits or (self.table and step.look_up is None):
            return None
        return step if step.bits == 8 or max((0, *self.table)) <= MOST_SMALL else None

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        if self.capped:
            (c, a, b), (k, stride) = arrays, dims
            planes = [[a[i * stride : i * stride + k].astype(np.int32) for i in range(plane, 2 * self.rows, 2)] for plane in range(2)]
            joined = (np.stack(planes[0]) << 8) + np.stack(planes[1])
            replace(self, capped=False).meaning((c, joined.reshape(-1), b), (k, k))
            return
        stored = arrays[2].view(np.uint8)[: dims[0] * self.columns * self.bits // 8].reshape(-1, 1, self.columns, FOUR)
        if self.bits == 6:
            numbers = PANEL6.stored(stored.reshape(1, -1, self.columns * FOUR))  # [columns, k]
            self._add(numbers.reshape(self.columns, -1, FOUR).swapaxes(0, 1), arrays, dims)
            return
        mask = (1 << self.bits) - 1
        halves = stored if self.bits == 8 else np.concatenate([stored >> shift & mask for shift in range(0, 8, self.bits)], 1)
        halves = np.array(self.table, np.uint8)[halves] if self.table else halves
        self._add(halves.reshape(-1, self.columns, FOUR), arrays, dims)

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        panel = self._panel(self.bits, code, pointers, dims, target, cached=self.cached_panel, table=self.table)
        if self.capped:
            panel.run_capped()
        else:
            panel.run()


@tile_op
class DotWords(_PanelOp):
    """dot_words(c, a, b) dims(k, stride): a product as in product.py. Rows are i16, b is a panel in the format `PANEL8_WORDS`, and k is a
    multiple of 4."""

    name: ClassVar[str] = "dot_words"
    row_dtype: ClassVar[DType] = DType.I16
    cached_panel: bool = False  # b is in L1, so the product does not prefetch it
    later: int = 0  # number of operands `later0`, `later1` and so on

    @property
    def num_later(self) -> int:
        return self.later

    def step(self, target: Target) -> Step | None:
        return next((s for s in _WORDS if s.runs_on(target)), None)

    def meaning(self, arrays: Sequence[Array], dims: Sequence[int]) -> None:
        stored = arrays[2][: dims[0] * self.columns].reshape(-1, self.columns, FOUR)
        self._add(stored[..., PANEL8_WORDS.order], arrays, dims)

    def emit(self, code: Code, pointers: Sequence[str], dims: Sequence[int | str], target: Target) -> None:
        self._panel(8, code, pointers, dims, target, cached=self.cached_panel).run()
