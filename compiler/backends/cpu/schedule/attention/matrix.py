"""Compute a block of keys and values for some rows of paged attention, on a matrix unit.

The unit multiplies bf16, the type of the pages, so queries and weights are rounded to bf16. Keys and values are interleaved in pairs when
they are loaded from their page, once for all rows that share them. Values that no row sees are loaded as zeros, because 0 * NaN is not 0.

The unit multiplies so fast that most of the time goes into the softmax. Therefore a block has many keys, the softmax has no branches, and
its exponentials have base 2 and few instructions (SoftmaxRows): queries are multiplied by log2(e). Where many rows share a block, the
softmax of some rows takes place while the unit multiplies others (AmxAttend).

A row has the same bits whatever other rows are in the tile: the products of a block are stored separately, and each row adds its own
products to its sums. A key that the row does not see has weight 0, so it adds a zero. That can only change the sign of a zero, and the sign
is lost, because accumulators begin with +0. A block of which the row sees no key leaves its sums unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import log
from typing import ClassVar

from compiler.backends.cpu.schedule.attention.blocks import Block, Cut, Span
from compiler.backends.cpu.schedule.attention.items import Item
from compiler.backends.cpu.schedule.attention.operands import I64, PagedOperands
from compiler.backends.cpu.schedule.attention.pages import F32, Cache, HeadPage
from compiler.backends.cpu.schedule.attention.seen import Seen
from compiler.backends.cpu.schedule.attention.softmax import OnlineSoftmax, lanes
from compiler.backends.cpu.schedule.folds import fold_halves
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.functions import ReduceFn
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.write import Array, Kernel, cast, equal, fma, less
from compiler.machine.intrinsics.amx import AmxBf16, AmxStayAwake
from compiler.machine.intrinsics.amx_attend import AmxAttend
from compiler.machine.intrinsics.interleave import InterleavePairs
from compiler.machine.intrinsics.round_bf16 import RoundBf16
from compiler.machine.intrinsics.softmax_rows import SoftmaxRows
from compiler.machine.target import LINE_BYTES
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES
from compiler.ops.attention.plain import capped

PANEL_PAGES = 2  # number of pages of a panel
PANEL = PANEL_PAGES * PAGE  # number of keys, or of elements of values, that a product multiplies rows by
PANELS = 4  # number of panels of a block
SPLIT = 8  # number of blocks of a split
CUT = Cut(PANEL_PAGES, PANELS, SPLIT)
HEIGHT = 32  # maximum number of rows of a product
PRODUCTS = 2  # number of products that cover the rows of a tile
MOST_TOKENS = 32  # maximum number of tokens of a tile: a part of a prompt with fewer than half as many gets no tile
MOST_TILES = 8  # maximum number of tiles that share keys and values
TILES_BYTES = 256 << 10  # maximum size of the queries and sums of these tiles: a part of the second-level cache
LINES = PANEL * PAGE * 2 // LINE_BYTES  # cache lines of a page that a step of a product prefetches: PANEL elements of its keys or values
CHUNK = 2 * 8  # number of rows that one tile interleaves
LEAST = -1e30  # the maximum of a row that has seen no key
LOG2_E, LN_2 = 1 / log(2), log(2)
BF16 = DType.BF16
WHOLE = Span(Dim.of(0), Dim.of(PANELS))
FIRST = Dim.of(0)  # the first buffer


@dataclass(frozen=True, slots=True)
class MatrixUnit:
    operands: PagedOperands

    split_pages: ClassVar[int] = SPLIT * CUT.pages
    heads_at_once: ClassVar[int] = 1
    slow_division: ClassVar[bool] = True

    @property
    def tile_tokens(self) -> int:
        return max(2, min(MOST_TOKENS, PRODUCTS * (HEIGHT // self.operands.group)))

    @property
    def most_tiles(self) -> int:
        """Tiles share keys and values, which take longer to load than to multiply."""
        row_bytes = 2 * self.operands.size + 4 * 2 * self.operands.value_size
        return max(1, min(MOST_TILES, TILES_BYTES // (row_bytes * self.tile_tokens * self.operands.group)))

    @contextmanager
    def rows(self, k: Kernel, item: Item) -> Generator[MatrixRows]:
        """Allocate the state, and configure the unit for the products of an item: those of a token's heads that share a kv head, and those
        of a tile. A token needs room for one panel of keys and values, and a tile for a block."""
        operands, count = self.operands, item.most_rows
        of_product = self.tile_tokens * operands.group if item.is_tile else operands.group
        height = next(h for h in range(HEIGHT, 0, -1) if of_product % h == 0)  # the largest that the unit supports
        block_rows, panels, value_panels = (
            height if item.is_tile else count,
            PANELS if item.is_tile else 1,
            -(-operands.value_size // PANEL),
        )
        depth = -(-operands.size // PANEL) * PANEL  # the size of a key, rounded up to whole steps of the unit
        rows = MatrixRows(
            self,
            item,
            Cache.open(k, operands),
            Base2Softmax(
                k.local("maximum", count), k.local("sums", count, PAGE), k.local("values", count, operands.value_size // PAGE, PAGE)
            ),
            height,
            k.local("queries", count, depth, dtype=BF16),
            k.local("scores", 2, PANELS, block_rows, PANEL),
            k.local("weights", 2, block_rows, CUT.keys, dtype=BF16),
            k.local("keys", panels, depth // 2, 2 * PANEL, dtype=BF16),
            k.local("taken", value_panels, panels * PANEL // 2, 2 * PANEL, dtype=BF16),
            k.local("products", value_panels, block_rows, PANEL),
            k.local("rescale", 2, -(-block_rows // PAGE) * PAGE),
            k.local("reach", count // height, 2, dtype=I64),
        )
        k.tile(rows.product(fresh=True).configuration)
        rows.pad(k)
        if item.is_tile:
            rows.find_reach(k)
        yield rows


@dataclass(frozen=True, slots=True)
class Base2Softmax(OnlineSoftmax):
    """The maximum is [rows]. It is multiplied by log2(e), as are scores."""

    def clear(self, k: Kernel, row: Dim) -> None:
        self.maximum[row] = LEAST
        self.clear_sums(k, row)

    def largest(self, row: Dim) -> Scalar:
        return self.maximum[row] * LN_2


@dataclass(frozen=True, slots=True)
class MatrixRows:
    """There are two buffers for scores and weights of a block, each with room for `block rows` rows."""

    unit: MatrixUnit
    item: Item
    cache: Cache
    softmax: Base2Softmax
    height: int  # number of rows of a product
    queries: Array  # [rows, depth]
    scores: Array  # [2, PANELS, block rows, PANEL], multiplied by log2(e)
    weights: Array  # [2, block rows, keys of a block]
    keys: Array  # [panels, depth / 2, 2 * PANEL]: panels of keys
    values: Array  # [value panels, keys / 2, 2 * PANEL]: values of the same number of panels of keys
    products: Array  # [value panels, block rows, PANEL]: products of weights and values
    rescale: Array  # [2, block rows]: 2^(old maximum - new maximum), the factor of the earlier sums, for the rows of each buffer
    reach: Array  # [products, 2]: the smallest and the largest position of the tokens of each product of a tile

    cut: ClassVar[Cut] = CUT

    @property
    def depth(self) -> int:
        return self.queries.shape[1].const

    @property
    def softcap(self) -> float:
        return self.unit.operands.node.softcap

    def product(self, *, fresh: bool, later: Load | None = None) -> AmxBf16:
        return AmxBf16(self.height, PANEL, fresh=fresh, cached_panel=True, prefetching=later is not None)

    def pad(self, k: Kernel) -> None:
        """Write zeros to those parts of the buffers that keys and values do not fill."""
        panels, pairs, left, last_panel = self.keys.shape[0], self.cache.size // 2, self.cache.value_size % PANEL, self.values.shape[0] - 1
        rest = self.depth // 2 - pairs
        if rest:
            with k.nest((panels, rest, 2 * PANEL_PAGES)) as (p, r, c), k.vector(PAGE) as lane:
                self.keys[p, pairs + r, c * PAGE + lane] = 0.0
        if left:
            with k.nest((self.values.shape[1], 2 * (PANEL - left) // PAGE)) as (r, c), k.vector(PAGE) as lane:
                self.values[last_panel, r, 2 * left + c * PAGE + lane] = 0.0

    def find_reach(self, k: Kernel) -> None:
        """Store the smallest and the largest position of the tokens of each product."""
        height, operands, group = self.height, self.unit.operands, self.item.group
        with k.serial("io", self.num_products) as io:
            first, last = io * height // group, (io * height + (height - 1)) // group
            for end, fn in enumerate((ReduceFn.MIN, ReduceFn.MAX)):
                token = operands.token_of(self.item.first, first)
                self.reach[io, end] = operands.extreme_position(token, last - first + 1, fn)

    def load_query(self, k: Kernel, row: Dim, query: Callable[[Dim], Scalar]) -> None:
        """Load, scale and round a query. Fill its end with zeros, up to a whole number of steps of the unit. With a softcap, scores are
        multiplied by log2(e) after they are capped."""
        size, scale = self.cache.size, self.unit.operands.node.scale
        scaled, factor = k.local("scaled", PAGE), scale if self.softcap else scale * LOG2_E
        with k.serial("c", size // PAGE) as c:
            with k.vector(PAGE) as lane:
                scaled[lane] = query(c * PAGE + lane) * factor
            k.tile(RoundBf16(), self.queries[row, c * PAGE], scaled[0])
        for at in range(size, self.depth, PAGE):
            with k.vector(PAGE) as lane:
                self.queries[row, at + lane] = 0.0

    def add(self, k: Kernel, block: Block) -> None:
        if self.item.is_tile:
            self.add_to_tile(k, block)
        else:
            self.add_to_token(k, block)

    # --- a block with the rows of a token ------------------------------------------------------------------------------

    def add_to_token(self, k: Kernel, block: Block) -> None:
        """Add a block. Read all its keys, then all its values, a panel at a time. Meanwhile prefetch the panel that is read next: of each
        head, the first page while the head's pages are loaded, and the second page during products. So memory does not wait for
        products."""
        item, seen, count = self.item, self.item.seen, self.item.kv_count * self.item.group
        with block.span.panels(k) as panel, self.panel_of_each(k, block, panel, KEYS) as (pages, first, later):
            self.load_keys(k, pages, FIRST)
            with k.serial("io", item.group // self.height) as io:
                row = first + io * self.height
                self.multiply_keys(k, panel, FIRST, row, row, later)
        self.cap(k, FIRST, count)
        with k.when(~seen.lacks(block.start, block.end)):
            self.update_softmax(k, FIRST, count)
            self.add_values(k, block, WHOLE, None)
        with k.orelse():
            self.hide(k, FIRST, count, lambda _: seen, block.start, WHOLE)
            self.update_softmax(k, FIRST, count)
            self.add_values(k, block, block.span, seen)

    def add_values(self, k: Kernel, block: Block, span: Span, seen: Seen | None) -> None:
        """Add the weighted values of a block to the rows of a token. `seen` is None if the token sees the whole block."""
        item, count = self.item, self.item.kv_count * self.item.group
        with k.serial("p", self.products.shape[0]) as p, k.serial("m", count) as m:
            for v in range(PANEL_PAGES):
                with k.vector(PAGE) as lane:
                    self.products[p, m, v * PAGE + lane] = 0.0
        with span.panels(k) as panel, self.panel_of_each(k, block, panel, VALUES) as (pages, first, later):
            self.load_values(k, pages, FIRST, seen)
            with k.serial("io", item.group // self.height) as io:
                later = later if self.cache.turned is None else None
                self.multiply_values(k, first + io * self.height, Span(panel, panel + 1), FIRST, fresh=False, later=later)
        self.add_products(k, FIRST, FIRST, count)

    @contextmanager
    def panel_of_each(self, k: Kernel, block: Block, panel: Dim, half: int) -> Generator[tuple[list[HeadPage], Dim, Load]]:
        """Loop over the kv heads of a token. Yield the pages of a panel, which prefetch one page together, the first row of the head, and
        the place of the page that products prefetch."""
        pages = block.prefetching(k, half, block.panel(k, panel))
        first, second = (page.next_page for page in pages)
        assert first is not None and second is not None, pages
        with self.item.each_kv(k) as (kv, row):
            parts = [replace(page, kv_head=kv, next_page=replace(first, part=v)) for v, page in enumerate(pages)]
            yield parts, row, self.cache.stored[self.cache.layer, second.half, second.page, kv, 0]

    # --- a block with the rows of a tile -------------------------------------------------------------------------------

    def add_to_tile(self, k: Kernel, block: Block) -> None:
        """Add a block. Load it once, and multiply it by all rows, `height` rows at a time. A row gives weight 0 to the keys that it does not
        see, so their values matter only if one is infinite or NaN. If the block has such a value, its values are multiplied for each row
        separately."""
        whole, infinite = ~self.item.seen_by_all.lacks(block.start, block.end), k.local("infinite", PAGE)
        with k.serial("c", block.span.end) as panel:
            self.load_keys(k, self.panel(k, block, panel, KEYS), panel)
        with k.vector(PAGE) as lane:
            infinite[lane] = 0.0
        with k.when(whole), WHOLE.panels(k) as panel:
            self.load_values(k, self.panel(k, block, panel, VALUES), panel, None)
        with k.orelse():
            with k.serial("c", block.span.end) as panel:
                self.load_values(k, block.panel(k, panel), panel, self.item.seen)
            self.look_for_infinite(k, infinite, block)
        with k.when(equal(infinite[0], 0.0)):
            self.attend(k, block, whole)
        with k.orelse(), k.serial("io", self.num_products) as io:
            self.attend_one_by_one(k, block, io)

    @property
    def num_products(self) -> Dim:
        return self.item.rows_per_kv // self.height

    def panel(self, k: Kernel, block: Block, number: Dim, half: int) -> list[HeadPage]:
        """Return the pages of a panel. Each prefetches the page of the same panel in the next block."""
        return [block.prefetching_page(k, Dim.of(half), page, page.slot + CUT.pages) for page in block.panel(k, number)]

    def attend(self, k: Kernel, block: Block, whole: Scalar) -> None:
        """Add a block, whose keys and values are loaded, to all rows. `whole` says whether all of them see the whole block. The softmax of
        some rows takes place while the unit multiplies those after and before them, in the other buffer."""
        count, height, value_panels, zero = self.num_products, self.height, self.products.shape[0], Dim.of(0)
        last, stage = count - 1, AmxAttend(height, PANELS, self.depth, value_panels.const)
        with k.serial("c", self.seen_panels(k, block, zero)) as panel:
            self.multiply_keys(k, panel, panel, zero, zero)
        with k.serial("io", count) as io:
            buffer, other, later = io % 2, (io + 1) % 2, dim_min(io + 1, last)
            self.cap(k, buffer, height)
            with k.when(~whole):
                self.hide(k, buffer, height, lambda m: self.seen(k, io * height + m), block.start, self.partly_seen(k, block, io))
            keys = self.scores[other, 0, 0, 0], self.queries[later * height, 0], self.keys[0, 0, 0]
            values = self.products[0, 0, 0], self.weights[other, 0, 0], self.values[0, 0, 0]
            of_softmax = self.softmax_operands(buffer, io * height)
            key_panels, before = dim_min(1, last - io) * self.seen_panels(k, block, later), dim_max(0, io - 1)
            seen = self.seen_panels(k, block, io), key_panels, dim_min(1, io) * value_panels, self.seen_panels(k, block, before)
            k.tile(stage, *of_softmax, *keys, *values, dims=seen)
            with k.when(less(zero, io)):
                self.add_products(k, (io - 1) * height, other, height)
        self.multiply_values(k, zero, Span(zero, self.seen_panels(k, block, last)), zero, fresh=True, buffer=last % 2)
        self.add_products(k, last * height, last % 2, height)

    def attend_one_by_one(self, k: Kernel, block: Block, io: Dim) -> None:
        """Add a block to the rows of a product, with the values that each of them sees."""
        first, height = io * self.height, self.height
        with k.serial("c", block.span.end) as panel:
            self.multiply_keys(k, panel, panel, first, FIRST)
        self.cap(k, FIRST, height)
        self.hide(k, FIRST, height, lambda m: self.seen(k, first + m), block.start, WHOLE)
        self.update_softmax(k, first, height)
        with k.serial("m", height) as m:
            seen = self.seen(k, first + m)
            with WHOLE.panels(k) as panel:
                self.load_values(k, block.panel(k, panel), panel, seen)
            self.multiply_values(k, FIRST, WHOLE, FIRST, fresh=True)
            self.add_product(k, m, first + m, FIRST)

    def seen(self, k: Kernel, row: Dim) -> Seen:
        return self.item.seen_by_row(k, row)

    def seen_panels(self, k: Kernel, block: Block, io: Dim) -> Dim:
        """Return how many panels of a block the rows of a product see, but at least one."""
        last = k.let("last", self.reach[io, 1])
        return dim_min(block.span.end, ceil_div(dim_max(1, last + 1 - block.start), PANEL))

    def partly_seen(self, k: Kernel, block: Block, io: Dim) -> Span:
        """Return the span of the panels that the rows of a product see, without those that all of them see whole. With a window, return all
        panels that they see."""
        end = self.seen_panels(k, block, io)
        if self.item.seen.has_window:
            return Span(Dim.of(0), end)
        first = k.let("first", self.reach[io, 0])
        return Span(dim_min(end, dim_max(0, first + 1 - block.start) // PANEL), end)

    def look_for_infinite(self, k: Kernel, found: Array, block: Block) -> None:
        """Make the first element of `found`, which is 0, NaN if a value of keys that only some rows see is infinite or NaN. Such a value
        would affect even rows that do not see its key. The code uses that x - x is 0 only for finite numbers."""
        item, (panels, _, length) = self.item, self.values.shape
        ranges = [(item.first_position + 1, item.last_position)]
        if item.seen.has_window:
            ranges.append((item.seen.low, item.seen_by_all.low - 1))
        for low, high in ranges:
            first, last = dim_max(0, low - block.start), dim_min(CUT.keys - 1, high - block.start)
            pair = k.let("pair", first // 2)
            with k.nest((last // 2 + 1 - pair, panels, length // PAGE)) as (r, p, c), k.vector(PAGE) as lane:
                x = cast(self.values[p, pair + r, c * PAGE + lane], F32)
                found[lane] += x - x
        fold_halves(k, found, operator.add)

    # --- scores --------------------------------------------------------------------------------------------------------

    def load_keys(self, k: Kernel, panel: Sequence[HeadPage], place: Dim) -> None:
        """Load a panel of keys. Row i of a page stores element i of all its keys."""
        for v, page in enumerate(panel):
            with k.serial("r", self.cache.size // CHUNK) as r:
                first = r * (CHUNK * PAGE)
                self.cache.prefetch(k, page, KEYS, first, CHUNK * PAGE)
                target, source = self.keys[place, r * (CHUNK // 2), 2 * PAGE * v], self.cache.element(page, KEYS, first)
                k.tile(InterleavePairs(PAGE), target, source, dims=(2 * PANEL, PAGE))
            k.tile(AmxStayAwake())

    def multiply_keys(self, k: Kernel, panel: Dim, place: Dim, query: Dim, row: Dim, later: Load | None = None) -> None:
        """Compute the scores of `height` rows for a panel of keys. `query` is the first row of queries, and `row` of scores. If `later` is
        the place of a head's page, prefetch that page."""
        operands = self.scores[0, panel, row, 0], self.queries[query, 0], self.keys[place, 0, 0]
        ahead, share = ((), ()) if later is None else ((later,), (0, LINES))
        k.tile(self.product(fresh=True, later=later), *operands, *ahead, dims=(self.depth, self.depth, *share))

    # --- weights -------------------------------------------------------------------------------------------------------

    def cap(self, k: Kernel, buffer: Dim, count: Dim | int) -> None:
        """Cap the scores of `count` rows, if the model caps scores."""
        if self.softcap:
            with k.nest((count, PANELS, PANEL_PAGES)) as (m, panel, v), k.vector(PAGE) as lane:
                at, scores = v * PAGE + lane, self.scores
                scores[buffer, panel, m, at] = capped(scores[buffer, panel, m, at], self.softcap) * LOG2_E

    def hide(self, k: Kernel, buffer: Dim, count: Dim | int, seen: Callable[[Dim], Seen], start: Dim, span: Span) -> None:
        """Set scores in the panels of `span` to -inf where a row does not see the key. `start` is the position of the block's first key."""
        with k.serial("m", count) as m:
            of_row = seen(m)
            with span.panels(k) as panel, k.serial("v", PANEL_PAGES) as v, k.vector(PAGE) as lane:
                at, scores = v * PAGE + lane, self.scores
                scores[buffer, panel, m, at] = of_row.hide(start + panel * PANEL + at, scores[buffer, panel, m, at])

    def update_softmax(self, k: Kernel, first: Dim, count: Dim | int) -> None:
        """Turn the scores of `count` rows in the first buffer into weights, and add the weights to `sums`. Set `rescale` to the factors of
        the earlier sums. `first` is the first row; its scores are in row 0."""
        k.tile(SoftmaxRows(self.scores.shape[2].const, PANELS), *self.softmax_operands(FIRST, first), dims=(count,))

    def softmax_operands(self, buffer: Dim, first: Dim) -> tuple[Load, ...]:
        """Return the operands of the softmax of the rows in a buffer."""
        of_block, softmax = (self.weights[buffer, 0, 0], self.scores[buffer, 0, 0, 0]), self.softmax
        return *of_block, softmax.maximum[first], softmax.sums[first, 0], self.rescale[buffer, 0]

    # --- values --------------------------------------------------------------------------------------------------------

    def load_values(self, k: Kernel, panel: Sequence[HeadPage], place: Dim, seen: Seen | None) -> None:
        """Load the values of a panel of keys. Write zeros for keys that are not seen; None means that all are."""
        for v, page in enumerate(panel):
            self.cache.turn(k, page)
            for p, columns in self.value_panels(k):
                if self.cache.turned is None:
                    self.cache.prefetch(k, page, VALUES, p * (PANEL * PAGE), columns * PAGE)
                target, source = self.values[p, place * (PANEL // 2) + v * PAGE // 2, 0], self.cache.value(page, 0, p * PANEL)
                limits = () if seen is None else (seen.low - page.start, seen.high + 1 - page.start)
                dims = (2 * PANEL, self.cache.value_size, *limits)
                k.tile(InterleavePairs(columns, masked=seen is not None), target, source, dims=dims)
            k.tile(AmxStayAwake())

    def value_panels(self, k: Kernel) -> Iterator[tuple[Dim, int]]:
        """Yield the index of each panel of elements of values, and its number of columns. The code that the caller's `for` emits becomes
        the body of a loop."""
        whole, left = divmod(self.cache.value_size, PANEL)
        if whole:
            with k.serial("p", whole) as p:
                yield p, PANEL
        if left:
            yield Dim.of(whole), left

    def multiply_values(
        self, k: Kernel, row: Dim, span: Span, place: Dim, *, fresh: bool, later: Load | None = None, buffer: Dim = FIRST
    ) -> None:
        """Multiply the weights of `height` rows for the panels of `span` by the values at `place`. If `later` is the place of a head's
        page, `span` is one panel; prefetch that page."""
        with k.serial("p", self.products.shape[0]) as p:
            operands = self.products[p, row, 0], self.weights[buffer, row, span.first * PANEL], self.values[p, place * (PANEL // 2), 0]
            ahead, share = ((), ()) if later is None else ((later,), (p * LINES, LINES))
            k.tile(self.product(fresh=fresh, later=later), *operands, *ahead, dims=(span.count * PANEL, CUT.keys, *share))

    def add_products(self, k: Kernel, first: Dim, buffer: Dim, count: Dim | int) -> None:
        with k.serial("m", count) as m:
            self.add_product(k, m, first + m, buffer)

    def add_product(self, k: Kernel, m: Dim, row: Dim, buffer: Dim) -> None:
        """Rescale the weighted values of a row, and add the products of the current block to them."""
        values = self.softmax.values
        with lanes(k, values) as (c, lane):
            product = self.products[c // PANEL_PAGES, m, c % PANEL_PAGES * PAGE + lane]
            values[row, c, lane] = fma(values[row, c, lane], self.rescale[buffer, m], product)
