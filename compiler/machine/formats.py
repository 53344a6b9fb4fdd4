"""Formats: how weights are stored for the instructions that multiply them.

Instructions multiply signed bytes by unsigned bytes, so a panel stores integers plus an `offset`. For each column, a panel keeps four
neighbours along k adjacent. If a byte holds several weights, they are those at k, k + 4, and so on; the first is in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import FORMATS, Format, Load, Scalar
from compiler.ir.loops.write import cast, index

I8, I16, I32, BF16 = DType.I8, DType.I16, DType.I32, DType.BF16
FOUR = 4  # number of byte products that one instruction adds to a sum
FRAGMENT_COLUMNS = 16  # number of weight columns that one tensor core instruction multiplies
EIGHTHS = 3  # bits that are rounded off the product of a 4-bit weight and its multiplier


@dataclass(frozen=True, slots=True, eq=False)
class Panels(Format):
    """Integers in panels [panels, k / depth, 4 * columns]. An element is the stored integer, including its offset."""

    order: tuple[int, ...] = (0, 1, 2, 3)  # order in which a line stores four neighbours along k; this permutation is its own inverse

    @property
    def offset(self) -> int:
        return 1 << self.bits - 1

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    @property
    def padding(self) -> int:
        """The byte that fills the columns after the last one. It decodes to weights of 0."""
        return sum(self.offset << self.bits * i for i in range(self.per_byte))

    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        panels = buffers[0]
        columns = panels.shape[-1].const // FOUR
        return (Load(panels, (*matrix, n // columns, k // self.depth, n % columns * FOUR + self.neighbour(k))),)

    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        byte = cast(stored[0], I32)
        return byte if self.bits == 8 else byte >> cast(index(k // FOUR % self.per_byte * self.bits), I32) & (1 << self.bits) - 1

    def neighbour(self, k: Dim) -> Dim:
        """Return the position of the weight at k among the four neighbours that are stored together."""
        return k % FOUR if self.order == (0, 1, 2, 3) else k % 2 * 2 + k // 2 % 2

    def byte(self, line: Dim, j: Dim, number: Callable[[Dim], Scalar]) -> Scalar:
        """Return byte `j` of a line for one column. `number(k)` is the weight at k; it includes the offset if weights have fewer than 8
        bits."""
        if self.bits == 8:
            return number(line * FOUR + self.neighbour(j)) + self.offset
        first, *others = (number(line * self.depth + self.neighbour(j) + FOUR * i) for i in range(self.per_byte))
        for i, other in enumerate(others, 1):
            first = first | other << self.bits * i
        return first

    def packed(self, numbers: Any, columns: int) -> Any:
        """Pack numbers [..., n, k] into panels, in NumPy."""
        if numbers.ndim > 2:
            panels = [self.packed(matrix, columns) for matrix in numbers.reshape(-1, *numbers.shape[-2:])]
            return np.stack(panels).reshape(*numbers.shape[:-2], *panels[0].shape)
        n = len(numbers)
        if self.bits == 8:
            stored = (numbers.astype(np.int32) + self.offset).astype(np.uint8)
        else:
            parts = numbers.reshape(n, -1, self.per_byte, FOUR).astype(np.uint8)
            stored = np.bitwise_or.reduce([parts[:, :, i] << self.bits * i for i in range(self.per_byte)]).reshape(n, -1)
        padded = np.pad(stored, ((0, -n % columns), (0, 0)), constant_values=self.padding)
        fours = padded.reshape(-1, columns, stored.shape[1] // FOUR, FOUR).transpose(0, 2, 1, 3)
        return fours[..., self.order].reshape(-1, stored.shape[1] // FOUR, columns * FOUR)

    def stored(self, panels: Any) -> Any:
        """Unpack panels to weights [columns, k] that include the offset, in NumPy."""
        count, lines, wide = panels.shape
        parts = [panels >> self.bits * i & (1 << self.bits) - 1 for i in range(self.per_byte)]
        fours = np.stack([part.reshape(count, lines, wide // FOUR, FOUR) for part in parts], 2)  # [panels, line, part, columns, four]
        return fours[..., self.order].transpose(0, 3, 1, 2, 4).reshape(count * wide // FOUR, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Widened(Format):
    """Integers in panels, with multipliers [panels, groups, columns] that widen them to 8 bits."""

    panels: Panels

    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        multipliers = buffers[1]
        columns = multipliers.shape[-1].const
        found = Load(multipliers, (*matrix, n // columns, k // self.group(buffers), n % columns))
        return (*self.panels.places(buffers, n, k, matrix), found)

    def group(self, buffers: tuple[Buffer, ...]) -> int:
        """Return the number of neighbours along k that share a multiplier."""
        return (buffers[0].shape[-2] * self.depth // buffers[1].shape[-2]).const

    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        number = self.panels.decode(stored, k) - self.panels.offset
        return number * cast(stored[1], I32) + (1 << EIGHTHS - 1) >> EIGHTHS


@dataclass(frozen=True, slots=True, eq=False)
class Elements(Format):
    """Unchanged floats in panels [panels, k / depth, depth * columns]."""

    def held(self, line: Dim) -> tuple[Dim, Dim]:
        """Return where the element at position `line` of a line belongs: its column in the panel, and its k within the line."""
        raise NotImplementedError

    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        return stored[0]


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours(Elements):
    """Panels that store neighbours along k of a column next to each other."""

    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        columns = buffers[0].shape[-1].const // self.depth
        return (Load(buffers[0], (*matrix, n // columns, k // self.depth, n % columns * self.depth + k % self.depth)),)

    def held(self, line: Dim) -> tuple[Dim, Dim]:
        return line // self.depth, line % self.depth


@dataclass(frozen=True, slots=True, eq=False)
class Fragments(Elements):
    """Panels of 16 columns, in the order in which the registers of `mma.sync` hold them.

    A line serves two instructions, each of which multiplies 16 numbers along k. The index of an element in a line consists of these bits,
    highest first: the instruction; column % 8 and the quad, which together are the lane; the half of its k; column // 8; the neighbour. A
    lane multiplies the elements with k % 32 // 8 == quad in both instructions. These are 8 adjacent elements of a row, so the lane reads
    them at once.
    """

    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        column = n % FRAGMENT_COLUMNS
        lane = column % 8 * 4 + k % 32 // 8
        at = k % 8 // 4 * 256 + lane * 8 + k % 4 // 2 * 4 + column // 8 * 2 + k % 2
        return (Load(buffers[0], (*matrix, n // FRAGMENT_COLUMNS, k // self.depth, at)),)

    def held(self, line: Dim) -> tuple[Dim, Dim]:
        lane = line % 256 // 8
        return lane // 4 + line % 4 // 2 * 8, lane % 4 * 8 + line // 256 * 4 + line % 8 // 4 * 2 + line % 2

    def packed(self, numbers: Any) -> Any:
        """Pack numbers [n, k] into panels, in NumPy."""
        n, k = numbers.shape
        padded = np.pad(numbers, ((0, -n % FRAGMENT_COLUMNS), (0, 0)))
        # [panel, column // 8, column % 8, line, quad, instruction, half, neighbour]
        parts = padded.reshape(-1, 2, 8, k // self.depth, 4, 2, 2, 2)
        return parts.transpose(0, 3, 5, 2, 4, 6, 1, 7).reshape(-1, k // self.depth, self.depth * FRAGMENT_COLUMNS)

    def unpacked(self, panels: Any) -> Any:
        """Unpack panels to numbers [n, k], in NumPy."""
        count, lines, _ = panels.shape
        parts = panels.reshape(count, lines, 2, 8, 4, 2, 2, 2)  # [panel, line, instruction, column % 8, quad, half, column // 8, neighbour]
        return parts.transpose(0, 6, 3, 1, 4, 2, 5, 7).reshape(count * FRAGMENT_COLUMNS, lines * self.depth)

    def chunks(self, k: int) -> list[Any]:
        """Return the indices k that each instruction sums, in the order of instructions."""
        numbers = np.arange(k).reshape(-1, 4, 2, 4).transpose(0, 2, 1, 3)
        return list(numbers.reshape(-1, 16))


@dataclass(frozen=True, slots=True, eq=False)
class IntegerFragments(Format):
    """Integers with an offset in the panels of `Fragments`: [panels, k / 32, 64 * bits].

    With 8 bits, a byte holds one element. With 4 bits, a word holds eight numbers: those with k % 4 < 2 are in the lower halves of the
    bytes, and bytes are ordered by neighbour and column // 8. So one shift of the word moves the two numbers of a register to bits 0 and
    16.
    """

    @property
    def offset(self) -> int:
        return 1 << self.bits - 1

    @property
    def line_bytes(self) -> int:
        return FRAGMENT_COLUMNS * self.depth * self.bits // 8

    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        column = n % FRAGMENT_COLUMNS
        lane, step, half, high, neighbour = column % 8 * 4 + k % 32 // 8, k % 8 // 4, k % 4 // 2, column // 8, k % 2
        if self.bits == 8:
            at = lane * 16 + step * 8 + half * 4 + high * 2 + neighbour
        else:
            at = lane * 8 + step * 4 + neighbour * 2 + high
        return (Load(buffers[0], (*matrix, n // FRAGMENT_COLUMNS, k // self.depth, at)),)

    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        byte = cast(stored[0], I32)
        return byte - self.offset if self.bits == 8 else (byte >> cast(index(k % 4 // 2 * 4), I32) & 15) - self.offset

    def byte(self, line: Dim, number: Callable[[Dim, Dim], Scalar]) -> Scalar:
        """Return the byte at position `line` of a line. `number(column, k)` is the weight plus its offset."""
        if self.bits == 8:
            lane, first = line // 16, line % 16 // 8 * 4 + line % 2
            return number(lane // 4 + line % 4 // 2 * 8, lane % 4 * 8 + first + line % 8 // 4 * 2)
        lane = line // 8
        column, k = lane // 4 + line % 2 * 8, lane % 4 * 8 + line % 8 // 4 * 4 + line % 4 // 2
        return number(column, k) | number(column, k + 2) << 4

    def unpacked(self, panels: Any) -> Any:
        """Unpack panels to weights [n, k] without their offset, in NumPy."""
        count, lines, _ = panels.shape
        if self.bits == 8:
            # [panel, line, column % 8, quad, instruction, half, column // 8, neighbour]
            parts = panels.reshape(count, lines, 8, 4, 2, 2, 2, 2)
            order = (0, 6, 2, 1, 3, 4, 5, 7)
        else:
            halves = np.stack([panels & 15, panels >> 4], -1)
            # [panel, line, column % 8, quad, instruction, neighbour, column // 8, half]
            parts = halves.reshape(count, lines, 8, 4, 2, 2, 2, 2)
            order = (0, 6, 2, 1, 3, 4, 7, 5)
        return parts.transpose(order).reshape(count * FRAGMENT_COLUMNS, lines * self.depth).astype(np.int32) - self.offset


F = TypeVar("F", bound=Format)


def _row(format: F) -> F:
    FORMATS.add(format.name, format)
    return format


PANEL8 = _row(Panels("panel8", bits=8, depth=4, rows=I8, dtype=I32))
# For rows of 16 bits. Of four neighbours, the first two are the lower bytes of two 16-bit words, and the last two are the upper bytes.
PANEL8_WORDS = _row(Panels("panel8_words", bits=8, depth=4, rows=I16, dtype=I32, order=(0, 2, 1, 3)))
PANEL4 = _row(Panels("panel4", bits=4, depth=8, rows=I8, dtype=I32))
WIDENED4 = _row(Widened("widened4", bits=4, depth=8, rows=I8, dtype=I32, panels=PANEL4))
FRAGMENTS = _row(Fragments("fragments", bits=16, depth=32, rows=BF16, dtype=BF16))
FRAGMENTS8 = _row(IntegerFragments("fragments8", bits=8, depth=32, rows=BF16, dtype=I32))
FRAGMENTS4 = _row(IntegerFragments("fragments4", bits=4, depth=32, rows=BF16, dtype=I32))
PAIRS = _row(Neighbours("pairs", bits=16, depth=2, rows=BF16, dtype=BF16))
PANELS: Mapping[str, Panels] = {name: found for name in FORMATS if isinstance(found := FORMATS[name], Panels)}
