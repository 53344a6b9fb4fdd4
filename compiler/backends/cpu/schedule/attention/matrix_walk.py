"""The two walks of vector_walk.py over the blocks of a split, on a matrix unit.

A single token reads the keys of a block for all its heads, and then the values. Tiles load a block once, and compute it for all their
rows, `height` rows at a time. A row gives weight 0 to the keys that it does not see, so their values matter only if one is infinite or NaN.
If a block has such a value, the block's values are multiplied for each row separately.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from compiler.backends.cpu.schedule.attention.matrix import BLOCK, FIRST, PANEL, PANEL_PAGES, PANELS, SPLIT, WHOLE, MatrixUnit
from compiler.backends.cpu.schedule.attention.operands import I64, Heads, PagedOperands, Token, TokenTile
from compiler.backends.cpu.schedule.attention.rows import HeadPage, NextPage, Span, VisibleRange
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.loops.functions import ReduceFn
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.write import Array, Kernel, equal, less_equal
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of a sequence, of which some rows see positions `low` to `high`."""

    operands: PagedOperands
    sequence: Dim
    number: Dim
    low: Dim
    high: Dim
    span: Span

    @staticmethod
    def make(k: Kernel, operands: PagedOperands, sequence: Dim, number: Dim, low: Dim, high: Dim) -> _Block:
        span = Span.seen(k, number * BLOCK, low, high, PANEL, PANELS, has_window=bool(operands.node.window))
        return _Block(operands, sequence, number, low, high, span)

    @property
    def start(self) -> Dim:
        return self.number * BLOCK

    def panel(self, k: Kernel, number: Dim, kv_head: Dim) -> list[HeadPage]:
        """Return the pages of a panel."""
        first = self.number * (PANELS * PANEL_PAGES) + number * PANEL_PAGES
        return [HeadPage(Dim.of(0), kv_head, self.page(k, first + v), Dim.of(0), (first + v) * PAGE) for v in range(PANEL_PAGES)]

    def page(self, k: Kernel, index: Dim) -> Dim:
        return self.operands.page(k, self.sequence, self.operands.visible_page(index, self.low, self.high))

    def seen_whole(self, low: Dim, high: Dim) -> Scalar:
        """Return whether a row that attends to positions `low` to `high` sees the whole block."""
        whole = less_equal(self.start + (BLOCK - 1), high)
        return whole & less_equal(low, self.start) if self.operands.node.window else whole


@dataclass(frozen=True, slots=True)
class MatrixTokenWalk:
    """Writes the walk of some heads of a token over the blocks of a split. Row `h` is query head `h`."""

    operands: PagedOperands
    unit: MatrixUnit
    token: Token
    heads: Heads

    def write(self, k: Kernel) -> None:
        """Write the walk. It reads all keys of a block, then all values of the block, a panel at a time. Meanwhile it prefetches the panel
        that it reads next: of each head, the first page while it loads the head's pages, and the second page while it multiplies. So
        memory does not wait for products."""
        operands, unit, token, heads, group = self.operands, self.unit, self.token, self.heads, self.operands.group
        first, count = heads.first * group, heads.count * group
        with k.serial("b", token.end - token.begin) as b:
            block = _Block.make(k, operands, token.sequence, token.begin + b, token.low, token.high)
            span = block.span
            with span.panels(k) as panel:
                last = dim_max(0, panel + 2 - span.end) if operands.pages.has_values else Dim.of(0)
                pages = self.panel(k, block, panel, NextPage(last, (panel + 1 - last * span.count) * PANEL_PAGES))
                with heads.each_kv(k) as kv:
                    unit.load_keys(k, prefetching_one(of_head(pages, kv)), Dim.of(0))
                    with self.products(k, kv) as row:
                        unit.multiply_keys(k, panel, Dim.of(0), row, row - first, self.later(pages, kv))
            unit.cap(k, FIRST, count)
            with k.when(block.seen_whole(token.low, token.high)):
                unit.update_softmax(k, first, count)
                self.add_values(k, block, WHOLE, None)
            with k.orelse():
                unit.hide(k, FIRST, count, lambda _: operands.visible(token), block.start)
                unit.update_softmax(k, first, count)
                self.add_values(k, block, span, (token.low, token.high))

    def add_values(self, k: Kernel, block: _Block, span: Span, seen: tuple[Dim, Dim] | None) -> None:
        """Add the weighted values of a block to the rows. `seen` is None if the token sees the whole block."""
        unit, heads, first = self.unit, self.heads, self.heads.first * self.operands.group
        unit.clear_products(k, heads.count * self.operands.group)
        with span.panels(k) as panel:
            last = dim_max(0, panel + 2 - span.end)
            pages = self.panel(k, block, panel, NextPage(1 - last, (panel + 1 + last * (PANELS - 1 - panel)) * PANEL_PAGES))
            with heads.each_kv(k) as kv:
                unit.load_values(k, prefetching_one(of_head(pages, kv)), Dim.of(0), seen)
                later = self.later(pages, kv) if self.operands.pages.has_values else None
                with self.products(k, kv) as row:
                    unit.multiply_values(k, row - first, Span(panel, panel + 1), Dim.of(0), fresh=False, later=later)
        with k.serial("m", heads.count * self.operands.group) as m:
            unit.add(k, m, first + m)

    def later(self, pages: list[HeadPage], kv_head: Dim) -> Load:
        """Return the place of the second page of the panel that is read next."""
        after = pages[1].next_page
        assert after is not None, pages
        return self.unit.cache[self.unit.layer, after.half, after.page, kv_head, 0]

    def panel(self, k: Kernel, block: _Block, number: Dim, after: NextPage) -> list[HeadPage]:
        """Return the pages of a panel. `after` is the first page of the panel that is prefetched, counted from the block's first page."""
        pages, first = block.panel(k, number, Dim.of(0)), block.number * (PANELS * PANEL_PAGES) + after.page
        return [replace(page, next_page=NextPage(after.half, block.page(k, first + v))) for v, page in enumerate(pages)]

    def products(self, k: Kernel, kv: Dim) -> AbstractContextManager[Dim]:
        """Loop over the products of the rows that share a kv head. Yield the first row of each."""
        return rows_of_products(k, kv * self.operands.group, self.operands.group, self.unit.height)


