"""Attention on a CPU's matrix unit (AMX), for pages of bf16: a unit as walk.py defines it, and how a tile of tokens adds a block of keys.

The matrix unit multiplies so fast that most of the time goes into the softmax. Therefore a block has many keys, the softmax has no
branches, and its exponentials have base 2 and few instructions (SoftmaxRows): queries, or scores after they are capped, are multiplied by
log2(e). Where many rows share a block, the kernel computes the softmax of some rows while the unit multiplies other rows (AmxAttend).

A row (a query head of a token) has the same bits whatever other rows are in the tile: the products of a block are stored separately, and
each row adds its own products to its sums. A key that the row does not see has weight 0, so it adds a product of +0 or -0. This cannot
change a sum: a sum of 0 is always +0, because accumulators begin with +0. A block of which the row sees no key leaves its sums unchanged.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from compiler.backends.cpu.schedule.attention.blocks import Block, Span
from compiler.backends.cpu.schedule.attention.items import Item
from compiler.backends.cpu.schedule.attention.matrix_rows import CUT, FIRST, ORDER, PANEL, PANELS, WHOLE, MatrixRows
from compiler.backends.cpu.schedule.attention.operands import I64, PagedOperands
from compiler.backends.cpu.schedule.attention.pages import F32, HeadPage
from compiler.backends.cpu.schedule.attention.walk import Order, Unit
from compiler.backends.cpu.schedule.folds import fold_halves
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.loops.functions import ReduceFn
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, cast, equal, less
from compiler.machine.intrinsics.amx_attend import AmxAttend
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES

HEIGHT = 32  # maximum number of rows of a product
PRODUCTS = 2  # number of products for all rows of a tile, unless it would then have more than MOST_TOKENS or fewer than 2 tokens
MOST_TOKENS = 32  # maximum number of tokens of a tile; tokens of a prompt that fill less than half a tile are computed one by one
MOST_TILES = 8  # maximum number of tiles of an item, which share keys and values
TILES_BYTES = 256 << 10  # maximum size of the queries and sums of the tiles of an item: a part of the second-level cache


def matrix_unit(operands: PagedOperands) -> Unit:
    """Return the `Unit` for these operands. An item joins several tiles, which share keys and values, because these take longer to load
    than to multiply."""
    tokens = max(2, min(MOST_TOKENS, PRODUCTS * (HEIGHT // operands.group)))
    row_bytes = 2 * operands.size + 4 * 2 * operands.value_size
    most_tiles = max(1, min(MOST_TILES, TILES_BYTES // (row_bytes * tokens * operands.group)))

    def rows(k: Kernel, item: Item, order: Order) -> MatrixRows:
        """Allocate the rows, for the products of a tile, or of a token's heads that share a kv head. A token needs room for one panel of
        keys and values, and a tile for a block."""
        if not item.is_tile:
            return MatrixRows.allocate(k, item, order, _height(item.group), item.most_rows, 1)
        height = _height(tokens * item.group)
        found = TileRows.allocate(k, item, order, height, height, PANELS, k.local("reach", item.most_rows // height, 2, dtype=I64))
        found.find_reach(k)
        return found

    return Unit(ORDER, ORDER, tokens, rows, most_tiles, slow_division=True)


def _height(count: int) -> int:
    """Return the number of rows of a product: the largest divisor of `count` that the unit supports."""
    return next(h for h in range(HEIGHT, 0, -1) if count % h == 0)


@dataclass(frozen=True, slots=True)
class TileRows(MatrixRows):
    """The rows of adjacent tiles, which share keys and values."""

    reach: Array  # [products, 2]: the smallest and the largest last position that a row of each product sees

    def add(self, k: Kernel, block: Block) -> None:
        """Add a block. Load it once, and multiply it by all rows, `height` rows at a time. A row gives weight 0 to the keys that it does
        not see, so the values of these keys matter only if one is infinite or NaN. If the block has such a value whose key only some rows
        see, values are multiplied for each row separately."""
        whole, infinite = ~self.item.seen_by_all.lacks(block.start, block.end), k.local("infinite", PAGE)
        with k.serial("c", block.span.end) as panel:
            self.load_keys(k, self.panel(k, block, panel, KEYS), panel)
        with k.vector(PAGE) as lane:
            infinite[lane] = 0.0
        with k.when(whole), WHOLE.panels(k) as panel:
            self.load_panel(k, self.panel(k, block, panel, VALUES), panel, None)
        with k.orelse():
            with k.serial("c", block.span.end) as panel:
                self.load_panel(k, block.panel(k, panel), panel, self.item.seen)
            self.look_for_infinite(k, infinite, block)
        with k.when(equal(infinite[0], 0.0)):
            self.attend_in_turns(k, block, whole)
        with k.orelse(), k.serial("io", self.num_products) as io:
            self.attend_one_by_one(k, block, io)

    @property
    def num_products(self) -> Dim:
        """The number of products that cover the rows of the item."""
        return self.item.rows_per_kv // self.height

    def panel(self, k: Kernel, block: Block, number: Dim, half: int) -> list[HeadPage]:
        """Return the pages of a panel. While a page is loaded, the page at the same place in the next block is prefetched."""
        return [block.prefetching_page(k, Dim.of(half), page, page.slot + CUT.pages) for page in block.panel(k, number)]

    def attend_in_turns(self, k: Kernel, block: Block, whole: Scalar) -> None:
        """Add a block, whose keys and values are loaded, to all rows. `whole` says whether all rows see the whole block. While the kernel
        computes the softmax of some rows in one buffer, the unit multiplies keys for the rows after them and values for the rows before
        them, in the other buffer."""
        count, height, value_panels, zero = self.num_products, self.height, self.products.shape[0], Dim.of(0)
        last, stage = count - 1, AmxAttend(height, PANELS, self.depth, value_panels.const)
        with k.serial("c", self.seen_panels(k, block, zero)) as panel:
            self.compute_scores(k, panel, panel, zero, zero)
        with k.serial("io", count) as io:
            buffer, other, later = io % 2, (io + 1) % 2, dim_min(io + 1, last)
            self.cap(k, buffer, height)
            with k.when(~whole):
                self.hide(k, io * height, buffer, height, block.start, self.partly_seen(k, block, io))
            keys = self.scores[other, 0, 0, 0], self.queries[later * height, 0], self.keys[0, 0, 0]
            values = self.products[0, 0, 0], self.weights[other, 0, 0], self.values[0, 0, 0]
            of_softmax = self.softmax_operands(buffer, io * height)
            key_panels, before = dim_min(1, last - io) * self.seen_panels(k, block, later), dim_max(0, io - 1)
            seen = self.seen_panels(k, block, io), key_panels, dim_min(1, io) * value_panels, self.seen_panels(k, block, before)
            k.tile(stage, *of_softmax, *keys, *values, dims=seen)
            with k.when(less(zero, io)):
                self.add_products(k, (io - 1) * height, other, height)
        self.multiply_panels(k, zero, Span(zero, self.seen_panels(k, block, last)), zero, fresh=True, buffer=last % 2)
        self.add_products(k, last * height, last % 2, height)

    def attend_one_by_one(self, k: Kernel, block: Block, io: Dim) -> None:
        """Add a block to the rows of product number `io`. Load the values again for each row, with zeros instead of the values that the row
        does not see, because such values may be infinite or NaN."""
        first, height = io * self.height, self.height
        with k.serial("c", block.span.end) as panel:
            self.compute_scores(k, panel, panel, first, FIRST)
        self.cap(k, FIRST, height)
        self.hide(k, first, FIRST, height, block.start, WHOLE)
        self.weigh_block(k, first, height)
        with k.serial("m", height) as m:
            seen = self.item.seen_by_row(k, first + m)
            with WHOLE.panels(k) as panel:
                self.load_panel(k, block.panel(k, panel), panel, seen)
            self.multiply_panels(k, FIRST, WHOLE, FIRST, fresh=True)
            self.add_product(k, m, first + m, FIRST)

    def seen_panels(self, k: Kernel, block: Block, io: Dim) -> Dim:
        """Return the number of panels from the beginning of a block to the last one that a row of product `io` sees. Return at least 1."""
        last = k.let("last", self.reach[io, 1])
        return dim_min(block.span.end, ceil_div(dim_max(1, last + 1 - block.start), PANEL))

    def partly_seen(self, k: Kernel, block: Block, io: Dim) -> Span:
        """Return the panels of a block in which a key may have to be hidden from a row of product number `io`: those up to the last one
        that a row sees, except the first ones that all rows see whole. With a window, include these first panels, too."""
        end = self.seen_panels(k, block, io)
        if self.item.seen.has_window:
            return Span(Dim.of(0), end)
        first = k.let("first", self.reach[io, 0])
        return Span(dim_min(end, dim_max(0, first + 1 - block.start) // PANEL), end)

    def look_for_infinite(self, k: Kernel, found: Array, block: Block) -> None:
        """Set the first element of `found` to NaN if a value whose key only some rows see is infinite or NaN. Otherwise leave it 0. Such a
        value would affect even rows that do not see its key. Values are tested in pairs of two keys, so a pair is tested even if only one
        of its keys needs the test. The code uses that x - x is 0 only for finite numbers."""
        item, (panels, _, length) = self.item, self.values.shape
        ranges = [(item.seen_by_all.high + 1, item.seen.high)]
        if item.seen.has_window:
            ranges.append((item.seen.low, item.seen_by_all.low - 1))
        for low, high in ranges:
            first, last = dim_max(0, low - block.start), dim_min(CUT.keys - 1, high - block.start)
            pair = k.let("pair", first // 2)
            with k.nest((last // 2 + 1 - pair, panels, length // PAGE)) as (r, p, c), k.vector(PAGE) as lane:
                x = cast(self.values[p, pair + r, c * PAGE + lane], F32)
                found[lane] += x - x
        fold_halves(k, found, operator.add)

    def find_reach(self, k: Kernel) -> None:
        """Store, for each product, the smallest and the largest last position that one of its tokens sees."""
        height, operands, group = self.height, self.item.operands, self.item.group
        with k.serial("io", self.num_products) as io:
            first, last = io * height // group, (io * height + (height - 1)) // group
            for end, fn in enumerate((ReduceFn.MIN, ReduceFn.MAX)):
                token = operands.token_of(self.item.first, first)
                self.reach[io, end] = operands.extreme_position(token, last - first + 1, fn)
