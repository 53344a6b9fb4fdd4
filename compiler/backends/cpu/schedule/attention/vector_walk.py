"""The two walks over the blocks of a split: a single token with all its heads, and a tile of tokens with the heads that share a kv head.

Memory limits a single token. It reads whole pages with all their heads, first the keys of STRETCH blocks and then their values. If the
pages of the sequence are adjacent, these are two long streams. Arithmetic limits a tile: its rows share keys and values in registers.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.attention.operands import SPLIT, Heads, PagedOperands, Token, TokenTile
from compiler.backends.cpu.schedule.attention.rows import BLOCK, PAGES, HeadPage, NextHead, NextPage, VisibleRange, row_tiles
from compiler.backends.cpu.schedule.attention.vector import VectorUnit
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.loops.write import Kernel
from compiler.ops.attention.kv_cache import PAGE

STRETCH = 4  # number of blocks whose keys a single token reads before their values


@dataclass(frozen=True, slots=True)
class TokenWalk:
    """Writes the walk of some heads of a token over the blocks of a split. Row `h` is query head `h`."""

    operands: PagedOperands
    unit: VectorUnit
    token: Token
    heads: Heads

    def write(self, k: Kernel) -> None:
        """Write the walk. While it reads a page, it prefetches the page that it reads next: after the last keys of a stretch the first
        values of the stretch, and after its last values the first keys of the next stretch. If pages have only keys, it does not read
        values, and prefetches the first keys of the next stretch after the last keys."""
        with stretches(k, self.token) as (first, count):
            num_pages = count * PAGES
            with k.serial("v", num_pages) as v:
                last = dim_max(0, v + 2 - num_pages) if self.operands.pages.has_values else Dim.of(0)
                page = self.page(k, first, v, NextPage(last, first * PAGES + v + 1 - last * num_pages))
                self.scores(k, page)
            with k.serial("b", count) as b:
                block: list[HeadPage] = []
                for v in (b * PAGES + i for i in range(PAGES)):
                    last = dim_max(0, v + 2 - num_pages)
                    block.append(self.page(k, first, v, NextPage(1 - last, first * PAGES + v + 1)))
                self.update_softmax(k, block)
                for page in block:
                    self.values(k, page)

    def page(self, k: Kernel, first: Dim, v: Dim, after: NextPage) -> HeadPage:
        """Return page `v`, counted from the first page of block `first`. `after.page` is an index of the sequence's page table."""
        index, sequence = first * PAGES + v, self.token.sequence
        page = self.operands.page(k, sequence, self.visible_page(index))
        after = replace(after, page=self.operands.page(k, sequence, self.visible_page(after.page)))
        return HeadPage(Dim.of(0), Dim.of(0), page, v, index * PAGE, after)

    def visible_page(self, index: Dim) -> Dim:
        return self.operands.visible_page(index, self.token.low, self.token.high)

    def scores(self, k: Kernel, page: HeadPage) -> None:
        at_once = self.operands.kv_heads_at_once
        with self.heads.each_kv(k, at_once) as kv:
            for row, n in row_tiles(k, self.operands.group, self.unit.accumulators):
                self.unit.scores(k, [self.of_head(page, kv + i, row) for i in range(at_once)], n, self.visible)

    def update_softmax(self, k: Kernel, block: list[HeadPage]) -> None:
        with self.heads.each_kv(k) as kv, k.serial("m", self.operands.group) as m:
            pages = [self.of_head(page, kv, Dim.of(0)) for page in block]
            self.unit.update_softmax(k, pages[0].row + m, pages)

    def values(self, k: Kernel, page: HeadPage) -> None:
        with self.heads.each_kv(k) as kv:
            self.unit.turn(k, self.of_head(page, kv, Dim.of(0)))
            for row, n in row_tiles(k, self.operands.group, self.unit.tile.rows):
                self.unit.values(k, [self.of_head(page, kv, row)], n, self.visible)

    @property
    def visible(self) -> VisibleRange:
        return self.operands.visible(self.token)

    def of_head(self, page: HeadPage, kv_head: Dim, row: Dim) -> HeadPage:
        return replace(page, row=kv_head * self.operands.group + row, kv_head=kv_head, next_head=self.next_head(kv_head))

    def next_head(self, kv_head: Dim) -> NextHead | None:
        """Return the head that is prefetched a second time. Pairs are multiplied faster than memory delivers pages, so more prefetches are
        pending than the CPU can track, and it drops some. Therefore every head is prefetched again, `count` / 2 heads before it is read."""
        if not self.operands.in_pairs:
            return None
        first, count = self.heads.first, self.heads.count
        later = kv_head + count // 2
        wraps = dim_min(1, dim_max(0, later + 1 - (first + count)))
        return NextHead(later - wraps * count, wraps)


