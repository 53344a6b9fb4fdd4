"""Formats of weights: where each element is stored, and how it is decoded.

A product sums over the index k. A panel stores some adjacent columns of a weight, in lines. A line stores, for each of these columns, the
weights at `depth` neighbouring k. Panels of 6-bit integers are the exception: three lines together store these weights (`SixBitPanels`).

Most CPUs multiply signed bytes by unsigned bytes, so their panels of integers (`Panels`) store each weight plus an `offset`, as an unsigned
number. A line stores four bytes of a column next to each other. If a byte holds several weights of 4 or 2 bits, these are the weights at k,
k + 4, and so on; the first is in the lowest bits. If weights are codes of 4 bits, which are indices of a table (`TABLES`), panels store the
codes, and instructions look up the numbers. Panels for tensor cores store weights in the order in which registers or shared memory must
have them (`Fragments`, `IntegerFragments`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import FORMATS, Format, Load, Operand, Scalar
from compiler.ir.loops.write import cast, const, equal, index, maximum, minimum, of_bits, select
from compiler.ir.numbers import TABLES, Kind

I8, I16, I32, BF16 = DType.I8, DType.I16, DType.I32, DType.BF16
WORD_BITS = 16  # bits of a word of `ScaledPanels`
THIRDS = 3  # number of bytes that store four weights of 6 bits
FOUR = 4  # number of byte products that one instruction adds to a sum
STREAMS, RUN = 4, 4  # the largest number of streams of `ScaledPanels`, and the largest number of groups of a run
EIGHTHS = 3  # a multiplier of `Widened` is in eighths: its product with a 4-bit weight is shifted right by this many bits, and rounded


@dataclass(frozen=True, slots=True, eq=False)
class Panels(Format):
    """Integers in panels [panels, k / depth, 4 * columns]. An element is the stored integer, which includes the offset."""

    order: tuple[int, ...] = (0, 1, 2, 3)  # order in which a line stores four neighbours along k; the inverse permutation is the same

    @property
    def offset(self) -> int:
        return 1 << self.bits - 1

    @property
    def held_bits(self) -> int:
        """The number of bits of a weight in the buffer from which panels are packed. In that buffer, two weights of 4 bits share a byte."""
        return self.bits

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    @property
    def _padding(self) -> int:
        """The byte that pads the last panel; the weights in it are 0. A format whose lines need different bytes overrides `padding_of`."""
        return sum(self.offset << self.bits * i for i in range(self.per_byte))

    def padding_of(self, line: Dim) -> Operand:
        """Return the byte that pads a line of the last panel."""
        return self._padding

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
        """Return byte `j` of a column in line `line`. `number(k)` is the weight at k. With 4 or 2 bits, `number(k)` is instead the weight
        plus the offset, or a code."""
        if self.bits == 8:
            return number(line * FOUR + self.neighbour(j)) + self.offset
        first, *others = (number(line * self.depth + self.neighbour(j) + FOUR * i) for i in range(self.per_byte))
        for i, other in enumerate(others, 1):
            first = first | other << self.bits * i
        return first

    def packed(self, numbers: Any, columns: int) -> Any:
        """Pack numbers [..., n, k] into panels, in NumPy, and pad the last panel. With 8 bits, `numbers` are weights. With 4 or 2 bits,
        they are weights plus the offset, or codes."""
        *matrix, n, k = numbers.shape
        width = k // self.per_byte
        if self.bits == 8:
            stored = (numbers.astype(np.int32) + self.offset).astype(np.uint8)
        else:
            parts = numbers.reshape(*matrix, n, width // FOUR, self.per_byte, FOUR).astype(np.uint8)
            stored = np.bitwise_or.reduce([parts[..., i, :] << self.bits * i for i in range(self.per_byte)]).reshape(*matrix, n, width)
        padded = np.pad(stored, (*[(0, 0)] * len(matrix), (0, -n % columns), (0, 0)), constant_values=self._padding)
        fours = padded.reshape(*matrix, -(-n // columns), columns, width // FOUR, FOUR).swapaxes(-3, -2)
        return fours[..., self.order].reshape(*matrix, -(-n // columns), width // FOUR, columns * FOUR)

    def stored(self, panels: Any) -> Any:
        """Unpack panels, in NumPy. Return the numbers [columns, k], each plus the offset, including the columns that pad the last panel."""
        count, lines, wide = panels.shape
        parts = [panels >> self.bits * i & (1 << self.bits) - 1 for i in range(self.per_byte)]
        fours = np.stack([part.reshape(count, lines, wide // FOUR, FOUR) for part in parts], 2)  # [panels, line, part, columns, four]
        return fours[..., self.order].transpose(0, 3, 1, 2, 4).reshape(count * wide // FOUR, lines * self.per_byte * FOUR)


@dataclass(frozen=True, slots=True, eq=False)
class SixBitPanels(Panels):
    """Integers of 6 bits in panels [panels, 3 * k / 16, 4 * columns]. Three lines store 16 neighbours along k. Each byte holds one of the
    first twelve neighbours in its lower 6 bits, and 2 bits of one of the last four in its upper 2 bits."""

    def padding_of(self, line: Dim) -> Scalar:
        return cast(index(self.offset + line % THIRDS // (THIRDS - 1) * 128), I32)

    def lines(self, k: Dim) -> Dim:
        return k // self.depth * THIRDS

    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        panels = buffers[0]
        columns = panels.shape[-1].const // FOUR
        at = n % columns * FOUR + k % FOUR
        return tuple(Load(panels, (*matrix, n // columns, k // self.depth * THIRDS + third, at)) for third in range(THIRDS))

    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        found, four = const(0, I32), index(k // FOUR % (THIRDS + 1))
        for third, byte in enumerate(cast(s, I32) for s in stored):
            found = select(equal(four, third), byte & 63, found | select(equal(four, THIRDS), byte >> 6 << 2 * third, 0))
        return found

    def byte(self, line: Dim, j: Dim, number: Callable[[Dim], Scalar]) -> Scalar:
        first, third = line // THIRDS * self.depth + self.neighbour(j), line % THIRDS
        own, last = number(first + third * FOUR) + self.offset, number(first + THIRDS * FOUR) + self.offset
        return own | (last >> cast(index(third * 2), I32) & 3) << 6

    def packed(self, numbers: Any, columns: int) -> Any:
        """Pack weights [..., n, k] into panels, in NumPy, and pad the last panel with weights of 0."""
        *matrix, n, k = numbers.shape
        panels, lines = -(-n // columns), k // self.depth
        padded = np.pad(numbers.astype(np.int32), (*[(0, 0)] * len(matrix), (0, -n % columns), (0, 0))) + self.offset
        fours = padded.reshape(*matrix, panels, columns, lines, THIRDS + 1, FOUR).astype(np.uint8)
        last = fours[..., THIRDS:, :] >> np.arange(0, 2 * THIRDS, 2, dtype=np.uint8)[:, None] & 3
        stored = fours[..., :THIRDS, :] | last << 6  # [..., panels, columns, k / 16, thirds, four]
        return np.moveaxis(stored, -4, -2).reshape(*matrix, panels, lines * THIRDS, columns * FOUR)

    def stored(self, panels: Any) -> Any:
        count, lines, wide = panels.shape
        thirds = panels.reshape(count, lines // THIRDS, THIRDS, wide // FOUR, FOUR)
        last = sum(thirds[:, :, [third]] >> 6 << 2 * third for third in range(THIRDS))
        numbers = np.concatenate([thirds & 63, last], 2).transpose(0, 3, 1, 2, 4)
        return numbers.reshape(count * wide // FOUR, lines // THIRDS * (THIRDS + 1) * FOUR)


@dataclass(frozen=True, slots=True, eq=False)
class TablePanels(Panels):
    """Panels of codes of 4 bits, which are indices of a table. An element is the number in the table for its code, plus the offset."""

    kind: Kind = Kind.E2M1

    @property
    def held_bits(self) -> int:
        return 4

    @property
    def numbers(self) -> NDArray[np.int8]:
        return TABLES[self.kind]

    @property
    def offset(self) -> int:
        return -int(self.numbers.min())

    @property
    def _padding(self) -> int:
        """The byte of two codes for the number nearest to 0. This number need not be 0, because the scales of columns that pad the last
        panel are 0."""
        nearest = int(np.abs(self.numbers.astype(np.int32)).argmin())
        return nearest | nearest << 4

    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        return looked_up(Panels.decode(self, stored, k), self.kind) + self.offset

    def stored(self, panels: Any) -> Any:
        return (self.numbers.astype(np.int32) + self.offset).astype(np.uint8)[Panels.stored(self, panels)]


@dataclass(frozen=True, slots=True, eq=False)
class TernaryPanels(TablePanels):
    """Codes of ternary numbers, which are the numbers plus the offset, in panels of 2 bits."""

    @property
    def _padding(self) -> int:
        return sum(self.offset << self.bits * i for i in range(self.per_byte))

    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        return Panels.decode(self, stored, k)

    def stored(self, panels: Any) -> Any:
        return Panels.stored(self, panels)


def looked_up(bits: Scalar, kind: Kind) -> Scalar:
    """Return the number for which a code of 4 bits stands in the table of `kind` (`TABLES`), as an i32."""
    return _doubled_e2m1(bits) if kind is Kind.E2M1 else _from_words(bits, TABLES[kind])


def _from_words(bits: Scalar, numbers: NDArray[np.int8]) -> Scalar:
    """Look up the number of a code in four words of 32 bits, whose 16 bytes are the numbers of the table minus the smallest number."""
    least = int(numbers.min())
    words = [const(int(word), I32) for word in (numbers.astype(np.int32) - least).astype(np.uint8).view("<i4")]
    low, high = (select(bits < first + 4, words[first // 4], words[first // 4 + 1]) for first in (0, 8))
    return (select(bits < 8, low, high) >> ((bits & 3) << 3) & 255) + least


def _doubled_e2m1(bits: Scalar) -> Scalar:
    """Return the double of a 4-bit float, as an i32. The bits of the float are, from the highest: sign, exponent (2), mantissa (1)."""
    exponent = bits >> 1 & 3
    magnitude = (bits & 1 | minimum(exponent, 1) << 1) << maximum(exponent - 1, 0)
    return magnitude * (1 - (bits >> 3 << 1))


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
class ScaledPanels(Format):
    """Integers of 4 bits with scales of bf16, in words [streams, panels, runs, words]. A group stores the weights at `depth` neighbouring
    k: lines like those of `Panels`, and then one scale per column. So reading the weights in order also reads the scales in order. A run
    consists of adjacent groups of a panel. Consecutive runs are in different streams, because without prefetches a core reads several
    streams faster than one."""

    panels: Panels
    columns: int  # number of columns of a panel

    @property
    def scales_at(self) -> int:
        """The index of the first scale in a group."""
        return self.columns * self.depth * self.bits // WORD_BITS

    @property
    def words(self) -> int:
        """The number of words of a group."""
        return self.scales_at + self.columns

    @property
    def num_indices(self) -> int:
        return 4

    def shape(self, num_panels: Dim, num_groups: Dim) -> tuple[Dim, ...]:
        """Return the shape of the words of a matrix. All streams have the same number of runs, and all runs have the same number of groups.
        If the number of groups is symbolic, there is one stream, and each run has one group."""
        count = num_groups.const if num_groups.is_const else 1
        streams = gcd(STREAMS, count)
        run = gcd(RUN, count // streams)
        return Dim.of(streams), num_panels, num_groups // (streams * run), Dim.of(run * self.words)

    def groups_of_run(self, buffer: Buffer) -> int:
        """Return the number of groups of a run of the words in `buffer`."""
        return buffer.shape[-1].const // self.words

    def word(self, buffer: Buffer, matrix: tuple[Dim, ...], panel: Dim, group: Dim, number: Dim) -> Load:
        """Return the load of one word of a group."""
        streams, size = buffer.shape[-self.num_indices], self.groups_of_run(buffer)
        run = group // size
        return Load(buffer, (*matrix, run % streams, panel, run // streams, group % size * self.words + number))

    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        column = n % self.columns * (FOUR // 2) + k % FOUR // 2
        word = k % self.depth // self.panels.depth * (self.columns * FOUR // 2) + column
        return (self.word(buffers[0], matrix, n // self.columns, k // self.depth, word),)

    def scale(self, buffer: Buffer, matrix: tuple[Dim, ...], n: Dim, group: Dim) -> Scalar:
        """Return the scale of column `n` for a group, in f32."""
        place = self.word(buffer, matrix, n // self.columns, group, self.scales_at + n % self.columns)
        return of_bits(cast(place, I32) << 16)

    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        return self.panels.decode((cast(stored[0], I32) >> cast(index(k % 2 * 8), I32) & 255,), k)


@dataclass(frozen=True, slots=True, eq=False)
class Elements(Format):
    """Floats in panels [panels, k / depth, depth * columns], stored without conversion."""

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


@dataclass(frozen=True, slots=True)
class Bits:
    """`count` adjacent bits of an index, of which the lowest is bit `low`. The index is a column in its panel or, with `along_k`, a k."""

    along_k: bool
    low: int
    count: int = 1

    def of(self, n: Dim, k: Dim) -> Dim:
        """Return the number that these bits form, for the element of column `n` at `k`."""
        return (k if self.along_k else n) // (1 << self.low) % (1 << self.count)


def column(low: int, count: int = 1) -> Bits:
    """Return `count` bits of the column, from bit `low` on."""
    return Bits(False, low, count)


def along(low: int, count: int = 1) -> Bits:
    """Return `count` bits of k, from bit `low` on."""
    return Bits(True, low, count)


@dataclass(frozen=True, slots=True)
class Order:
    """The order of the elements of a line. Each bit of an element's position is a bit of its column or of its k. `bits` lists these bits
    from the highest bit of the position to the lowest."""

    bits: tuple[Bits, ...]

    @property
    def columns(self) -> int:
        """The number of columns of a panel."""
        return 1 << sum(b.count for b in self.bits if not b.along_k)

    def position(self, n: Dim, k: Dim) -> Dim:
        """Return the position in a line of the element of column `n` at `k`."""
        at = Dim.of(0)
        for bits in self.bits:
            at = at * (1 << bits.count) + bits.of(n, k)
        return at

    def column_and_k(self, at: Dim) -> tuple[Dim, Dim]:
        """Return which element is at a position: its column in the panel, and its k relative to the line's first k."""
        found, weight = [Dim.of(0), Dim.of(0)], 1
        for bits in reversed(self.bits):
            found[bits.along_k] = found[bits.along_k] + at // weight % (1 << bits.count) * (1 << bits.low)
            weight <<= bits.count
        return found[0], found[1]

    def packed(self, numbers: Any) -> Any:
        """Pack numbers [panels * columns, lines * depth] into panels [panels, lines, positions], in NumPy."""
        sizes = [1 << self.bits[i].count for i in self._by_index]
        depth = 1 << sum(b.count for b in self.bits if b.along_k)
        count, lines = len(numbers) // self.columns, numbers.shape[1] // depth
        parts = numbers.reshape(count, *sizes[: self._num_column_parts], lines, *sizes[self._num_column_parts :])
        axes = [1 + i + (i >= self._num_column_parts) for i in map(self._by_index.index, range(len(self.bits)))]
        return parts.transpose(0, 1 + self._num_column_parts, *axes).reshape(count, lines, -1)

    def unpacked(self, panels: Any) -> Any:
        """Unpack panels to numbers [panels * columns, lines * depth], in NumPy. The zeros that pad the last panel are included."""
        count, lines, _ = panels.shape
        parts = panels.reshape(count, lines, *(1 << bits.count for bits in self.bits))
        axes = [2 + i for i in self._by_index]
        columns, along_k = axes[: self._num_column_parts], axes[self._num_column_parts :]
        return parts.transpose(0, *columns, 1, *along_k).reshape(count * self.columns, -1)

    @property
    def _num_column_parts(self) -> int:
        """The number of `bits` that belong to the column."""
        return sum(not b.along_k for b in self.bits)

    @property
    def _by_index(self) -> list[int]:
        """The indices of `bits`: first those of the column, then those of k, each from the highest bit to the lowest."""
        return sorted(range(len(self.bits)), key=lambda i: (self.bits[i].along_k, -self.bits[i].low))


