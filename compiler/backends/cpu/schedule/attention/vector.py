"""Attention on vectors: pages of floats, and pages of bytes where integers do not fit.

Register tiles of several rows share the keys and values that they load. Every score adds its products in the order of elements, and every
sum adds values in the order of keys (vector_products.py). So a row has the same bits whatever other rows are in the tile.

Memory limits a single token. It reads whole pages with all their heads, first the keys of a block and then its values. If the pages of the
sequence are adjacent, these are two long streams. Arithmetic limits a tile: its rows share keys and values in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.attention.blocks import Block, Cut
from compiler.backends.cpu.schedule.attention.items import Item, row_tiles, tokens_of_tile
from compiler.backends.cpu.schedule.attention.operands import PagedOperands
from compiler.backends.cpu.schedule.attention.pages import F32, Cache, HeadPage, NextHead
from compiler.backends.cpu.schedule.attention.seen import Seen
from compiler.backends.cpu.schedule.attention.softmax import OnlineSoftmax
from compiler.backends.cpu.schedule.attention.unit import Unit
from compiler.backends.cpu.schedule.attention.vector_products import F32Products, KeyStep, PairProducts
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, cast
from compiler.machine.products import ProductTiles, TileShape
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES
from compiler.ops.attention.plain import capped

PAGES = 2  # number of pages whose softmax is computed at once
SPLIT = 16  # number of pages of a split
STRETCH = 4  # number of panels whose keys a token reads before their values
TOKEN_CUT = Cut(PAGES, STRETCH, SPLIT // (PAGES * STRETCH))
TILE_CUT = Cut(PAGES, 1, SPLIT // PAGES)


@dataclass(frozen=True, slots=True)
class Vectors:
    """The unit: which instructions of the target multiply."""

    operands: PagedOperands
    shape: TileShape
    steps: int  # maximum number of unrolled steps of a product
    in_pairs: bool  # whether products multiply pairs of bf16

    @staticmethod
    def of(operands: PagedOperands, tiles: ProductTiles) -> Vectors:
        """Return the instructions. They multiply pairs of bf16 where that is faster than f32."""
        in_pairs = tiles.pairs is not None and not tiles.pairs.on_matrix_unit and operands.fits_pairs
        return Vectors(operands, tiles.attention.shape, tiles.attention.steps, in_pairs)

    @property
    def unit(self) -> Unit:
        return Unit(SPLIT, tokens_of_tile(self.operands, self.shape.rows), self.rows, heads_at_once=self.heads_at_once)

    @property
    def accumulators(self) -> int:
        """The number of accumulators in a register tile."""
        return self.shape.rows * self.shape.vectors

    @property
    def heads_at_once(self) -> int:
        """The number of kv heads whose scores a token computes at once. Several heads hide the latency of additions of floats."""
        count, kv_heads, group = 1, self.operands.kv_heads, self.operands.group
        while kv_heads % (2 * count) == 0 and 2 * count * group <= self.accumulators // 2:
            count *= 2
        return count

    def rows(self, k: Kernel, item: Item) -> VectorRows:
        operands, count = self.operands, item.most_rows
        factors, cut = DType.BF16 if self.in_pairs else F32, TILE_CUT if item.is_tile else TOKEN_CUT
        cache = Cache.open(k, operands)
        queries, scores = k.local("queries", count, operands.size, dtype=factors), k.local("scores", count, cut.pages, PAGE)
        softmax = OnlineSoftmax.allocate(k, count, operands.parts, operands.width)
        if self.in_pairs:
            products = PairProducts(cache, queries, k.local("weights", count, cut.pages, PAGE, dtype=factors))
        else:
            products = F32Products(cache, queries, scores)
        return VectorRows(self, item, cache, softmax, cut, scores, products)


@dataclass(frozen=True, slots=True)
class VectorRows:
    vectors: Vectors
    item: Item
    cache: Cache
    softmax: OnlineSoftmax
    cut: Cut
    scores: Array  # [rows, pages of a block, PAGE]
    products: F32Products | PairProducts

    def load_query(self, k: Kernel, row: Dim, query: Callable[[Dim], Scalar]) -> None:
        width, queries = self.vectors.operands.width, self.products.queries
        with k.serial("c", self.cache.size // width) as c, k.vector(width) as lane:
            at = c * width + lane
            queries[row, at] = cast(query(at) * self.vectors.operands.node.scale, queries.dtype)

    def add(self, k: Kernel, block: Block) -> None:
        """Add a block. A value is multiplied only if the row sees its key, because the value of any other key may be NaN, and 0 * NaN is
        NaN. So the rows of a tile are multiplied together if all see the whole block; otherwise each token is computed separately."""
        item = self.item
        if not item.is_tile:
            self.attend(k, block, Dim.of(0), item.group, item.seen)
            return
        with k.when(~item.seen_by_all.lacks(block.start, block.end)):
            self.attend(k, block, Dim.of(0), item.rows_per_kv.const, None)
        with k.orelse(), item.tokens(k) as token, k.when(token.seen.overlaps(block.start, block.end)):
            self.attend(k, block, token.row, item.group, token.seen)

    def attend(self, k: Kernel, block: Block, first: Dim, count: int, seen: Seen | None) -> None:
        """Add a block to `count` rows of each kv head, beginning with row `first` of the head. If `seen` is None, they see the whole block.
        A token reads one page with all its heads after the other; a tile reads the pages of one head together."""
        vectors, item = self.vectors, self.item
        at_once, heads = (PAGES, 1) if item.is_tile else (1, vectors.heads_at_once)
        in_registers = min(at_once, vectors.shape.vectors)
        with k.serial("v", block.span.count * (PAGES // at_once)) as v:
            pages = self.read(k, block, KEYS, block.span.first * PAGES + v * at_once, at_once)
            with item.each_kv(k, heads) as (kv, row):
                for at, n in row_tiles(k, count, vectors.accumulators // (in_registers * heads)):
                    places = [self.of_head(page, kv + h, row + first + h * item.group + at) for page in pages for h in range(heads)]
                    for i in range(0, len(places), in_registers * heads):
                        self.multiply_keys(k, places[i : i + in_registers * heads], n)
        with block.span.panels(k) as panel:
            pages = self.read(k, block, VALUES, panel * PAGES, PAGES)
            with item.each_kv(k) as (kv, row), k.serial("m", count) as m:
                self.update_softmax(k, row + first + m, block, panel, [self.of_head(page, kv, row) for page in pages], seen)
            for some in [pages] if item.is_tile else [[page] for page in pages]:
                with item.each_kv(k) as (kv, row):
                    for page in some:
                        self.cache.turn(k, self.of_head(page, kv, row))
                    for at, n in row_tiles(k, count, vectors.shape.rows):
                        self.multiply_values(k, [self.of_head(page, kv, row + first + at) for page in some], n, seen)

    # --- reading pages -------------------------------------------------------------------------------------------------

    def read(self, k: Kernel, block: Block, half: int, first: Dim, count: int) -> list[HeadPage]:
        """Return pages of a block. A token prefetches the page after each."""
        if self.item.is_tile:
            return block.pages(k, first, count)
        return [page for v in range(count) for page in block.prefetching(k, half, block.pages(k, first + v, 1))]

    def of_head(self, page: HeadPage, kv_head: Dim, row: Dim) -> HeadPage:
        return replace(page, row=row, kv_head=kv_head, next_head=self.next_head(kv_head))

    def next_head(self, kv_head: Dim) -> NextHead | None:
        """Return the head that is prefetched a second time. Pairs are multiplied faster than memory delivers pages, so more prefetches are
        pending than the CPU can track, and it drops some. Therefore every head is prefetched again, `count` / 2 heads before it is read."""
        if not self.vectors.in_pairs:
            return None
        first, count = self.item.kv_first, self.item.kv_count
        later = kv_head + count // 2
        wraps = dim_min(1, dim_max(0, later + 1 - (first + count)))
        return NextHead(later - wraps * count, wraps)

    # --- scores and weights --------------------------------------------------------------------------------------------

    def multiply_keys(self, k: Kernel, pages: Sequence[HeadPage], n: int) -> None:
        """Compute the scores of `n` rows for each page."""
        products, step = self.products, self.products.step
        unrolled = step * next(u for u in (self.vectors.steps, 2, 1) if self.cache.size % (u * step) == 0)
        with k.scope():
            score = k.local("score", len(pages), n, PAGE)
            for v in range(len(pages)):
                with k.unroll("m", n) as m, k.vector(PAGE) as lane:
                    score[v, m, lane] = 0.0
            with k.serial("r", self.cache.size // unrolled) as r:
                for page in pages:
                    self.cache.prefetch(k, page, KEYS, r * (unrolled * PAGE), unrolled * PAGE)
                for u in range(0, unrolled, step):
                    products.multiply_keys(k, pages, n, r * unrolled + u, score)
            for v, page in enumerate(pages):
                with k.unroll("m", n) as m, k.vector(PAGE) as lane:
                    self.scores[page.row + m, page.slot, lane] = self.finished(page, score[v, m, lane], lane)

    def finished(self, page: HeadPage, score: Scalar, lane: Dim) -> Scalar:
        if self.cache.scales is not None:
            score = score * self.cache.scale(page, KEYS, lane)
        return capped(score, self.vectors.operands.node.softcap)

    def update_softmax(self, k: Kernel, row: Dim, block: Block, panel: Dim, pages: Sequence[HeadPage], seen: Seen | None) -> None:
        """Turn the scores of a row for a panel into weights. With an 8-bit cache, also multiply each weight by the scale of its value."""

        def scale(slot: Dim) -> None:
            if self.cache.scales is not None:
                (page,) = (page for page in pages if page.slot == slot)
                with k.vector(PAGE) as lane:
                    self.scores[row, slot, lane] = self.scores[row, slot, lane] * self.cache.scale(page, VALUES, lane)

        if seen is not None:
            first = block.start + panel * self.cut.panel
            with k.when(seen.lacks(first, first + self.cut.panel)):
                for page in pages:
                    with k.vector(PAGE) as lane:
                        self.scores[row, page.slot, lane] = seen.hide(page.start + lane, self.scores[row, page.slot, lane])
        slots = [page.slot for page in pages]
        self.softmax.update(k, row, self.scores, lambda: iter(slots), lambda slot: self.products.weigh(k, row, slot, self.scores), scale)

    # --- values --------------------------------------------------------------------------------------------------------

    def multiply_values(self, k: Kernel, pages: Sequence[HeadPage], n: int, seen: Seen | None) -> None:
        """Add the weighted values of pages that the same `n` rows read."""
        parts = self.vectors.operands.parts
        at_once = min(parts, max(1, self.vectors.accumulators // n))
        whole, left = divmod(parts, at_once)
        with k.serial("c", whole) as c:
            self.multiply_parts(k, pages, n, c * at_once, at_once, seen)
        if left:
            self.multiply_parts(k, pages, n, Dim.of(whole * at_once), left, seen)

    def multiply_parts(self, k: Kernel, pages: Sequence[HeadPage], n: int, first: Dim, parts: int, seen: Seen | None) -> None:
        values, width, row, size = self.softmax.values, self.vectors.operands.width, pages[0].row, self.cache.size
        with k.scope():
            total = k.local("total", n, parts, width)
            with k.unroll("m", n) as m:
                for c in range(parts):
                    with k.vector(width) as lane:
                        total[m, c, lane] = values[row + m, first + c, lane]
            for page in pages:
                for keys in self.key_steps(k, page, seen):
                    for u in range(0 if self.cache.turned is not None else self.products.step):
                        self.cache.prefetch(k, page, VALUES, (keys.at + u) * size + first * width, parts * width)
                    self.products.multiply_values(k, page, n, keys, first * width, total)
            with k.unroll("m", n) as m:
                for c in range(parts):
                    with k.vector(width) as lane:
                        values[row + m, first + c, lane] = total[m, c, lane]

    def key_steps(self, k: Kernel, page: HeadPage, seen: Seen | None) -> Iterator[KeyStep]:
        """Loop in steps over the seen keys of a page. The code that the caller's `for` emits becomes the body of the loop."""
        step = self.products.step
        if seen is None:
            unrolled = step * self.vectors.steps
            with k.serial("j", PAGE // unrolled) as j:
                for u in range(0, unrolled, step):
                    yield KeyStep(j * unrolled + u, Dim.of(0), Dim.of(PAGE))
            return
        begin = dim_min(PAGE, dim_max(0, seen.low - page.start)) if seen.has_window else Dim.of(0)
        end = dim_max(0, dim_min(PAGE, seen.high + 1 - page.start))
        with k.serial("j", dim_max(0, ceil_div(end, step) - begin // step)) as j:
            yield KeyStep((begin // step + j) * step, begin, end)