@dataclass(frozen=True, slots=True)
class TileWalk:
    operands: PagedOperands
    unit: VectorUnit
    tile: TokenTile

    def write(self, k: Kernel) -> None:
        """Write the walk. The rows of all tokens share the blocks that all tokens see in full. Each token computes the blocks before and
        after the shared ones separately."""
        operands, tile = self.operands, self.tile
        first_block, end_block = tile.split * SPLIT, tile.split * SPLIT + SPLIT
        begin = k.let("begin", dim_min(dim_max(ceil_div(operands.low(tile.last_position), BLOCK), first_block), end_block))
        end = k.let("end", dim_max(begin, dim_min((tile.first_position + 1) // BLOCK, end_block)))
        if operands.node.window:
            with tile.tokens(k) as (token, row):
                self.edge(k, token, row, token.begin, dim_min(token.end, begin))
        with k.scope():
            sequence = operands.sequence(k, tile.first)
            with k.serial("b", end - begin) as b:
                block = self.block(k, sequence, begin + b)
                self.step(k, Dim.of(0), operands.tile_tokens * operands.group, block, None)
        with tile.tokens(k) as (token, row):
            self.edge(k, token, row, dim_max(token.begin, end), token.end)

    def edge(self, k: Kernel, token: Token, row: Dim, begin: Dim, end: Dim) -> None:
        """Compute blocks of which the token may see only a part."""
        visible = self.operands.visible(token)
        begin = k.let("begin", begin)
        with k.serial("b", end - begin) as b:
            self.step(k, row, self.operands.group, self.block(k, token.sequence, begin + b, visible), visible)

    def block(self, k: Kernel, sequence: Dim, b: Dim, visible: VisibleRange | None = None) -> list[HeadPage]:
        pages: list[HeadPage] = []
        for v in range(PAGES):
            index = b * PAGES + v
            page = self.operands.page(
                k, sequence, index if visible is None else self.operands.visible_page(index, visible.low, visible.high)
            )
            pages.append(HeadPage(Dim.of(0), self.tile.kv_head, page, Dim.of(v), index * PAGE))
        return pages

    def step(self, k: Kernel, first: Dim, count: int, block: list[HeadPage], visible: VisibleRange | None) -> None:
        """Add a block to the softmax of `count` rows, beginning with row `first`."""
        shape = self.unit.tile
        for row, n in row_tiles(k, count, shape.rows):
            pages = [replace(page, row=first + row) for page in block]
            for v in range(0, PAGES, shape.vectors):
                self.unit.scores(k, pages[v : v + shape.vectors], n, visible)
        with k.serial("m", count) as m:
            self.unit.update_softmax(k, first + m, block)
        for page in block:
            self.unit.turn(k, page)
        for row, n in row_tiles(k, count, shape.rows):
            self.unit.values(k, [replace(page, row=first + row) for page in block], n, visible)


@contextmanager
def stretches(k: Kernel, token: Token) -> Generator[tuple[Dim, Dim]]:
    """Loop over the blocks of a token in a split, STRETCH at a time. Yield the first block and the number of blocks."""
    with k.serial("x", ceil_div(token.end - token.begin, STRETCH)) as x:
        first = token.begin + x * STRETCH
        yield first, k.let("count", dim_min(STRETCH, token.end - first))
