"""The rows (query heads of tokens) of a work item on a matrix unit: how panels of keys and values are loaded and multiplied, and how a
single token adds a block.

The unit multiplies bf16, the type of the pages, so queries and weights are rounded to bf16. Keys and values are interleaved in pairs when
they are loaded from their page, usually once for all rows that attend to them. Values that no row sees are loaded as zeros, because 0 * NaN
is not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Self

from compiler.backends.cpu.schedule.attention.blocks import Block, Cut, Span
from compiler.backends.cpu.schedule.attention.items import Item, Part, row_tiles
from compiler.backends.cpu.schedule.attention.operands import Seen
from compiler.backends.cpu.schedule.attention.pages import Cache, Head, HeadPage
from compiler.backends.cpu.schedule.attention.softmax import OnlineSoftmax, lanes
from compiler.backends.cpu.schedule.attention.walk import Order, Rows
from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.write import Array, Kernel, fma
from compiler.machine.intrinsics.amx import AmxBf16, AmxStayAwake
from compiler.machine.intrinsics.interleave import InterleavePairs
from compiler.machine.intrinsics.round_bf16 import RoundBf16
from compiler.machine.intrinsics.softmax_rows import SoftmaxRows
from compiler.machine.target import LINE_BYTES
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES
from compiler.ops.attention.plain import capped

PANEL_PAGES = 2  # number of pages of a panel
PANEL = PANEL_PAGES * PAGE  # number of columns of a product: keys, or elements of values
PANELS = 4  # number of panels of a block
SPLIT = 8  # number of blocks of a split
CUT = Cut(PANEL_PAGES, PANELS, SPLIT)
ORDER = Order(CUT, keys=PANEL_PAGES, values=PANEL_PAGES, prefetches=True, whole_apart=True)
LINES = PANEL * PAGE * 2 // LINE_BYTES  # cache lines that a step of a product prefetches: PANEL elements of each key or value of a page
CHUNK = 2 * 8  # number of rows of a page that one `InterleavePairs` interleaves
LEAST = -1e30  # the maximum of a row that has seen no key
LOG2_E, LN_2 = 1 / log(2), log(2)
BF16 = DType.BF16
WHOLE = Span(Dim.of(0), Dim.of(PANELS))
FIRST = Dim.of(0)  # the first buffer


@dataclass(frozen=True, slots=True)
class Base2Softmax(OnlineSoftmax):
    """The online softmax with base 2. `maximum` has the shape [rows], and is multiplied by log2(e), as scores are."""

    def clear(self, k: Kernel, row: Dim) -> None:
        self.maximum[row] = LEAST
        self.clear_sums(k, row)

    def largest(self, row: Dim) -> Scalar:
        return self.maximum[row] * LN_2


@dataclass(frozen=True, slots=True)
class MatrixRows(Rows):
    """The rows of an item. Scores and weights of a block have two buffers, each with room for `block_rows` rows: while the kernel computes
    the softmax of some rows in one buffer, the unit multiplies other rows in the other buffer (matrix.py). An item that is a single token
    uses only the first buffer, and loads one panel at a time. Scores are [2, PANELS, block rows, PANEL], multiplied by log2(e)."""

    height: int  # number of rows of a product
    queries: Array  # [rows, depth]
    weights: Array  # [2, block rows, keys of a block]
    keys: Array  # [panels, depth / 2, 2 * PANEL]: panels of keys
    values: Array  # [value panels, keys / 2, 2 * PANEL]: the values of as many keys as `keys` has room for
    products: Array  # [value panels, block rows, PANEL]: products of weights and values
    rescale: Array  # [2, block rows in whole PAGEs]: per buffer, the factors of the earlier sums, 2^(old maximum - new maximum)

    @classmethod
    def allocate(cls, k: Kernel, item: Item, order: Order, height: int, block_rows: int, panels: int, *more: Array) -> Self:
        """Allocate the state, and configure the unit for products of `height` rows. There is room for `panels` panels of keys and of
        values. `more` are the fields of a subclass."""
        operands, count = item.operands, item.most_rows
        depth, value_panels = -(-operands.size // PANEL) * PANEL, -(-operands.value_size // PANEL)  # both rounded up to whole panels
        softmax = Base2Softmax(k.local("maximum", count), k.local("sums", count, PAGE), k.local("values", count, operands.parts, PAGE))
        cache, queries = Cache.open(k, operands), k.local("queries", count, depth, dtype=BF16)
        rows = cls(
            item,
            order,
            cache,
            softmax,
            k.local("scores", 2, PANELS, block_rows, PANEL),
            height,
            queries,
            k.local("weights", 2, block_rows, CUT.keys, dtype=BF16),
            k.local("keys", panels, depth // 2, 2 * PANEL, dtype=BF16),
            k.local("taken", value_panels, panels * PANEL // 2, 2 * PANEL, dtype=BF16),
            k.local("products", value_panels, block_rows, PANEL),
            k.local("rescale", 2, -(-block_rows // PAGE) * PAGE),
            *more,
        )
        k.tile(rows.product(fresh=True).configuration)
        rows.pad(k)
        return rows

    @property
    def depth(self) -> int:
        """The number of elements of a query, with the zeros at its end."""
        return self.queries.shape[1].const

    @property
    def softcap(self) -> float:
        return self.item.operands.node.softcap

    def product(self, *, fresh: bool, later: Load | None = None) -> AmxBf16:
        """Return the tile of a product. With `fresh`, the product overwrites the result instead of adding to it. With `later`, it also
        prefetches from that place on."""
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

    def load_query(self, k: Kernel, row: Dim, query: Callable[[Dim], Scalar]) -> None:
        """Load, scale and round a query. Fill its end with zeros, up to a whole number of steps of the unit. With a softcap, queries are
        not multiplied by log2(e), but scores are, after they are capped."""
        size, scale = self.cache.size, self.item.operands.node.scale
        scaled, factor = k.local("scaled", PAGE), scale if self.softcap else scale * LOG2_E
        with k.serial("c", size // PAGE) as c:
            with k.vector(PAGE) as lane:
                scaled[lane] = query(c * PAGE + lane) * factor
            k.tile(RoundBf16(), self.queries[row, c * PAGE], scaled[0])
        for at in range(size, self.depth, PAGE):
            with k.vector(PAGE) as lane:
                self.queries[row, at + lane] = 0.0

    # --- a block of a token --------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> Dim:
        """The number of rows of an item that is a token."""
        return self.item.kv_count * self.item.group

    def sharing(self, pages: Sequence[HeadPage]) -> tuple[list[HeadPage], Load]:
        """Divide the prefetches of the next two pages: the loads of this panel prefetch the first one, and the products of this panel the
        second one, so that memory does not wait for products. Return the pages of the panel, each with the half of the first next page that
        its load prefetches, and the place of the second next page."""
        first, second = (page.next_page for page in pages)
        assert first is not None and second is not None, pages
        parts = [replace(page, next_page=replace(first, part=v)) for v, page in enumerate(pages)]
        return parts, self.cache.stored[self.cache.layer, second.half, second.page, pages[0].kv_head, 0]

    def attend(self, k: Kernel, block: Block, part: Part) -> None:
        Rows.attend(self, k, block, part)
        self.add_products(k, FIRST, FIRST, self.num_rows)

    def multiply_keys(self, k: Kernel, pages: Sequence[HeadPage], count: int) -> None:
        pages, later = self.sharing(pages)
        self.load_keys(k, pages, FIRST)
        for at, _ in row_tiles(k, count, self.height):
            row = pages[0].row + at
            self.compute_scores(k, pages[0].slot // PANEL_PAGES, FIRST, row, row, later)

    def update_softmax(self, k: Kernel, block: Block, span: Span, part: Part) -> None:
        """Turn the scores of the token's rows for the whole block into weights, and begin the products of weights and values with 0."""
        self.cap(k, FIRST, self.num_rows)
        if part.seen is not None:
            self.hide(k, FIRST, FIRST, self.num_rows, block.start, WHOLE)
        self.weigh_block(k, FIRST, self.num_rows)
        with k.nest((self.products.shape[0], self.num_rows, PANEL_PAGES)) as (p, m, v), k.vector(PAGE) as lane:
            self.products[p, m, v * PAGE + lane] = 0.0

    def load_values(self, k: Kernel, pages: Sequence[HeadPage], seen: Seen | None) -> None:
        self.load_panel(k, self.sharing(pages)[0], FIRST, seen)

    def multiply_values(self, k: Kernel, block: Block, head: Head, pages: Sequence[HeadPage], part: Part) -> None:
        panel = pages[0].slot // PANEL_PAGES
        later = self.sharing(pages)[1] if self.cache.turned is None else None
        for at, _ in row_tiles(k, part.count, self.height):
            self.multiply_panels(k, head.row + at, Span(panel, panel + 1), FIRST, fresh=False, later=later)

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

    def compute_scores(self, k: Kernel, panel: Dim, place: Dim, query: Dim, row: Dim, later: Load | None = None) -> None:
        """Compute the scores of `height` rows for a panel of keys, in the first buffer. `query` is the first row of the queries, and `row`
        the first row of the scores. If `later` is not None, it is the place of a head's page to prefetch."""
        operands = self.scores[0, panel, row, 0], self.queries[query, 0], self.keys[place, 0, 0]
        ahead, share = ((), ()) if later is None else ((later,), (0, LINES))
        k.tile(self.product(fresh=True, later=later), *operands, *ahead, dims=(self.depth, self.depth, *share))

    # --- weights -------------------------------------------------------------------------------------------------------

    def cap(self, k: Kernel, buffer: Dim, count: Dim | int) -> None:
        """If the model caps scores, cap those of `count` rows, and multiply them by log2(e). Otherwise do nothing, because the queries were
        multiplied by log2(e)."""
        if self.softcap:
            with k.nest((count, PANELS, PANEL_PAGES)) as (m, panel, v), k.vector(PAGE) as lane:
                at, scores = v * PAGE + lane, self.scores
                scores[buffer, panel, m, at] = capped(scores[buffer, panel, m, at], self.softcap) * LOG2_E

    def hide(self, k: Kernel, first: Dim, buffer: Dim, count: Dim | int, start: Dim, span: Span) -> None:
        """Set scores of `count` rows, beginning with row `first`, to -inf where a row does not see a key of the panels of `span`. `start`
        is the position of the block's first key."""
        with k.serial("m", count) as m:
            seen = self.item.seen_by_row(k, first + m)
            with span.panels(k) as panel, k.serial("v", PANEL_PAGES) as v, k.vector(PAGE) as lane:
                at, scores = v * PAGE + lane, self.scores
                scores[buffer, panel, m, at] = seen.hide(start + panel * PANEL + at, scores[buffer, panel, m, at])

    def weigh_block(self, k: Kernel, first: Dim, count: Dim | int) -> None:
        """Turn the scores of `count` rows in the first buffer into weights, and add the weights to `sums`. Set `rescale` to the factors of
        the earlier sums. `first` is the first of these rows in the item; its scores are in row 0 of the buffer."""
        k.tile(SoftmaxRows(self.scores.shape[2].const, PANELS), *self.softmax_operands(FIRST, first), dims=(count,))

    def softmax_operands(self, buffer: Dim, first: Dim) -> tuple[Load, ...]:
        """Return the operands of the softmax of the rows in a buffer. The first of these rows is row `first` of the item."""
        of_block, softmax = (self.weights[buffer, 0, 0], self.scores[buffer, 0, 0, 0]), self.softmax
        return *of_block, softmax.maximum[first], softmax.sums[first, 0], self.rescale[buffer, 0]

    # --- values --------------------------------------------------------------------------------------------------------

    def load_panel(self, k: Kernel, panel: Sequence[HeadPage], place: Dim, seen: Seen | None) -> None:
        """Load the values of a panel of keys. Write zeros for keys that are not in `seen`; None means that all keys are seen."""
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

    def multiply_panels(
        self, k: Kernel, row: Dim, span: Span, place: Dim, *, fresh: bool, later: Load | None = None, buffer: Dim = FIRST
    ) -> None:
        """Multiply the weights that `height` rows give to the keys of the panels of `span` by the values of these keys, which are loaded
        from panel `place` of `values` on. If `later` is not None, it is the place of a head's page to prefetch, and `span` is one panel."""
        with k.serial("p", self.products.shape[0]) as p:
            operands = self.products[p, row, 0], self.weights[buffer, row, span.first * PANEL], self.values[p, place * (PANEL // 2), 0]
            ahead, share = ((), ()) if later is None else ((later,), (p * LINES, LINES))
            k.tile(self.product(fresh=fresh, later=later), *operands, *ahead, dims=(span.count * PANEL, CUT.keys, *share))

    def add_products(self, k: Kernel, first: Dim, buffer: Dim, count: Dim | int) -> None:
        """Rescale the weighted values of `count` rows, and add the products of the current block to them. `first` is the first of these
        rows in the item; its products are in row 0 of `products`."""
        with k.serial("m", count) as m:
            self.add_product(k, m, first + m, buffer)

    def add_product(self, k: Kernel, m: Dim, row: Dim, buffer: Dim) -> None:
        """Rescale the weighted values of a row, and add the products of the current block to them."""
        values = self.softmax.values
        with lanes(k, values) as (c, lane):
            product = self.products[c // PANEL_PAGES, m, c % PANEL_PAGES * PAGE + lane]
            values[row, c, lane] = fma(values[row, c, lane], self.rescale[buffer, m], product)
