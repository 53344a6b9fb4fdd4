"""Formats of weights: where each element is stored, and how it is decoded.

Instructions multiply signed bytes by unsigned bytes, so panels of integers store each weight plus an `offset`, as an unsigned number. A
panel [lines, bytes] has a line for each `depth` neighbours along k. A line stores four neighbours of a column next to each other. If a byte
holds several weights, these are the weights at k, k + 4, and so on; the first is in the lowest bits.
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
EIGHTHS = 3  # a multiplier counts eighths: its product with a 4-bit weight is shifted right by this many bits, and rounded


@dataclass(frozen=True, slots=True, eq=False)
class Panels(Format):
    """Integers in panels [panels, k / depth, 4 * columns]. An element is the stored integer, which includes the offset."""

    order: tuple[int, ...] = (0, 1, 2, 3)  # order in which a line stores four neighbours along k; the inverse permutation is the same

    @property
    def offset(self) -> int:
        return 1 << self.bits - 1

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    @property
    def padding(self) -> int:
        """The byte that pads the last panel: its weights are 0."""
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
        """Return byte `j` of a column in line `line`. `number(k)` is the weight at k, plus the offset if weights have fewer than 8 bits."""
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
        """Unpack panels, in NumPy. Return the stored integers [columns, k], which include the offset."""
        count, lines, wide = panels.shape
        parts = [panels >> self.bits * i & (1 << self.bits) - 1 for i in range(self.per_byte)]
        fours = np.stack([part.reshape(count, lines, wide // FOUR, FOUR) for part in parts], 2)  # [panels, line, part, columns, four]
        return fours[..., self.order].transpose(0, 3, 1, 2, 4).reshape(count * wide // FOUR, -1)


@dataclass(frozen=True, slots=True, eq=False)
class Widened(Format):
    """Integers of 4 bits in panels, and multipliers [panels, groups, columns]. A weight is its integer times the multiplier of its group,
    divided by 8 and rounded, which fits in 8 bits."""

    panels: Panels

    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        multipliers = buffers[1]
        columns = multipliers.shape[-1].const
        found = Load(multipliers, (*matrix, n // columns, k // self.group(buffers), n % columns))
        return (*self.panels.places(buffers, n, k, matrix), found)

    def group(self, buffers: tuple[Buffer, ...]) -> int:
        """Return the number of weights along k that share a multiplier."""
        return (buffers[0].shape[-2] * self.depth // buffers[1].shape[-2]).const

    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        number = self.panels.decode(stored, k) - self.panels.offset
        return number * cast(stored[1], I32) + (1 << EIGHTHS - 1) >> EIGHTHS


@dataclass(frozen=True, slots=True, eq=False)
class Elements(Format):
    """Floats, stored as they are in panels [panels, k / depth, depth * columns]."""

    def column_and_k(self, at: Dim) -> tuple[Dim, Dim]:
        """Return which element a line stores at this position: its column in the panel, and its k relative to the line's first k."""
        raise NotImplementedError

    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        return stored[0]


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours(Elements):
    """Panels whose lines store the neighbours along k of a column next to each other."""

    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        columns = buffers[0].shape[-1].const // self.depth
        return (Load(buffers[0], (*matrix, n // columns, k // self.depth, n % columns * self.depth + k % self.depth)),)

    def column_and_k(self, at: Dim) -> tuple[Dim, Dim]:
        return at // self.depth, at % self.depth


@dataclass(frozen=True, slots=True, eq=False)
class Fragments(Elements):
    """Panels of 16 columns in the order of the registers of the tensor core instruction `mma.sync`.

    A line has the operands of two instructions, each of which multiplies 16 elements along k. The bits of a position in a line are, from
    the highest: the instruction (1 bit); column % 8 (3 bits) and the quad (2 bits), which together number the lane; the half of the
    instruction's k (1 bit); column // 8 (1 bit); the neighbour (1 bit). In both instructions, a lane multiplies the elements whose k % 32
    // 8 is its quad. These are 8 adjacent elements of a row, so the lane loads them at once.
    """

    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        column = n % FRAGMENT_COLUMNS
        lane = column % 8 * 4 + k % 32 // 8
        at = k % 8 // 4 * 256 + lane * 8 + k % 4 // 2 * 4 + column // 8 * 2 + k % 2
        return (Load(buffers[0], (*matrix, n // FRAGMENT_COLUMNS, k // self.depth, at)),)

    def column_and_k(self, at: Dim) -> tuple[Dim, Dim]:
        lane = at % 256 // 8
        return lane // 4 + at % 4 // 2 * 8, lane % 4 * 8 + at // 256 * 4 + at % 8 // 4 * 2 + at % 2

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
        """Return for each instruction, in order, the indices k of the products that it adds up."""
        numbers = np.arange(k).reshape(-1, 4, 2, 4).transpose(0, 2, 1, 3)
        return list(numbers.reshape(-1, 16))


@dataclass(frozen=True, slots=True, eq=False)
class IntegerFragments(Format):
    """Integers with an offset, in panels like those of `Fragments`: [panels, k / 32, 64 * bits].

    With 8 bits, a byte holds one element. With 4 bits, a word of 32 bits holds eight. Elements with k % 4 < 2 are in the lower halves of
    bytes, and the bytes of a word are ordered by neighbour and by column // 8. So one shift of the word moves the two integers of a
    register of `mma.sync` to bits 0 and 16.
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

    def byte(self, at: Dim, number: Callable[[Dim, Dim], Scalar]) -> Scalar:
        """Return the byte at this position of a line. `number(column, k)` is the weight plus its offset."""
        if self.bits == 8:
            lane, first = at // 16, at % 16 // 8 * 4 + at % 2
            return number(lane // 4 + at % 4 // 2 * 8, lane % 4 * 8 + first + at % 8 // 4 * 2)
        lane = at // 8
        column, k = lane // 4 + at % 2 * 8, lane % 4 * 8 + at % 8 // 4 * 4 + at % 4 // 2
        return number(column, k) | number(column, k + 2) << 4

    def unpacked(self, panels: Any) -> Any:
        """Unpack panels, in NumPy. Return the weights [n, k] without their offset."""
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
# The format for rows of 16 bits. Of four neighbours along k, the first two are the lower bytes of two 16-bit words, and the last two are
# the upper bytes.
PANEL8_WORDS = _row(Panels("panel8_words", bits=8, depth=4, rows=I16, dtype=I32, order=(0, 2, 1, 3)))
PANEL4 = _row(Panels("panel4", bits=4, depth=8, rows=I8, dtype=I32))
WIDENED4 = _row(Widened("widened4", bits=4, depth=8, rows=I8, dtype=I32, panels=PANEL4))
FRAGMENTS = _row(Fragments("fragments", bits=16, depth=32, rows=BF16, dtype=BF16))
FRAGMENTS8 = _row(IntegerFragments("fragments8", bits=8, depth=32, rows=BF16, dtype=I32))
FRAGMENTS4 = _row(IntegerFragments("fragments4", bits=4, depth=32, rows=BF16, dtype=I32))
PAIRS = _row(Neighbours("pairs", bits=16, depth=2, rows=BF16, dtype=BF16))
PANELS: Mapping[str, Panels] = {name: found for name in FORMATS if isinstance(found := FORMATS[name], Panels)}