@dataclass(frozen=True, slots=True, eq=False)
class Ordered(Elements):
    """Panels whose lines store their elements in the order `order`."""

    order: Order

    @property
    def columns(self) -> int:
        return self.order.columns

    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        return (Load(buffers[0], (*matrix, n // self.columns, k // self.depth, self.order.position(n, k))),)

    def column_and_k(self, at: Dim) -> tuple[Dim, Dim]:
        return self.order.column_and_k(at)

    def packed(self, numbers: Any) -> Any:
        """Pack numbers [n, k] into panels, in NumPy. Zeros pad the last panel."""
        return self.order.packed(np.pad(numbers, ((0, -len(numbers) % self.columns), (0, 0))))

    def unpacked(self, panels: Any) -> Any:
        """Unpack panels to numbers [panels * columns, k], in NumPy. The zeros that pad the last panel are included."""
        return self.order.unpacked(panels)


@dataclass(frozen=True, slots=True, eq=False)
class Fragments(Ordered):
    """Panels of bf16 in the order in which a tensor core instruction reads them. An instruction adds up 16 products; `steps` are the bits
    of k that number the instructions of a line."""

    steps: tuple[Bits, ...]

    def chunks(self, k: int) -> list[Any]:
        """Return, for each instruction in order, the indices along k of the products that it adds up. `k` is the number of elements of a
        column."""
        numbers = np.arange(k)
        step = numbers // self.depth
        for bits in self.steps:
            step = (step << bits.count) + (numbers >> bits.low) % (1 << bits.count)
        return list(np.argsort(step, kind="stable").reshape(-1, 16))


@dataclass(frozen=True, slots=True, eq=False)
class IntegerFragments(Format):
    """Integers in panels [panels, k / depth, bytes] in the order of the registers of a tensor core instruction. Panels store each integer
    plus an offset; an element is the integer without it.

    `order` is the order of bytes. With 8 bits, a byte holds one element. With 4 bits, a byte holds two elements that differ in the bit
    `upper` of k, which is set for the element in the upper half. A word of 32 bits then holds eight elements, ordered so that one shift of
    the word moves the two integers of a register to bits 0 and 16.
    """

    order: Order
    upper: Bits | None = None

    @property
    def columns(self) -> int:
        return self.order.columns

    @property
    def kind(self) -> Kind:
        return Kind.INT

    @property
    def offset(self) -> int:
        return 1 << self.bits - 1

    @property
    def line_bytes(self) -> int:
        """The number of bytes of a line of a panel."""
        return self.columns * self.depth * self.bits // 8

    def places(self, buffers: tuple[Buffer, ...], n: Dim, k: Dim, matrix: tuple[Dim, ...] = ()) -> tuple[Load, ...]:
        return (Load(buffers[0], (*matrix, n // self.columns, k // self.depth, self.order.position(n, k))),)

    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        byte = cast(stored[0], I32)
        if self.upper is None:
            return byte - self.offset
        return (byte >> cast(index(self.upper.of(k, k) * 4), I32) & 15) - self.offset

    def byte(self, at: Dim, number: Callable[[Dim, Dim], Scalar]) -> Scalar:
        """Return the byte at this position of a line. `number(column, k)` is the weight plus its offset, or the bits of a float."""
        column, k = self.order.column_and_k(at)
        lower = number(column, k)
        return lower if self.upper is None else lower | number(column, k + (1 << self.upper.low)) << 4

    def unpacked(self, panels: Any) -> Any:
        """Unpack panels to weights [panels * columns, k] without their offset, in NumPy. The padding of the last panel is included."""
        order = self.order
        if self.upper is not None:
            panels, order = np.stack([panels & 15, panels >> 4], -1).reshape(*panels.shape[:2], -1), Order((*order.bits, self.upper))
        return order.unpacked(panels).astype(np.int32) - self.offset


@dataclass(frozen=True, slots=True, eq=False)
class FloatFragments(IntegerFragments):
    """Floats of 4 bits (e2m1) in panels like those of `IntegerFragments`. An element is the double of the float, which is an integer."""

    @property
    def kind(self) -> Kind:
        return Kind.E2M1

    @property
    def offset(self) -> int:
        return 0

    def decode(self, stored: tuple[Scalar, ...], k: Dim) -> Scalar:
        return looked_up(IntegerFragments.decode(self, stored, k), self.kind)

    def unpacked(self, panels: Any) -> Any:
        return TABLES[self.kind].astype(np.int32)[IntegerFragments.unpacked(self, panels)]


F = TypeVar("F", bound=Format)


def _row(format: F) -> F:
    """Add a format to FORMATS, and return it."""
    FORMATS.add(format.name, format)
    return format


PANEL8 = _row(Panels("panel8", bits=8, depth=4, rows=I8, dtype=I32))
# The format for rows of 16 bits. Of four neighbours along k, the first two are the lower bytes of two 16-bit words, and the last two are
# the upper bytes.
PANEL8_WORDS = _row(Panels("panel8_words", bits=8, depth=4, rows=I16, dtype=I32, order=(0, 2, 1, 3)))
PANEL6 = _row(SixBitPanels("panel6", bits=6, depth=16, rows=I8, dtype=I32))
PANEL4 = _row(Panels("panel4", bits=4, depth=8, rows=I8, dtype=I32))
TABLE_PANELS: Mapping[Kind, TablePanels] = {
    **{kind: _row(TablePanels(f"panel_{kind}", 4, 8, rows=I8, dtype=I32, kind=kind)) for kind in TABLES if kind is not Kind.TERNARY},
    Kind.TERNARY: _row(TernaryPanels("panel_ternary", bits=2, depth=16, rows=I8, dtype=I32, kind=Kind.TERNARY)),
}
WIDENED4 = _row(Widened("widened4", bits=4, depth=8, rows=I8, dtype=I32, panels=PANEL4))
SCALED4 = _row(ScaledPanels("scaled4", bits=4, depth=32, rows=I8, dtype=I32, panels=PANEL4, columns=16))
# Formats for `mma.sync`, in panels of 16 columns. The lane that holds an element is numbered by column % 8 and by k % 32 // 8: with two
# instructions, the lane multiplies 8 adjacent elements of a row, which it loads at once.
FRAGMENTS = _row(
    Fragments(
        "fragments",
        bits=16,
        depth=32,
        rows=BF16,
        dtype=BF16,
        order=Order((along(2), column(0, 3), along(3, 2), along(1), column(3), along(0))),
        steps=(along(2),),
    )
)
FRAGMENTS8 = _row(
    IntegerFragments(
        "fragments8",
        bits=8,
        depth=32,
        rows=BF16,
        dtype=I32,
        order=Order((column(0, 3), along(3, 2), along(2), along(1), column(3), along(0))),
    )
)
FRAGMENTS_E4M3 = _row(Ordered("fragments_e4m3", bits=8, depth=32, rows=BF16, dtype=DType.E4M3, order=FRAGMENTS8.order))
FRAGMENTS4 = _row(
    IntegerFragments(
        "fragments4",
        bits=4,
        depth=32,
        rows=BF16,
        dtype=I32,
        order=Order((column(0, 3), along(3, 2), along(2), along(0), column(3))),
        upper=along(1),
    )
)
FRAGMENTS_E2M1 = _row(FloatFragments("fragments_e2m1", bits=4, depth=32, rows=BF16, dtype=I32, order=FRAGMENTS4.order, upper=along(1)))
# Formats for `wgmma`, in panels of 32 columns. The instruction reads bf16 from shared memory, in bricks of 8 columns by 8 neighbours along
# k. Weights of 8 or 4 bits are in the order of registers; the lane whose register has a weight is numbered by column % 8 and by k % 8 // 2.
BRICKS = _row(
    Fragments(
        "bricks",
        bits=16,
        depth=64,
        rows=BF16,
        dtype=BF16,
        order=Order((column(3, 2), along(3, 3), column(0, 3), along(0, 3))),
        steps=(along(4, 2),),
    )
)
LANES8 = _row(
    IntegerFragments(
        "lanes8",
        bits=8,
        depth=64,
        rows=BF16,
        dtype=I32,
        order=Order((along(5), column(4), column(0, 3), along(1, 2), along(4), along(3), column(3), along(0))),
    )
)
LANES_E4M3 = _row(Ordered("lanes_e4m3", bits=8, depth=64, rows=BF16, dtype=DType.E4M3, order=LANES8.order))
LANES4 = _row(
    IntegerFragments(
        "lanes4",
        bits=4,
        depth=64,
        rows=BF16,
        dtype=I32,
        order=Order((column(4), column(0, 3), along(1, 2), along(4, 2), along(0), column(3))),
        upper=along(3),
    )
)
# Floats of 8 bits for registers of 512 bits, in panels of 32 columns. Instructions shuffle bytes within groups of 16 bytes. In this order,
# each half of such a group has the neighbours at k and k + 1 of four columns.
PANEL_E4M3 = _row(
    Ordered("panel_e4m3", bits=8, depth=4, rows=BF16, dtype=DType.E4M3, order=Order((column(2, 3), along(1), column(0, 2), along(0))))
)
PAIRS = _row(Neighbours("pairs", bits=16, depth=2, rows=BF16, dtype=BF16))
PANELS: Mapping[str, Panels] = {name: found for name in FORMATS if isinstance(found := FORMATS[name], Panels)}
