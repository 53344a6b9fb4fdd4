"""The two ways to walk the blocks of a split: one token with all its heads, and a tile of tokens with the heads that share a kv head.

A token alone is bound by memory: it reads whole pages, all heads of them, the keys of STRETCH blocks and then their values, so that its
reads are two long streams where a sequence has neighbouring pages. A tile is bound by arithmetic: its rows share what a register holds.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.attention_rows import BLOCK, PAGES, HeadPage, NextHead, NextPage, Seen, row_tiles
from compiler.backends.cpu.schedule.attention_spec import SPLIT, AttentionSpec, Heads, Token, TokenTile
from compiler.backends.cpu.schedule.attention_vector import VectorUnit
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.write import Kernel
from compiler.ops.kv_cache import PAGE

STRETCH = 4  # blocks


@dataclass(frozen=True, slots=True)
class TokenWalk:
    """Some of a token's heads. Row `h` belongs to query head `h`."""

    spec: AttentionSpec
    unit: VectorUnit
    token: Token
    heads: Heads

    def write(self, k: Kernel) -> None:
        """Each page prefetches the one that is read after it: behind the last keys that is the first of the values, and behind those the
        first keys of the next stretch."""
        with stretches(k, self.token) as (first, count):
            num_pages = count * PAGES
            with k.serial("v", num_pages) as v:
                last = dim_max(0, v + 2 - num_pages)
                page = self.page(k, first, v, NextPage(last, first * PAGES + v + 1 - last * num_pages))
                self.scores(k, page)
            with k.serial("b", count) as b:
                block: list[HeadPage] = []
                for v in (b * PAGES + i for i in range(PAGES)):
                    last = dim_max(0, v + 2 - num_pages)
                    block.append(self.page(k, first, v, NextPage(1 - last, first * PAGES + v + 1)))
                self.weigh(k, block)
                for page in block:
                    self.values(k, page)

    def page(self, k: Kernel, first: Dim, v: Dim, after: NextPage) -> HeadPage:
        """The page at place `v` behind block `first`; `after.page` is an index of the sequence's page table."""
        index, sequence = first * PAGES + v, self.token.sequence
        page = self.spec.page(k, sequence, self.seen_page(index))
        after = replace(after, page=self.spec.page(k, sequence, self.seen_page(after.page)))
        return HeadPage(Dim.of(0), Dim.of(0), page, v, index * PAGE, after)

    def seen_page(self, index: Dim) -> Dim:
        return self.spec.seen_page(index, self.token.low, self.token.high)

    def scores(self, k: Kernel, page: HeadPage) -> None:
        at_once = self.spec.kv_heads_at_once
        with self.heads.each_kv(k, at_once) as kv:
            for row, n in row_tiles(k, self.spec.group, self.unit.most):
                self.unit.scores(k, [self.of_head(page, kv + i, row) for i in range(at_once)], n, self.seen)

    def weigh(self, k: Kernel, block: list[HeadPage]) -> None:
        with self.heads.each_kv(k) as kv, k.serial("m", self.spec.group) as m:
            pages = [self.of_head(page, kv, Dim.of(0)) for page in block]
            self.unit.weigh(k, pages[0].row + m, pages)

    def values(self, k: Kernel, page: HeadPage) -> None:
        with self.heads.each_kv(k) as kv:
            for row, n in row_tiles(k, self.spec.group, self.unit.tile.rows):
                self.unit.values(k, [self.of_head(page, kv, row)], n, self.seen)

    @property
    def seen(self) -> Seen:
        return self.spec.seen(self.token)

    def of_head(self, page: HeadPage, kv_head: Dim, row: Dim) -> HeadPage:
        return replace(page, row=kv_head * self.spec.group + row, kv_head=kv_head, next_head=self.next_head(kv_head))

    def next_head(self, kv_head: Dim) -> NextHead | None:
        """Pairs are multiplied faster than pages come from memory, so more is prefetched at a time than can be on its way, and the rest is
        dropped: it is prefetched again, half of the heads before it is read."""
        if not self.spec.in_pairs:
            return None
        first, count = self.heads.first, self.heads.count
        later = kv_head + count // 2
        wraps = dim_min(1, dim_max(0, later + 1 - (first + count)))
        return NextHead(later - wraps * count, wraps)


@dataclass(frozen=True, slots=True)
class TileWalk:
    spec: AttentionSpec
    unit: VectorUnit
    tile: TokenTile

    def write(self, k: Kernel) -> None:
        """Blocks that all tokens see whole are walked together. Blocks that some tokens see in part or not at all each token walks for
        itself."""
        spec, tile = self.spec, self.tile
        first_block, end_block = tile.split * SPLIT, tile.split * SPLIT + SPLIT
        begin = k.let("begin", dim_min(dim_max(ceil_div(spec.low(tile.most), BLOCK), first_block), end_block))
        end = k.let("end", dim_max(begin, dim_min((tile.least + 1) // BLOCK, end_block)))
        if spec.window:
            with tile.tokens(k) as (token, row):
                self.edge(k, token, row, token.begin, dim_min(token.end, begin))
        with k.scope():
            sequence = spec.sequence(k, tile.first)
            with k.serial("b", end - begin) as b:
                block = self.block(k, sequence, begin + b)
                self.step(k, Dim.of(0), spec.tile_tokens * spec.group, block, None)
        with tile.tokens(k) as (token, row):
            self.edge(k, token, row, dim_max(token.begin, end), token.end)

    def edge(self, k: Kernel, token: Token, row: Dim, begin: Dim, end: Dim) -> None:
        """Blocks that a token may see in part."""
        seen = self.spec.seen(token)
        begin = k.let("begin", begin)
        with k.serial("b", end - begin) as b:
            self.step(k, row, self.spec.group, self.block(k, token.sequence, begin + b, seen), seen)

    def block(self, k: Kernel, sequence: Dim, b: Dim, seen: Seen | None = None) -> list[HeadPage]:
        pages: list[HeadPage] = []
        for v in range(PAGES):
            index = b * PAGES + v
            page = self.spec.page(k, sequence, index if seen is None else self.spec.seen_page(index, seen.low, seen.high))
            pages.append(HeadPage(Dim.of(0), self.tile.kv_head, page, Dim.of(v), index * PAGE))
        return pages

    def step(self, k: Kernel, first: Dim, count: int, block: list[HeadPage], seen: Seen | None) -> None:
        """A block for `count` rows from `first` on."""
        shape = self.unit.tile
        for row, n in row_tiles(k, count, shape.rows):
            pages = [replace(page, row=first + row) for page in block]
            for v in range(0, PAGES, shape.vectors):
                self.unit.scores(k, pages[v : v + shape.vectors], n, seen)
        with k.serial("m", count) as m:
            self.unit.weigh(k, first + m, block)
        for row, n in row_tiles(k, count, shape.rows):
            self.unit.values(k, [replace(page, row=first + row) for page in block], n, seen)


@contextmanager
def stretches(k: Kernel, token: Token) -> Generator[tuple[Dim, Dim]]:
    """The blocks of a token's split, STRETCH at a time: the first one, and how many."""
    with k.serial("x", ceil_div(token.end - token.begin, STRETCH)) as x:
        first = token.begin + x * STRETCH
        yield first, k.let("count", dim_min(STRETCH, token.end - first))
