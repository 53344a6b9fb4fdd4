"""Blocks of keys. A split of a sequence consists of blocks, a block of panels, and a panel of pages. A row is a query head of a token."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.attention.items import Item
from compiler.backends.cpu.schedule.attention.operands import Seen
from compiler.backends.cpu.schedule.attention.pages import HeadPage, NextPage
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.loops.write import Kernel
from compiler.ops.attention.kv_cache import KEYS, PAGE


@dataclass(frozen=True, slots=True)
class Cut:
    """The sizes of panels, blocks and splits. These sizes alone determine the order in which a row adds its keys, so the order does not
    depend on other rows."""

    panel_pages: int
    panels: int  # number of panels of a block
    blocks: int  # number of blocks of a split

    @property
    def pages(self) -> int:
        """The number of pages of a block."""
        return self.panels * self.panel_pages

    @property
    def panel(self) -> int:
        """The number of keys of a panel."""
        return self.panel_pages * PAGE

    @property
    def keys(self) -> int:
        """The number of keys of a block."""
        return self.pages * PAGE


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a block of keys that some row sees: panels `first` to `end` - 1."""

    first: Dim
    end: Dim

    @staticmethod
    def of(k: Kernel, start: Dim, seen: Seen, cut: Cut) -> Span:
        """Return the span of the block that begins at position `start`. Without a window, rows see the beginning of every block of which
        they see a key, so `first` is 0. If a block has one panel, the span is that panel."""
        if cut.panels == 1:
            return Span(Dim.of(0), Dim.of(1))
        first = k.let("first", dim_max(0, seen.low - start) // cut.panel) if seen.has_window else Dim.of(0)
        return Span(first, k.let("end", dim_min(cut.panels, ceil_div(seen.high + 1 - start, cut.panel)), cut.panels))

    @property
    def count(self) -> Dim:
        return self.end - self.first

    @contextmanager
    def panels(self, k: Kernel) -> Generator[Dim]:
        with each(k, self.count) as c:
            yield self.first + c

    def panels_apart(self, k: Kernel) -> Iterator[Span]:
        """Yield each panel as a span. The code that the caller's `for` emits becomes the body of a loop."""
        with self.panels(k) as panel:
            yield Span(panel, panel + 1)

    def pages(self, k: Kernel, panel_pages: int) -> Iterator[Dim]:
        """Yield the index, in the block, of each page of the span. The code that the caller's `for` emits becomes the body of a loop."""
        with self.panels(k) as panel:
            for v in range(panel_pages):
                yield panel * panel_pages + v


@contextmanager
def each(k: Kernel, count: Dim) -> Generator[Dim]:
    """Loop over the numbers below `count`. If `count` is the constant 1, write no loop."""
    if count.is_const and count.const == 1:
        yield Dim.of(0)
        return
    with k.serial("c", count) as c:
        yield c


@dataclass(frozen=True, slots=True)
class Block:
    """A block that some rows of an item see."""

    item: Item
    cut: Cut
    number: Dim  # the index of the block in the sequence
    span: Span

    @staticmethod
    def make(k: Kernel, item: Item, cut: Cut, number: Dim) -> Block:
        """Return block number `number` of the sequence, with the span of panels that the item sees."""
        return Block(item, cut, number, Span.of(k, number * cut.keys, item.seen, cut))

    @property
    def whole(self) -> Block:
        """The same block with all panels, for rows that see the whole block."""
        return replace(self, span=Span(Dim.of(0), Dim.of(self.cut.panels)))

    @property
    def start(self) -> Dim:
        """The position of the first key."""
        return self.number * self.cut.keys

    @property
    def end(self) -> Dim:
        """The position after the last key."""
        return self.start + self.cut.keys

    def pages(self, k: Kernel, first: Dim, count: int) -> list[HeadPage]:
        """Return `count` pages, beginning with the page at index `first` of the block, for the first kv head and the first row of the
        item."""
        found: list[HeadPage] = []
        for slot in (first + v for v in range(count)):
            start = (self.number * self.cut.pages + slot) * PAGE
            found.append(HeadPage(self.page(k, slot), slot, start, self.item.kv_first, Dim.of(0)))
        return found

    def panel(self, k: Kernel, number: Dim) -> list[HeadPage]:
        """Return the pages of a panel."""
        return self.pages(k, number * self.cut.panel_pages, self.cut.panel_pages)

    def page(self, k: Kernel, slot: Dim) -> Dim:
        """Return the number of the page, in the cache, that is at index `slot` of the block."""
        return self.item.operands.page(k, self.item.sequence, self.number * self.cut.pages + slot, self.item.seen)

    def prefetching(self, k: Kernel, half: int, pages: list[HeadPage]) -> list[HeadPage]:
        """Return `pages`, which are adjacent and of which the token reads the keys or the values (`half`), each with a page to prefetch:
        the pages that the token reads next. After the last keys of the block's span come its first values, and after its last values the
        first keys of the next block. If pages have only keys, the token does not read values from them, and the next keys are
        prefetched."""
        after, begin, end = pages[0].slot + len(pages), self.span.first * self.cut.panel_pages, self.span.end * self.cut.panel_pages
        is_last = dim_max(0, after + 1 - end)  # 1 if these pages are the last of the span, else 0
        if half == KEYS:
            is_last = is_last if self.item.operands.pages.has_values else Dim.of(0)
            half_after, after = is_last, after - is_last * (end - begin)
        else:
            half_after = 1 - is_last
        return [self.prefetching_page(k, half_after, page, after + v) for v, page in enumerate(pages)]

    def prefetching_page(self, k: Kernel, half: Dim, page: HeadPage, slot: Dim) -> HeadPage:
        """Return `page` with the page to prefetch while `page` is read: the keys or the values (`half`) of the page at index `slot`,
        counted from the beginning of this block. That page may be in a later block."""
        return replace(page, next_page=NextPage(half, self.page(k, slot)))