@dataclass(frozen=True, slots=True)
class MatrixTileWalk:
    operands: PagedOperands
    unit: MatrixUnit
    tile: TokenTile
    reach: Array  # [products, 2]: the smallest and the largest position of the tokens of each product

    @staticmethod
    def make(k: Kernel, operands: PagedOperands, unit: MatrixUnit, tile: TokenTile) -> MatrixTileWalk:
        most = unit.rows.queries.shape[0] // unit.height
        return MatrixTileWalk(operands, unit, tile, k.local("reach", most, 2, dtype=I64))

    def write(self, k: Kernel) -> None:
        operands, tile = self.operands, self.tile
        self.find_reach(k)
        low = k.let("low", operands.low(tile.first_position))
        begin = k.let("begin", dim_max(low // BLOCK, tile.split * SPLIT))
        end = dim_min(tile.last_position // BLOCK + 1, tile.split * SPLIT + SPLIT)
        sequence = operands.sequence(k, tile.first)
        with k.serial("b", end - begin) as b:
            block = _Block.make(k, operands, sequence, begin + b, low, tile.last_position)
            with k.serial("c", block.span.end) as panel:
                self.unit.load_keys(k, self.panel(k, block, panel, KEYS), panel)
            self.block(k, block, block.seen_whole(operands.low(tile.last_position), tile.first_position))

    def block(self, k: Kernel, block: _Block, whole: Scalar) -> None:
        """Load the values of a block, and add the block to the rows. `whole` says whether all rows see the whole block."""
        unit, infinite = self.unit, k.local("infinite", PAGE)
        with k.vector(PAGE) as lane:
            infinite[lane] = 0.0
        with k.when(whole), WHOLE.panels(k) as panel:
            unit.load_values(k, self.panel(k, block, panel, VALUES), panel, None)
        with k.orelse():
            self.load_values(k, block, Span(Dim.of(0), block.span.end), block.low, block.high)
            unit.look_for_infinite(k, infinite, self.seen_by_some(block))
        with k.when(equal(infinite[0], 0.0)):
            seen = partial(self.seen_panels, k, block)
            unit.attend(k, self.num_products, seen, lambda io, buffer: self.prepare(k, block, io, buffer, whole))
        with k.orelse(), k.serial("io", self.num_products) as io:
            self.one_by_one(k, block, io)

    def prepare(self, k: Kernel, block: _Block, io: Dim, buffer: Dim, whole: Scalar) -> None:
        self.unit.cap(k, buffer, self.unit.height)
        with k.when(~whole):
            first, span = io * self.unit.height, self.partly_seen(k, block, io)
            self.unit.hide(k, buffer, self.unit.height, lambda m: self.visible(k, first + m), block.start, span)

    def one_by_one(self, k: Kernel, block: _Block, io: Dim) -> None:
        """Add a block to the rows of a product, with the values that each of them sees."""
        unit, first = self.unit, io * self.unit.height
        with k.serial("c", block.span.end) as panel:
            unit.multiply_keys(k, panel, panel, first, FIRST)
        unit.cap(k, FIRST, unit.height)
        unit.hide(k, FIRST, unit.height, lambda m: self.visible(k, first + m), block.start)
        unit.update_softmax(k, first, unit.height)
        with k.serial("m", unit.height) as m:
            visible = self.visible(k, first + m)
            self.load_values(k, block, WHOLE, visible.low, visible.high)
            unit.multiply_values(k, FIRST, WHOLE, FIRST, fresh=True)
            unit.add(k, m, first + m)

    def find_reach(self, k: Kernel) -> None:
        """Store the smallest and the largest position of the tokens of each product."""
        height, group = self.unit.height, self.operands.group
        with k.serial("io", self.num_products) as io:
            first, last = io * height // group, (io * height + (height - 1)) // group
            for end, fn in enumerate((ReduceFn.MIN, ReduceFn.MAX)):
                token = self.operands.token_of(self.tile.first, first)
                self.reach[io, end] = self.operands.extreme_position(token, last - first + 1, fn)

    def seen_panels(self, k: Kernel, block: _Block, io: Dim) -> Dim:
        """Return how many panels of a block the rows of a product see, but at least one."""
        last = k.let("last", self.reach[io, 1])
        return dim_min(block.span.end, ceil_div(dim_max(1, last + 1 - block.start), PANEL))

    def partly_seen(self, k: Kernel, block: _Block, io: Dim) -> Span:
        """Return the span of the panels that the rows of a product see, without those that all of them see whole. With a window, return all
        panels that they see."""
        end = self.seen_panels(k, block, io)
        if self.operands.node.window:
            return Span(Dim.of(0), end)
        first = k.let("first", self.reach[io, 0])
        return Span(dim_min(end, dim_max(0, first + 1 - block.start) // PANEL), end)

    def seen_by_some(self, block: _Block) -> list[tuple[Dim, Dim]]:
        """Return the ranges of keys that only some rows see: the first and the last key, counted from the beginning of the block."""
        tile = self.tile
        ranges = [(tile.first_position + 1, tile.last_position)]
        if self.operands.node.window:
            ranges.append((block.low, self.operands.low(tile.last_position) - 1))
        return [(dim_max(0, low - block.start), dim_min(BLOCK - 1, high - block.start)) for low, high in ranges]

    def panel(self, k: Kernel, block: _Block, number: Dim, half: int) -> list[HeadPage]:
        """Return the pages of a panel. Each names the page to prefetch: that of the same panel in the next block."""
        pages, after = block.panel(k, number, self.tile.kv_head), (block.number + 1) * (PANELS * PANEL_PAGES) + number * PANEL_PAGES
        return [replace(page, next_page=NextPage(Dim.of(half), block.page(k, after + v))) for v, page in enumerate(pages)]

    def load_values(self, k: Kernel, block: _Block, span: Span, low: Dim, high: Dim) -> None:
        with span.panels(k) as panel:
            self.unit.load_values(k, block.panel(k, panel, self.tile.kv_head), panel, (low, high))

    @property
    def num_products(self) -> Dim:
        return self.tile.num_tokens * self.operands.group // self.unit.height

    def visible(self, k: Kernel, row: Dim) -> VisibleRange:
        position = self.operands.position(k, self.operands.token_of(self.tile.first, row // self.operands.group))
        return VisibleRange(self.operands.low(position), position, bool(self.operands.node.window))


# --- helpers -----------------------------------------------------------------------------------------------------------


@contextmanager
def rows_of_products(k: Kernel, first: Dim, count: int, height: int) -> Generator[Dim]:
    """Loop over products of `height` rows that cover `count` rows, beginning with row `first`. Yield the first row of each."""
    with k.serial("io", count // height) as io:
        yield first + io * height


def prefetching_one(panel: list[HeadPage]) -> list[HeadPage]:
    """Return a panel whose pages prefetch one page together: the one that the panel's first page names. Each prefetches a part of it."""
    first = panel[0].next_page
    assert first is not None, panel
    return [replace(page, next_page=replace(first, part=v)) for v, page in enumerate(panel)]


def of_head(panel: list[HeadPage], kv_head: Dim) -> list[HeadPage]:
    return [replace(page, kv_head=kv_head) for page in panel]
