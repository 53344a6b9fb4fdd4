"""Attention by instructions that multiply integers: a unit as walk.py defines it. It serves pages of 8-bit integers, and sums of products
are exact.

A query is rounded to integers of 16 bits with one scale, and so are the attention weights of a row (a query head of a token) in a block of
keys, after each is multiplied by the scale of its value. If the program allows it (`row_bits`), the integers have 8 bits instead. Rounding
changes a weight by at most about 2^-16, or 2^-8, of the largest weight of its block. Products with the bytes of the cache are exact in 32
bits, whatever instruction computes them. So a row has the same bits in any tile and with all instruction sets that have these products.
Keys and values that a row does not see are finite numbers with weight 0, so they do not affect the row.

The instructions multiply signed by unsigned integers, so packing adds 128 to the bytes of the cache. To compensate, the sums of a row begin
at -128 times the sum of the row's integers.

A block is read in panels: first all panels of keys, and then those of values, head by head. A tile adds a block to all its rows together,
even to rows that see only a part of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from compiler.backends.cpu.schedule.attention.blocks import Block, Cut, Span
from compiler.backends.cpu.schedule.attention.items import Item, Part, row_tiles, tokens_of_tile
from compiler.backends.cpu.schedule.attention.operands import PagedOperands, Seen
from compiler.backends.cpu.schedule.attention.pages import F32, Cache, Head, HeadPage
from compiler.backends.cpu.schedule.attention.softmax import OnlineSoftmax, fill
from compiler.backends.cpu.schedule.attention.walk import Order, Rows, Unit
from compiler.backends.cpu.schedule.folds import fold_halves, larger, spread_largest
from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.write import Array, Kernel, bits_of, cast, const, fma, of_bits
from compiler.machine.formats import FOUR
from compiler.machine.intrinsics.dot_panel import DotPanel, DotWords
from compiler.machine.intrinsics.pack_bytes import PackBytes
from compiler.machine.products import ProductTile, ProductTiles
from compiler.machine.target import LINE_BYTES
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES
from compiler.ops.attention.plain import capped

PAGES = 8  # number of pages of a block
SPLIT = 4  # number of blocks of a split
LEVELS = {16: 127 * 256 + 127, 8: 127}  # largest integer of a row, by number of bits; two planes of signed bytes hold no larger one
LEAST = 1e-30  # a smaller largest magnitude of a row counts as LEAST, so that its inverse is finite; the row is then rounded nearer to zero
LONGEST = 512  # maximum size of a head; LEVELS[16] * 127 * LONGEST < 2^31

# Adding ROUNDER to an f32 rounds it to an integer, because the sum has no bits for a fraction. The bits of the sum minus ROUNDER_BITS are
# this integer.
ROUNDER, ROUNDER_BITS = 1.5 * 2**23, 0x4B400000
MAGNITUDE = 0x7FFFFFFF  # mask of all bits of an f32 except its sign
I8, I16, I32, U8 = DType.I8, DType.I16, DType.I32, DType.U8


@dataclass(frozen=True, slots=True)
class Integers:
    """The instructions of the target that multiply integers, the sizes that follow from them, and the unit."""

    operands: PagedOperands
    tile: ProductTile  # the tile in vector registers that multiplies rows of integers by bytes
    # number of rows of the register tile in floats.py; it determines the number of tokens of a tile, which is the same in both units
    attention_rows: int

    @staticmethod
    def find(operands: PagedOperands, tiles: ProductTiles) -> Integers | None:
        """Choose the instructions. Return None if the target has no such instructions apart from a matrix unit, if pages are no 8-bit
        integers or have only keys, or if the size of a head is above LONGEST or no multiple of PAGE."""
        tile = next((t for t in tiles.integers if t.format.bits == 8 and not t.on_matrix_unit), None)
        fits = operands.cache.dtype is I8 and operands.size % PAGE == 0 and operands.size <= LONGEST and operands.pages.has_values
        return Integers(operands, tile, tiles.attention.shape.rows) if tile is not None and fits else None

    @property
    def unit(self) -> Unit:
        panel_pages = self.columns // PAGE
        order = Order(Cut(panel_pages, PAGES // panel_pages, SPLIT), keys=panel_pages, values=PAGES)
        return Unit(order, order, tokens_of_tile(self.operands, self.attention_rows), self.rows)

    @property
    def planes(self) -> int:
        """The number of planes of a row: two of bytes for 16 bits, otherwise one of bytes or of words."""
        return 2 if self.tile.rows is I8 and self.operands.node.row_bits == 16 else 1

    @property
    def in_words(self) -> bool:
        """Whether rows are stored as 16-bit words, not as bytes."""
        return self.tile.rows is not I8

    @property
    def tile_rows(self) -> int:
        """The number of rows of a register tile."""
        return self.tile.shape_of(self.planes).rows

    @property
    def columns(self) -> int:
        """The number of keys of a panel of keys, and of elements of a panel of values: that of the tile, or PAGE if the tile's number of
        columns does not divide the head size."""
        return self.tile.op.columns if self.operands.size % self.tile.op.columns == 0 else PAGE

    @property
    def at_once(self) -> int:
        """The number of columns of values that are packed at once."""
        return next(count for count in (64, 32, 16) if self.operands.size % count == 0 and count % self.columns == 0)

    def product(self, rows: int, later: int) -> DotPanel | DotWords:
        """Return the tile that multiplies `rows` rows by a panel, and meanwhile prefetches memory at the places of `later` further
        operands."""
        rows, columns = rows * self.planes, self.columns
        if self.in_words:
            return DotWords(rows, columns, cached_panel=True, later=later)
        return DotPanel(rows, columns, 8, cached_panel=True, later=later)

    def pack(self, columns: int) -> PackBytes:
        """Return the tile that packs `columns` columns of values as panels."""
        return PackBytes(columns, min(columns, self.columns), words=self.in_words)

    def rows(self, k: Kernel, item: Item, order: Order) -> IntegerRows:
        """Allocate the rows of an item, with memory for packed keys and values."""
        size, columns, count, keys = self.operands.size, self.columns, item.most_rows, order.cut.keys
        levels = LEVELS[self.operands.node.row_bits]
        return IntegerRows(
            item,
            order,
            Cache.open(k, self.operands),
            OnlineSoftmax.allocate(k, count, size // PAGE, PAGE),
            k.local("scores", count, PAGES, PAGE),
            self,
            Rounded.allocate(k, "query", count, self.planes, size, self.tile.rows, levels),
            Rounded.allocate(k, "weight", count, self.planes, keys, self.tile.rows, levels),
            k.local("keys", size // FOUR, FOUR * columns, dtype=U8),
            k.local("taken", size // columns, keys // FOUR, FOUR * columns, dtype=U8),
        )


@dataclass(frozen=True, slots=True)
class Rounded:
    """Rows that are rounded to integers, with one scale per row."""

    integers: Array  # [rows, planes, length]
    factors: Array  # [rows]: the scale of the integers
    shifts: Array  # [rows]: -128 times the sum of the integers
    levels: int  # the largest integer

    @staticmethod
    def allocate(k: Kernel, name: str, count: int, planes: int, length: int, dtype: DType, levels: int) -> Rounded:
        """Allocate `count` rows of `length` integers in `planes` planes. `levels` is the largest integer."""
        integers = k.local(f"{name}_integers", count, planes, length, dtype=dtype)
        return Rounded(integers, k.local(f"{name}_factors", count), k.local(f"{name}_shifts", count, dtype=I32), levels)

    def store(self, k: Kernel, row: Dim, slots: Callable[[], Iterator[Dim]], number: Callable[[Dim, Dim], Scalar]) -> None:
        """Round a row of vectors of PAGE numbers, and store its factor and its shift. `slots` loops over the vectors. `number` returns a
        number, given its vector and lane. If there are two planes, the first one gets the upper bytes."""
        with k.scope():
            # In each lane, the bits of the largest magnitude. As integers, bits compare like magnitudes, and those of NaN are the largest.
            top = k.local("top", PAGE, dtype=I32)
            total, inverse, rounded = k.local("total", PAGE, dtype=I32), k.local("inverse", PAGE), k.local("rounded", PAGE, dtype=I32)
            fill(k, top, None, 0)
            for slot in slots():
                with k.vector(PAGE) as lane:
                    top[lane] = larger(top[lane], bits_of(number(slot, lane)) & MAGNITUDE)
            fill(k, total, None, 0)
            spread_largest(k, top)
            with k.vector(PAGE) as lane:
                inverse[lane] = const(float(self.levels), F32) / larger(const(LEAST, F32), of_bits(top[lane]))
            for slot in slots():
                with k.vector(PAGE) as lane:
                    rounded[lane] = bits_of(fma(number(slot, lane), inverse[lane], const(ROUNDER, F32))) - ROUNDER_BITS
                with k.vector(PAGE) as lane:
                    total[lane] = total[lane] + rounded[lane]
                last = self.integers.shape[1].const - 1
                for plane in range(last + 1):
                    with k.vector(PAGE) as lane:
                        bits = rounded[lane] if plane == last else rounded[lane] + 128 >> 8
                        self.integers[row, plane, slot * PAGE + lane] = cast(bits, self.integers.dtype)
            fold_halves(k, total, operator.add)
            self.factors[row] = of_bits(top[0]) / self.levels
            self.shifts[row] = total[0] * -128


@dataclass(frozen=True, slots=True)
class IntegerRows(Rows):
    """The rows of an item whose products multiply integers: queries and weights are rounded."""

    integers: Integers
    queries: Rounded
    weights: Rounded
    keys: Array  # [size / FOUR, FOUR * columns]: a panel of keys
    values: Array  # [panels, keys of a block / FOUR, FOUR * columns]: the values of a block

    def load_query(self, k: Kernel, row: Dim, query: Callable[[Dim], Scalar]) -> None:
        """Scale a query, and round it to integers."""
        parts = self.cache.size // PAGE
        with k.scope():
            scaled = k.local("scaled", parts, PAGE)
            with k.serial("c", parts) as c, k.vector(PAGE) as lane:
                scaled[c, lane] = query(c * PAGE + lane) * self.integers.operands.node.scale
            vectors = partial(Span(Dim.of(0), Dim.of(parts)).pages, k, 1)
            self.queries.store(k, row, vectors, lambda c, lane: scaled[c, lane])

    # --- scores and weights --------------------------------------------------------------------------------------------

    def multiply_keys(self, k: Kernel, pages: Sequence[HeadPage], count: int) -> None:
        """Compute the scores of `count` rows for a panel of keys. The products of a single token prefetch the values of the same pages, one
        cache line after another: the CPU drops prefetches that come in bursts."""
        size = self.cache.size
        for v, page in enumerate(pages):
            with k.serial("r", size // FOUR) as r:
                source = self.cache.element(page, KEYS, r * (FOUR * PAGE))
                k.tile(self.integers.pack(PAGE), self.keys[r, v * FOUR * PAGE], source, dims=(PAGE, 0))
        later = [] if self.item.is_tile else [self.cache.element(page, VALUES) for page in pages]
        for at, n in row_tiles(k, count, self.integers.tile_rows):
            row = pages[0].row + at
            with k.scope():
                total = self.multiply(k, self.queries, row, n, Dim.of(0), self.keys[0, 0], (size, size), later)
                for v, page in enumerate(pages):
                    with k.unroll("m", n) as m, k.vector(PAGE) as lane:
                        score = self.joined(total, m, v * PAGE + lane) * self.queries.factors[row + m] * self.cache.scale(page, KEYS, lane)
                        self.scores[row + m, page.slot, lane] = capped(score, self.integers.operands.node.softcap)

    def multiply(
        self, k: Kernel, rows: Rounded, row: Dim, n: int, begin: Dim, panel: Load, dims: tuple[Dim | int, int], later: Sequence[Load]
    ) -> Array:
        """Multiply `n` rows, from element `begin` on, by a panel. Return the sums, [n, planes, columns], which begin at the shifts of the
        rows. `dims` are the number of elements to multiply and the length of a row. Meanwhile, prefetch memory from each of the places
        `later` on."""
        planes, columns = self.integers.planes, self.integers.columns
        total = k.local("total", n, planes, columns, dtype=I32)
        with k.unroll("m", n) as m:
            for v in range(0, columns, PAGE):
                with k.vector(PAGE) as lane:
                    total[m, planes - 1, v + lane] = rows.shifts[row + m]
                if planes == 2:
                    with k.vector(PAGE) as lane:
                        total[m, 0, v + lane] = 0
        k.tile(self.integers.product(n, len(later)), total[0, 0, 0], rows.integers[row, 0, begin], panel, *later, dims=dims)
        return total

    def joined(self, total: Array, m: Dim, column: Dim) -> Scalar:
        """Return a row's sum in a column, as f32. With two planes, plane 0 has the products of the upper bytes, so its sum is multiplied by
        256."""
        found = total[m, 0, column] if self.integers.planes == 1 else (total[m, 0, column] << 8) + total[m, 1, column]
        return cast(found, F32)

    def update_softmax(self, k: Kernel, block: Block, span: Span, part: Part) -> None:
        """Turn the scores of rows into weights that are rounded to integers. For rows that see no key of the block, only set the factor to
        0, which makes all weights 0."""
        for (head,) in self.item.heads(k, part):
            with self.item.tokens(k) as (first, seen):
                with k.when(seen.overlaps(block.start, block.end)), k.serial("m", self.item.group) as m:
                    self.update_row(k, block, span, head, head.row + first + m, seen)
                with k.orelse(), k.serial("m", self.item.group) as m:
                    self.weights.factors[head.row + first + m] = 0.0

    def update_row(self, k: Kernel, block: Block, span: Span, head: Head, row: Dim, seen: Seen | None) -> None:
        Rows.update_row(self, k, block, span, head, row, seen)
        slots = partial(span.pages, k, block.cut.panel_pages)
        self.weights.store(k, row, slots, lambda slot, lane: self.scores[row, slot, lane])

    # --- values --------------------------------------------------------------------------------------------------------

    def load_values(self, k: Kernel, pages: Sequence[HeadPage], seen: Seen | None) -> None:
        """Pack the values of pages into panels. Values of keys that no row sees are packed, too: they are finite numbers."""
        size, columns, at_once = self.cache.size, self.integers.columns, self.integers.at_once
        for page in pages:
            with k.serial("r", PAGE // FOUR) as r:
                for p in range(0, size, at_once):
                    source = self.cache.element(page, VALUES, r * (FOUR * size) + p)
                    out = self.values[p // columns, page.slot * (PAGE // FOUR) + r, 0]
                    k.tile(self.integers.pack(at_once), out, source, dims=(size, self.order.cut.keys * columns))

    def multiply_values(self, k: Kernel, block: Block, head: Head, pages: Sequence[HeadPage], part: Part) -> None:
        """Add the weighted values of a block to a part of the rows of a head, panel by panel."""
        columns, keys, values = self.integers.columns, self.order.cut.keys, self.softmax.values
        begin = block.span.first * columns
        length = k.let("length", block.span.count * columns, keys, multiple_of=columns)
        with k.serial("p", self.cache.size // columns) as p:
            later = [] if self.item.is_tile else self.next_keys(k, block, head.kv_head, p)
            for at, n in row_tiles(k, part.count, self.integers.tile_rows):
                row = head.row + at
                with k.scope():
                    total = self.multiply(k, self.weights, row, n, begin, self.values[p, begin // FOUR, 0], (length, keys), later)
                    for v in range(columns // PAGE):
                        with k.unroll("m", n) as m, k.vector(PAGE) as lane:
                            place = row + m, p * (columns // PAGE) + v, lane
                            values[place] = fma(self.joined(total, m, v * PAGE + lane), self.weights.factors[row + m], values[place])

    def next_keys(self, k: Kernel, block: Block, kv_head: Dim, p: Dim) -> list[Load]:
        """Return the places of the next block's keys that the product with panel `p` of values prefetches, for a single token. Each product
        prefetches an equal part of these keys."""
        item, size, streams = self.item, self.cache.size, self.order.cut.panel_pages
        found: list[Load] = []
        for i in range(streams):
            at = (((kv_head - item.kv_first) * (size // self.integers.columns) + p) * streams + i) * (block.cut.keys // FOUR * LINE_BYTES)
            length = item.kv_count * (size * PAGE)
            page = block.page(k, PAGES + at // length)
            found.append(self.cache.stored[self.cache.layer, KEYS, page, item.kv_first, at % length])
        return found
