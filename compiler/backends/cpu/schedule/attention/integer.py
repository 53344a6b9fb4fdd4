"""Compute blocks of keys and values of an 8-bit cache for some rows of paged attention, with exact sums of integers.

A query is rounded to integers of 16 bits with one scale, and so are the attention weights of a row in a block, after each is multiplied by
the scale of its value. Rounding changes a weight by at most 2^-16 of the largest weight of its block. Products with the bytes of the cache
are exact in 32 bits, whatever instruction computes them. So a row has the same bits in any tile and with all instruction sets that have
these products. Keys and values that a row does not see are finite numbers with weight 0, so they do not affect it.

Tiles multiply signed integers by unsigned ones, so the packed bytes of the cache are larger by 128. The sums of a row begin at -128 times
the sum of its integers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from compiler.backends.cpu.schedule.attention.rows import F32, HeadPage, Rows, Span, VisibleRange, masked, row_tiles
from compiler.backends.cpu.schedule.folds import fold_halves, larger, spread_largest
from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.write import Array, Kernel, bits_of, cast, const, exp, fma, less, of_bits, select
from compiler.machine.formats import FOUR
from compiler.machine.intrinsics.dot_panel import DotPanel, DotWords
from compiler.machine.intrinsics.pack_bytes import PackBytes
from compiler.machine.products import ProductTile
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES
from compiler.ops.attention.plain import capped

PAGES = 8  # maximum number of pages of a block
BLOCK = PAGES * PAGE
SPLIT = 4  # number of blocks of a split
LEVELS = 127 * 256 + 127  # largest integer whose planes are two signed bytes
LEAST = 1e-30  # rows of smaller numbers become zeros
LONGEST = 512  # maximum size of a head; LEVELS * 127 * LONGEST < 2^31

# An f32 with this summand has no fraction bits, so the addition rounds to an integer, which is in the lowest bits of the sum.
ROUNDER, ROUNDER_BITS = 1.5 * 2**23, 0x4B400000
MAGNITUDE = 0x7FFFFFFF  # all bits of an f32 but its sign. As integers, they have the order of magnitudes, and NaN is the largest
I8, I16, I32, U8 = DType.I8, DType.I16, DType.I32, DType.U8


@dataclass(frozen=True, slots=True)
class IntegerRows(Rows):
    """The state of some rows. Queries are [rows, planes, size], weights [rows, planes, BLOCK], scores [rows, BLOCK]."""

    query_factors: Array  # [rows]: the scale of the integers
    query_shifts: Array  # [rows]: -128 times the sum of the integers
    weight_factors: Array
    weight_shifts: Array


@dataclass(frozen=True, slots=True)
class IntegerTiles:
    """The tile that multiplies integers by bytes, and the parameters that follow from it."""

    tile: ProductTile
    size: int

    @property
    def planes(self) -> int:
        """The number of planes of a row of 16 bits: two of bytes or one of words."""
        return 2 if self.tile.rows is I8 else 1

    @property
    def rows(self) -> int:
        return self.tile.shape_of(self.planes).rows

    @property
    def columns(self) -> int:
        """The number of keys of a panel of keys, and of elements of a panel of values: the largest number that divides the head size."""
        return self.tile.op.columns if self.size % self.tile.op.columns == 0 else PAGE

    @property
    def pages(self) -> int:
        """The number of pages of a panel of keys."""
        return self.columns // PAGE

    @property
    def at_once(self) -> int:
        """The number of columns of values that are packed at once."""
        return next(count for count in (64, 32, 16) if self.size % count == 0 and count % self.columns == 0)

    def product(self, rows: int, later: int) -> DotPanel | DotWords:
        rows, columns = rows * self.planes, self.columns
        if self.planes == 1:
            return DotWords(rows, columns, cached_panel=True, later=later)
        return DotPanel(rows, columns, 8, cached_panel=True, later=later)

    def pack(self, columns: int) -> PackBytes:
        return PackBytes(columns, min(columns, self.columns), words=self.planes == 1)

    def allocate_rows(self, k: Kernel, count: int) -> IntegerRows:
        kind, planes = self.tile.rows, self.planes
        return IntegerRows(
            k.local("queries", count, planes, self.size, dtype=kind),
            k.local("scores", count, BLOCK),
            k.local("weights", count, planes, BLOCK, dtype=kind),
            k.local("maximum", count, PAGE),
            k.local("sums", count, PAGE),
            k.local("values", count, self.size // PAGE, PAGE),
            k.local("query_factors", count),
            k.local("query_shifts", count, dtype=I32),
            k.local("weight_factors", count),
            k.local("weight_shifts", count, dtype=I32),
        )

    def round_query(self, k: Kernel, rows: IntegerRows, row: Dim, query: Array) -> None:
        """Round the query of a row, [size / PAGE, PAGE]."""
        parts = self.size // PAGE
        with k.scope():
            top, total = k.local("top", PAGE, dtype=I32), k.local("total", PAGE, dtype=I32)
            with k.vector(PAGE) as lane:
                top[lane] = 0
            with k.vector(PAGE) as lane:
                total[lane] = 0
            with k.serial("c", parts) as c, k.vector(PAGE) as lane:
                top[lane] = larger(top[lane], bits_of(query[c, lane]) & MAGNITUDE)
            inverse = inverse_of(k, top)
            with k.serial("c", parts) as c:
                round_numbers(k, rows.queries, row, c * PAGE, query[c, 0], inverse, total)
            store_rounding(k, row, top, total, rows.query_factors, rows.query_shifts)


def inverse_of(k: Kernel, top: Array) -> Array:
    """Put the largest of the magnitudes `top`, which are the bits of floats, into every lane. Return the factor that maps it to LEVELS, in
    every lane."""
    inverse = k.local("inverse", PAGE)
    spread_largest(k, top)
    with k.vector(PAGE) as lane:
        inverse[lane] = const(float(LEVELS), F32) / larger(const(LEAST, F32), of_bits(top[lane]))
    return inverse


def round_numbers(k: Kernel, out: Array, row: Dim, first: Dim, numbers: Load, inverse: Array, total: Array) -> None:
    """Store the integers of PAGE adjacent numbers, and add them to `total`."""
    with k.scope():
        rounded = k.local("rounded", PAGE, dtype=I32)
        with k.vector(PAGE) as lane:
            *before, last = numbers.indices
            number = Load(numbers.buffer, (*before, last + lane))
            rounded[lane] = bits_of(fma(number, inverse[lane], const(ROUNDER, F32))) - ROUNDER_BITS
        with k.vector(PAGE) as lane:
            total[lane] = total[lane] + rounded[lane]
        if out.dtype is I16:
            with k.vector(PAGE) as lane:
                out[row, 0, first + lane] = cast(rounded[lane], I16)
            return
        with k.vector(PAGE) as lane:
            out[row, 0, first + lane] = cast(rounded[lane] + 128 >> 8, I8)
        with k.vector(PAGE) as lane:
            out[row, 1, first + lane] = cast(rounded[lane], I8)


def store_rounding(k: Kernel, row: Dim, top: Array, total: Array, factors: Array, shifts: Array) -> None:
    fold_halves(k, total, operator.add)
    factors[row] = of_bits(top[0]) / LEVELS
    shifts[row] = total[0] * -128


@dataclass(frozen=True, slots=True)
class IntegerUnit:
    rows: IntegerRows
    cache: Array
    scales: Array
    layer: Dim
    size: int
    softcap: float
    tiles: IntegerTiles
    keys: Array  # [size / FOUR, FOUR * columns]: a panel of keys
    values: Array  # [panels, BLOCK / FOUR, FOUR * columns]: the values of a block
    value_scales: Array  # [BLOCK]: the scales of these values

    @staticmethod
    def allocate(k: Kernel, rows: IntegerRows, cache: Array, scales: Array, layer: Dim, softcap: float, tiles: IntegerTiles) -> IntegerUnit:
        size, columns = tiles.size, tiles.columns
        keys = k.local("keys", size // FOUR, FOUR * columns, dtype=U8)
        values = k.local("taken", size // columns, BLOCK // FOUR, FOUR * columns, dtype=U8)
        return IntegerUnit(rows, cache, scales, layer, size, softcap, tiles, keys, values, k.local("value_scales", BLOCK))

    # --- scores --------------------------------------------------------------------------------------------------------

    def scores(self, k: Kernel, panel: Sequence[HeadPage], number: Dim, first: Dim, count: int, later: Sequence[Load] = ()) -> None:
        """Compute the scores of `count` rows, beginning with row `first`, for panel `number` of a block."""
        for v, page in enumerate(panel):
            with k.serial("r", self.size // FOUR) as r:
                source = self.element(page, KEYS, r * (FOUR * PAGE))
                k.tile(self.tiles.pack(PAGE), self.keys[r, v * FOUR * PAGE], source, dims=(PAGE, 0))
        rows, columns = self.rows, self.tiles.columns
        for row, n in row_tiles(k, count, self.tiles.rows):
            row = first + row
            with k.scope():
                total = self.totals(k, row, n, rows.query_shifts)
                operands = rows.queries[row, 0, 0], self.keys[0, 0], *later
                k.tile(self.tiles.product(n, len(later)), total[0, 0, 0], *operands, dims=(self.size, self.size))
                for v, page in enumerate(panel):
                    with k.unroll("m", n) as m, k.vector(PAGE) as lane:
                        score = self.total(total, m, v * PAGE + lane) * rows.query_factors[row + m]
                        score = capped(score * cast(self.scales[self.layer, KEYS, page.page, page.kv_head, lane], F32), self.softcap)
                        rows.scores[row + m, number * columns + v * PAGE + lane] = score

    def totals(self, k: Kernel, row: Dim, n: int, shifts: Array) -> Array:
        """Allocate the sums of a register tile, [n, planes, columns], and store their initial values."""
        planes, columns = self.tiles.planes, self.tiles.columns
        total = k.local("total", n, planes, columns, dtype=I32)
        with k.unroll("m", n) as m:
            for v in range(0, columns, PAGE):
                with k.vector(PAGE) as lane:
                    total[m, planes - 1, v + lane] = shifts[row + m]
                if planes == 2:
                    with k.vector(PAGE) as lane:
                        total[m, 0, v + lane] = 0
        return total

    def total(self, total: Array, m: Dim, column: Dim) -> Scalar:
        """Return the sum of all planes of a row."""
        found = total[m, 0, column] if self.tiles.planes == 1 else (total[m, 0, column] << 8) + total[m, 1, column]
        return cast(found, F32)

    # --- weights -------------------------------------------------------------------------------------------------------

    def update_softmax(self, k: Kernel, row: Dim, start: Dim, span: Span, visible: VisibleRange) -> None:
        """Turn the scores of a row into integers. `start` is the position of the block's first key."""
        rows, scores = self.rows, self.rows.scores
        begin, end = start + span.first * self.tiles.columns, start + span.end * self.tiles.columns
        hidden = less(visible.high + 1, end)
        if visible.clipped_low:
            hidden = hidden | less(begin, visible.low)
        with k.when(hidden):
            for at in self.vectors(k, span):
                with k.vector(PAGE) as lane:
                    scores[row, at + lane] = masked(visible, start + at + lane, scores[row, at + lane])
        with k.scope():
            highest, added, top = k.local("highest", PAGE), k.local("added", PAGE), k.local("top", PAGE, dtype=I32)
            total = k.local("total", PAGE, dtype=I32)
            with k.vector(PAGE) as lane:
                highest[lane] = float("-inf")
            for at in self.vectors(k, span):
                with k.vector(PAGE) as lane:
                    highest[lane] = larger(highest[lane], scores[row, at + lane])
            spread_largest(k, highest)
            with k.when(rows.maximum[row, 0] < highest[0]):
                rows.raise_maximum(k, row, highest)
            for zero in (added, top, total):
                with k.vector(PAGE) as lane:
                    zero[lane] = 0
            for at in self.vectors(k, span):
                with k.vector(PAGE) as lane:
                    scores[row, at + lane] = exp(scores[row, at + lane] - rows.maximum[row, lane])
                with k.vector(PAGE) as lane:
                    added[lane] += scores[row, at + lane]
                with k.vector(PAGE) as lane:
                    weight = scores[row, at + lane]
                    # The scale of a value that the row does not see may be NaN.
                    scores[row, at + lane] = select(const(0.0, F32) < weight, weight * self.value_scales[at + lane], 0.0)
                with k.vector(PAGE) as lane:
                    top[lane] = larger(top[lane], bits_of(scores[row, at + lane]) & MAGNITUDE)
            with k.vector(PAGE) as lane:
                rows.sums[row, lane] += added[lane]
            inverse = inverse_of(k, top)
            for at in self.vectors(k, span):
                round_numbers(k, rows.weights, row, at, scores[row, at], inverse, total)
            store_rounding(k, row, top, total, rows.weight_factors, rows.weight_shifts)

    def skip_block(self, row: Dim) -> None:
        """Give all weights of a row the factor 0."""
        self.rows.weight_factors[row] = 0.0

    def vectors(self, k: Kernel, span: Span) -> Iterator[Dim]:
        """Yield the index of the first key of each vector. The code that the caller's `for` emits becomes the body of a loop."""
        with span.panels(k) as panel:
            for v in range(self.tiles.pages):
                yield panel * self.tiles.columns + v * PAGE

    # --- values --------------------------------------------------------------------------------------------------------

    def load_values(self, k: Kernel, panel: Sequence[HeadPage], number: Dim) -> None:
        """Load the values of those keys that are in panel `number` of a block, and their scales."""
        at_once, columns = self.tiles.at_once, self.tiles.columns
        for v, page in enumerate(panel):
            first = number * columns + v * PAGE
            with k.vector(PAGE) as lane:
                self.value_scales[first + lane] = cast(self.scales[self.layer, VALUES, page.page, page.kv_head, lane], F32)
            with k.serial("r", PAGE // FOUR) as r:
                for p in range(0, self.size, at_once):
                    source = self.element(page, VALUES, r * (FOUR * self.size) + p)
                    out = self.values[p // columns, first // FOUR + r, 0]
                    k.tile(self.tiles.pack(at_once), out, source, dims=(self.size, BLOCK * columns))

    def add_values(self, k: Kernel, span: Span, first: Dim, count: int, later: Callable[[Dim], list[Load]]) -> None:
        """Add the weighted values of a block to `count` rows, beginning with row `first`."""
        rows, columns, begin = self.rows, self.tiles.columns, span.first * self.tiles.columns
        length = k.let("length", span.count * columns, BLOCK, multiple_of=columns)
        with k.serial("p", self.size // columns) as p:
            for row, n in row_tiles(k, count, self.tiles.rows):
                row = first + row
                with k.scope():
                    total = self.totals(k, row, n, rows.weight_shifts)
                    operands = rows.weights[row, 0, begin], self.values[p, span.first * (columns // FOUR), 0], *later(p)
                    k.tile(self.tiles.product(n, len(operands) - 2), total[0, 0, 0], *operands, dims=(length, BLOCK))
                    for v in range(self.tiles.pages):
                        with k.unroll("m", n) as m, k.vector(PAGE) as lane:
                            place = row + m, p * self.tiles.pages + v, lane
                            product = self.total(total, m, v * PAGE + lane)
                            rows.values[place] = fma(product, rows.weight_factors[row + m], rows.values[place])

    # --- reading the cache ---------------------------------------------------------------------------------------------

    def element(self, page: HeadPage, half: int, index: Dim) -> Load:
        return self.cache[self.layer, half, page.page, page.kv_head, index]
