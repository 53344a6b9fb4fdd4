"""How weights are stored for the instructions that multiply them: one row per format.

Machines multiply signed bytes by unsigned bytes, so an integer of a panel is stored with an `offset`. A panel holds four neighbours along k
together, for each of its columns. A byte of fewer bits holds the weights at k, k + 4, ..., from the lowest bits on.
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
FOUR = 4  # products of bytes that an instruction adds into one sum
FRAGMENT_COLUMNS = 16  # of a weight, that one instruction of a tensor core multiplies
EIGHTHS = 3  # bits that are rounded off the product of a weight of 4 bits and the multiplier that widens it


@dataclass(frozen=True, slots=True, eq=False)
class Panels(Format):
    """Integers in panels [panels, k / depth, 4 * columns]; an element is what is stored, with its offset."""

    order: tuple[int, ...] = (0, 1, 2, 3)  # of four neighbours in a line; it is its own inverse

    @property
    def offset(self) -> int:
        return 1 << self.bits - 1

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    @property
    def padding(self) -> int:
        """The byte that fills columns beyond the last: weights of 0."""
        return sum(self.offset << self.bits * i for i in range(self.per_byte))

    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        panels = buffers[0]
        columns = panels.shape[-1].const // FOUR
        return (Load(panels, (*matrix, n // columns, k // self.depth, n % columns * FOUR + self.neighbour(k))),)

    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        byte = cast(stored[0], I32)
        return byte if self.bits == 8 else byte >> cast(index(k // FOUR % self.per_byte * self.bits), I32) & (1 << self.bits) - 1

    def neighbour(self, k: Dim) -> Dim:
        """The position of a weight among its four."""
        return k % FOUR if self.order == (0, 1, 2, 3) else k % 2 * 2 + k // 2 % 2

    def byte(self, line: Dim, j: Dim, number: Callable[[Dim], Scalar]) -> Scalar:
        """Byte `j` of a line, for a column whose weight at k is `number(k)`: without the offset where it has 8 bits, else with it."""
        if self.bits == 8:
            return number(line * FOUR + self.neighbour(j)) + self.offset
        first, *others = (number(line * self.depth + self.neighbour(j) + FOUR * i) for i in range(self.per_byte))
        for i, other in enumerate(others, 1):
            first = first | other << self.bits * i
        return first

    def packed(self, numbers: Any, columns: int) -> Any:
        """The panels of numbers [..., n, k], in NumPy."""
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
        """The weights [columns, k] of panels with their offset, in NumPy."""
        count, lines, wide = panels.shape
        parts = [panels >> self.bits * i & (1 << self.bits) - 1 for i in range(self.per_byte)]
        fours = np.stack([part.reshape(count, lines, wide // FOUR, FOUR) for part in parts], 2)  # [panels, line, part, columns, four]
        return fours[..., self.order].transpose(0, 3, 1, 2, 4).reshape(count * wide // FOUR, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Widened(Format):
    """Integers in panels beside multipliers [panels, groups, columns], by which they are widened to 8 bits."""

    panels: Panels

    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        multipliers = buffers[1]
        columns = multipliers.shape[-1].const
        found = Load(multipliers, (*matrix, n // columns, k // self.group(buffers), n % columns))
        return (*self.panels.places(buffers, n, k, matrix), found)

    def group(self, buffers: tuple[Buffer, ...]) -> int:
        """Neighbours along k that share a multiplier."""
        return (buffers[0].shape[-2] * self.depth // buffers[1].shape[-2]).const

    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        number = self.panels.decode(stored, k) - self.panels.offset
        return number * cast(stored[1], I32) + (1 << EIGHTHS - 1) >> EIGHTHS


@dataclass(frozen=True, slots=True, eq=False)
class Elements(Format):
    """Floats in panels [panels, k / depth, depth * columns], without change."""

    def held(self, line: Dim) -> tuple[Dim, Dim]:
        """The column in its panel, and k in its line, of the element with this number in a line."""
        raise NotImplementedError

    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        return stored[0]


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours(Elements):
    """Panels in which the neighbours of a column stand side by side."""

    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        columns = buffers[0].shape[-1].const // self.depth
        return (Load(buffers[0], (*matrix, n // columns, k // self.depth, n % columns * self.depth + k % self.depth)),)

    def held(self, line: Dim) -> tuple[Dim, Dim]:
        return line // self.depth, line % self.depth


@dataclass(frozen=True, slots=True, eq=False)
class Fragments(Elements):
    """In panels of 16 columns, as the registers of `mma.sync` hold them.

    A line is two instructions, of 16 along k each. The number of an element in a line has the bits, from the highest on: instruction;
    column % 8 and quad, the lane; half of its k; column // 8; neighbour. Lane `quad` of a column takes k % 32 // 8 == quad in both
    instructions, so of a row, too, a lane reads 8 neighbours at once."""

    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        column = n % FRAGMENT_COLUMNS
        lane = column % 8 * 4 + k % 32 // 8
        at = k % 8 // 4 * 256 + lane * 8 + k % 4 // 2 * 4 + column // 8 * 2 + k % 2
        return (Load(buffers[0], (*matrix, n // FRAGMENT_COLUMNS, k // self.depth, at)),)

    def held(self, line: Dim) -> tuple[Dim, Dim]:
        lane = line % 256 // 8
        return lane // 4 + line % 4 // 2 * 8, lane % 4 * 8 + line // 256 * 4 + line % 8 // 4 * 2 + line % 2

    def packed(self, numbers: Any) -> Any:
        """The panels of numbers [n, k], in NumPy."""
        n, k = numbers.shape
        padded = np.pad(numbers, ((0, -n % FRAGMENT_COLUMNS), (0, 0)))
        # column // 8, column % 8, quad, instruction, half, neighbour
        parts = padded.reshape(-1, 2, 8, k // self.depth, 4, 2, 2, 2)
        return parts.transpose(0, 3, 5, 2, 4, 6, 1, 7).reshape(-1, k // self.depth, self.depth * FRAGMENT_COLUMNS)

    def unpacked(self, panels: Any) -> Any:
        """The numbers [n, k] of panels, in NumPy."""
        count, lines, _ = panels.shape
        parts = panels.reshape(count, lines, 2, 8, 4, 2, 2, 2)  # instruction, column % 8, quad, half, column // 8, neighbour
        return parts.transpose(0, 6, 3, 1, 4, 2, 5, 7).reshape(count * FRAGMENT_COLUMNS, lines * self.depth)

    def chunks(self, k: int) -> list[Any]:
        """Which k each instruction sums, in the order of instructions."""
        numbers = np.arange(k).reshape(-1, 4, 2, 4).transpose(0, 2, 1, 3)
        return list(numbers.reshape(-1, 16))


@dataclass(frozen=True, slots=True, eq=False)
class IntegerFragments(Format):
    """Integers with an offset, in the panels of `Fragments`: [panels, k / 32, 64 * bits].

    A byte of 8 bits stands for an element. Of the eight numbers of 4 bits in a word, those with k % 4 < 2 lie in the lower half of their
    byte; bytes are numbered by neighbour and column // 8. So shifted words have the pairs of registers at their bits 0 and 16."""

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
        """Byte `line` of a line, where the weight of a column at k, plus its offset, is `number(column, k)`."""
        if self.bits == 8:
            lane, first = line // 16, line % 16 // 8 * 4 + line % 2
            return number(lane // 4 + line % 4 // 2 * 8, lane % 4 * 8 + first + line % 8 // 4 * 2)
        lane = line // 8
        column, k = lane // 4 + line % 2 * 8, lane % 4 * 8 + line % 8 // 4 * 4 + line % 4 // 2
        return number(column, k) | number(column, k + 2) << 4

    def unpacked(self, panels: Any) -> Any:
        """The weights [n, k] of panels, without their offset, in NumPy."""
        count, lines, _ = panels.shape
        if self.bits == 8:
            parts = panels.reshape(count, lines, 8, 4, 2, 2, 2, 2)  # column % 8, quad, instruction, half, column // 8, neighbour
            order = (0, 6, 2, 1, 3, 4, 5, 7)
        else:
            halves = np.stack([panels & 15, panels >> 4], -1)
            parts = halves.reshape(count, lines, 8, 4, 2, 2, 2, 2)  # column % 8, quad, instruction, neighbour, column // 8, half
            order = (0, 6, 2, 1, 3, 4, 7, 5)
        return parts.transpose(order).reshape(count * FRAGMENT_COLUMNS, lines * self.depth).astype(np.int32) - self.offset


F = TypeVar("F", bound=Format)


def _row(format: F) -> F:
    FORMATS.add(format.name, format)
    return format


PANEL8 = _row(Panels("panel8", bits=8, depth=4, rows=I8, dtype=I32))
# The lower bytes of two words of a row are neighbours, and so are the upper ones.
PANEL8_WORDS = _row(Panels("panel8_words", bits=8, depth=4, rows=I16, dtype=I32, order=(0, 2, 1, 3)))
PANEL4 = _row(Panels("panel4", bits=4, depth=8, rows=I8, dtype=I32))
WIDENED4 = _row(Widened("widened4", bits=4, depth=8, rows=I8, dtype=I32, panels=PANEL4))
FRAGMENTS = _row(Fragments("fragments", bits=16, depth=32, rows=BF16, dtype=BF16))
FRAGMENTS8 = _row(IntegerFragments("fragments8", bits=8, depth=32, rows=BF16, dtype=I32))
FRAGMENTS4 = _row(IntegerFragments("fragments4", bits=4, depth=32, rows=BF16, dtype=I32))
PAIRS = _row(Neighbours("pairs", bits=16, depth=2, rows=BF16, dtype=BF16))
PANELS: Mapping[str, Panels] = {name: found for name in FORMATS if isinstance(found := FORMATS[name], Panels)}
