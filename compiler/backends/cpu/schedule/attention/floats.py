"""Attention by vector instructions that multiply floats: a unit as walk.py defines it. It serves pages of floats, and those pages of 8-bit
integers that the unit of integers.py does not support.

  F32Rows     multiply one element of the summed axis at a time, in f32; each multiply-add is rounded once
  PairRows    multiply two elements at a time, in bf16 (`dot_bf16_rows`), where this is faster; queries and weights are rounded to bf16

Register tiles of several rows (query heads of tokens) share the keys and values that they load. To form pairs, two adjacent lines of a page
are interleaved when they are loaded, once for all rows of the tile. A score adds the products of elements in the order of the elements, and
a sum adds values in the order of keys. So a row has the same bits whatever other rows are in the tile.

Memory limits the speed of a single token. The token reads whole pages with all kv heads of the item, first the keys of a block and then the
values of the block. If the pages of the sequence are adjacent, these are two long streams. Arithmetic limits the speed of a tile, whose
rows share keys and values in registers. A value is multiplied only if the row sees its key, because the value of any other key may be NaN,
and 0 * NaN is NaN.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from compiler.backends.cpu.schedule.attention.blocks import Block, Cut
from compiler.backends.cpu.schedule.attention.items import Item, Part, row_tiles, tokens_of_tile
from compiler.backends.cpu.schedule.attention.operands import PagedOperands, Seen
from compiler.backends.cpu.schedule.attention.pages import F32, Cache, Head, HeadPage
from compiler.backends.cpu.schedule.attention.softmax import OnlineSoftmax
from compiler.backends.cpu.schedule.attention.walk import Order, Rows, Unit
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min, product_of
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.write import Array, Kernel, cast
from compiler.machine.intrinsics.dot_bf16 import DotBf16Rows
from compiler.machine.intrinsics.round_bf16 import RoundBf16
from compiler.machine.products import ProductTiles, TileShape
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES
from compiler.ops.attention.plain import capped

PAGES = 2  # number of pages of a panel
SPLIT = 16  # number of pages of a split
STRETCH = 4  # number of panels whose keys a token reads before their values
TOKEN = Order(Cut(PAGES, STRETCH, SPLIT // (PAGES * STRETCH)), keys=1, values=1, by_panel=True, prefetches=True)
TILE = Order(Cut(PAGES, 1, SPLIT // PAGES), keys=PAGES, values=PAGES, whole_apart=True)


@dataclass(frozen=True, slots=True)
class Floats:
    """How the target multiplies floats, and the unit that follows from it."""

    operands: PagedOperands
    shape: TileShape
    steps: int  # maximum number of unrolled steps of a product
    in_pairs: bool  # whether products multiply pairs of bf16

    @staticmethod
    def of(operands: PagedOperands, tiles: ProductTiles) -> Floats:
        """Choose the instructions: they multiply pairs of bf16 if the target's vector instructions multiply these faster than f32, and if
        the program, the pages and the sizes of heads allow it, otherwise f32."""
        in_pairs = tiles.pairs is not None and not tiles.pairs.on_matrix_unit and operands.fits_pairs
        return Floats(operands, tiles.attention.shape, tiles.attention.steps, in_pairs)

    @property
    def unit(self) -> Unit:
        return Unit(replace(TOKEN, heads=self.heads_at_once), TILE, tokens_of_tile(self.operands, self.shape.rows), self.rows)

    @property
    def accumulators(self) -> int:
        """The number of accumulators in a register tile."""
        return self.shape.rows * self.shape.vectors

    @property
    def heads_at_once(self) -> int:
        """The number of kv heads whose scores a token computes at once. With several heads, additions for one head hide the latency of
        those for another."""
        count, kv_heads, group = 1, self.operands.kv_heads, self.operands.group
        while kv_heads % (2 * count) == 0 and 2 * count * group <= self.accumulators // 2:
            count *= 2
        return count

    def rows(self, k: Kernel, item: Item, order: Order) -> FloatRows:
        """Allocate the rows of an item, for products of pairs of bf16 or of f32."""
        operands, count = self.operands, item.most_rows
        kind, factors = (PairRows, DType.BF16) if self.in_pairs else (F32Rows, F32)
        cache = Cache.open(k, operands)
        queries, scores = k.local("queries", count, operands.size, dtype=factors), k.local("scores", count, order.cut.pages, PAGE)
        softmax = OnlineSoftmax.allocate(k, count, operands.parts, operands.width)
        weights = k.local("weights", count, order.cut.pages, PAGE, dtype=factors) if self.in_pairs else scores
        return kind(item, order, cache, softmax, scores, self, queries, weights)


@dataclass(frozen=True, slots=True)
class KeyStep:
    """Adjacent keys of a page, from key `at` on, whose values are multiplied together. Rows see only keys `begin` to `end` - 1 of the
    page."""

    at: Dim
    begin: Dim
    end: Dim


@dataclass(frozen=True, slots=True)
class FloatRows(Rows):
    """The rows of an item whose products multiply floats, f32 or pairs of bf16."""

    floats: Floats
    queries: Array  # [rows, size], scaled
    weights: Array  # [rows, pages of a block, PAGE]; the same array as `scores` if the unit does not round weights

    step: ClassVar[int]  # number of elements of the summed axis that are multiplied at a time

    def load_query(self, k: Kernel, row: Dim, query: Callable[[Dim], Scalar]) -> None:
        width = self.floats.operands.width
        with k.serial("c", self.cache.size // width) as c, k.vector(width) as lane:
            at = c * width + lane
            self.queries[row, at] = cast(query(at) * self.floats.operands.node.scale, self.queries.dtype)

    # --- keys ----------------------------------------------------------------------------------------------------------

    def multiply_keys(self, k: Kernel, pages: Sequence[HeadPage], count: int) -> None:
        in_registers = min(self.order.keys, self.floats.shape.vectors) * self.order.heads
        for at, n in row_tiles(k, count, self.floats.accumulators // in_registers):
            for i in range(0, len(pages), in_registers):
                self.compute_scores(k, [page.below(at) for page in pages[i : i + in_registers]], n)

    def compute_scores(self, k: Kernel, pages: Sequence[HeadPage], n: int) -> None:
        """Compute the scores of `n` rows for each page. With an 8-bit cache, multiply them by the scales of the keys. Then cap them, if the
        model caps scores."""
        unrolled = self.step * next(u for u in (self.floats.steps, 2, 1) if self.cache.size % (u * self.step) == 0)
        with k.scope():
            score = k.local("score", len(pages), n, PAGE)
            for v in range(len(pages)):
                with k.unroll("m", n) as m, k.vector(PAGE) as lane:
                    score[v, m, lane] = 0.0
            with k.serial("r", self.cache.size // unrolled) as r:
                for page in pages:
                    self.cache.prefetch(k, page, KEYS, r * (unrolled * PAGE), unrolled * PAGE, self.later_head(page))
                for u in range(0, unrolled, self.step):
                    self.add_to_scores(k, pages, n, r * unrolled + u, score)
            for v, page in enumerate(pages):
                with k.unroll("m", n) as m, k.vector(PAGE) as lane:
                    found = score[v, m, lane]
                    if self.cache.scales is not None:
                        found = found * self.cache.scale(page, KEYS, lane)
                    self.scores[page.row + m, page.slot, lane] = capped(found, self.floats.operands.node.softcap)

    @abstractmethod
    def add_to_scores(self, k: Kernel, pages: Sequence[HeadPage], n: int, r: Dim, score: Array) -> None:
        """Add the products of `step` elements of queries and keys, from element `r` on, to the scores of each page."""

    def later_head(self, page: HeadPage) -> tuple[Dim, Dim] | None:
        """Return the kv head that is prefetched a second time, and 1 if this head is read in the next page, or 0 if in this page. Return
        None if products multiply f32. Pairs are multiplied faster than memory delivers pages, so more prefetches are pending than the CPU
        can track, and the CPU drops some. So while one head is read, the kv head that is read half the item's heads later is prefetched
        again."""
        if not self.floats.in_pairs:
            return None
        first, count = self.item.kv_first, self.item.kv_count
        later = page.kv_head + count // 2
        wraps = dim_min(1, dim_max(0, later + 1 - (first + count)))
        return later - wraps * count, wraps

    # --- values --------------------------------------------------------------------------------------------------------

    def load_values(self, k: Kernel, pages: Sequence[HeadPage], seen: Seen | None) -> None:
        for page in pages:
            self.cache.turn(k, page)

    def multiply_values(self, k: Kernel, block: Block, head: Head, pages: Sequence[HeadPage], part: Part) -> None:
        """Add the weighted values of pages to the rows, one register tile of rows after another, and for each tile some vectors of the
        values at a time."""
        for at, n in row_tiles(k, part.count, self.floats.shape.rows):
            parts, below = self.floats.operands.parts, [page.below(at) for page in pages]
            at_once = min(parts, max(1, self.floats.accumulators // n))
            whole, left = divmod(parts, at_once)
            with k.serial("c", whole) as c:
                self.multiply_parts(k, below, n, c * at_once, at_once, part.seen)
            if left:
                self.multiply_parts(k, below, n, Dim.of(whole * at_once), left, part.seen)

    def multiply_parts(self, k: Kernel, pages: Sequence[HeadPage], n: int, first: Dim, parts: int, seen: Seen | None) -> None:
        """Add the weighted values of pages to `n` rows: of each value, only `parts` vectors from vector `first` on."""
        values, width, row, size = self.softmax.values, self.floats.operands.width, pages[0].row, self.cache.size
        with k.scope():
            total = k.local("total", n, parts, width)
            with k.unroll("m", n) as m:
                for c in range(parts):
                    with k.vector(width) as lane:
                        total[m, c, lane] = values[row + m, first + c, lane]
            for page in pages:
                for keys in self.key_steps(k, page, seen):
                    for u in range(0 if self.cache.turned is not None else self.step):
                        self.cache.prefetch(k, page, VALUES, (keys.at + u) * size + first * width, parts * width, self.later_head(page))
                    self.add_to_values(k, page, n, keys, first * width, total)
            with k.unroll("m", n) as m:
                for c in range(parts):
                    with k.vector(width) as lane:
                        values[row + m, first + c, lane] = total[m, c, lane]

    def key_steps(self, k: Kernel, page: HeadPage, seen: Seen | None) -> Iterator[KeyStep]:
        """Loop over the keys of a page that rows see, `step` keys at a time; if `seen` is None, over all keys of the page. The code that
        the caller's `for` emits becomes the body of the loop. If `seen` is None, the loop is unrolled, so the `for` emits its code several
        times."""
        step = self.step
        if seen is None:
            unrolled = step * self.floats.steps
            with k.serial("j", PAGE // unrolled) as j:
                for u in range(0, unrolled, step):
                    yield KeyStep(j * unrolled + u, Dim.of(0), Dim.of(PAGE))
            return
        begin = dim_min(PAGE, dim_max(0, seen.low - page.start)) if seen.has_window else Dim.of(0)
        end = dim_max(0, dim_min(PAGE, seen.high + 1 - page.start))
        with k.serial("j", dim_max(0, ceil_div(end, step) - begin // step)) as j:
            yield KeyStep((begin // step + j) * step, begin, end)

    @abstractmethod
    def add_to_values(self, k: Kernel, page: HeadPage, n: int, keys: KeyStep, first: Dim, total: Array) -> None:
        """Add the weighted values of `step` keys to `total`, which has the elements of values from element `first` on."""


@dataclass(frozen=True, slots=True)
class F32Rows(FloatRows):
    """Rows whose products multiply f32."""

    step: ClassVar[int] = 1

    def add_to_scores(self, k: Kernel, pages: Sequence[HeadPage], n: int, r: Dim, score: Array) -> None:
        """Add the products of element `r` of the queries and element `r` of every key of each page."""
        with k.scope():
            keys = k.local("keys", len(pages), PAGE)
            for v, page in enumerate(pages):
                with k.vector(PAGE) as lane:
                    keys[v, lane] = cast(self.cache.element(page, KEYS, r * PAGE + lane), F32)
            for v, page in enumerate(pages):
                with k.unroll("m", n) as m, k.vector(PAGE) as lane:
                    score[v, m, lane] += self.queries[page.row + m, r] * keys[v, lane]

    def add_to_values(self, k: Kernel, page: HeadPage, n: int, keys: KeyStep, first: Dim, total: Array) -> None:
        """Add the weighted value of one key to `total`."""
        _, parts, width = (d.const for d in total.shape)
        with k.scope():
            value = k.local("value", parts, width)
            for c in range(parts):
                with k.vector(width) as lane:
                    value[c, lane] = cast(self.cache.value(page, keys.at, first + c * width + lane), F32)
            with k.unroll("m", n) as m:
                for c in range(parts):
                    with k.vector(width) as lane:
                        total[m, c, lane] += self.weights[page.row + m, page.slot, keys.at] * value[c, lane]


@dataclass(frozen=True, slots=True)
class PairRows(FloatRows):
    """Rows whose products multiply pairs of bf16."""

    step: ClassVar[int] = 2

    def add_to_scores(self, k: Kernel, pages: Sequence[HeadPage], n: int, r: Dim, score: Array) -> None:
        for v, page in enumerate(pages):
            _dot_rows(k, n, score[v, 0, 0], self.queries[page.row, r], self.cache.element(page, KEYS, r * PAGE), columns=PAGE)

    def weigh(self, k: Kernel, row: Dim, slot: Dim) -> Array:
        k.tile(RoundBf16(), self.weights[row, slot, 0], self.scores[row, slot, 0])
        return self.weights

    def add_to_values(self, k: Kernel, page: HeadPage, n: int, keys: KeyStep, first: Dim, total: Array) -> None:
        """Add the weighted values of a pair of keys. A key that is not seen has weight 0, but its value may be NaN, and 0 * NaN is not 0.
        So instead of its value, read the value of the other key of the pair a second time."""
        _, parts, width = (d.const for d in total.shape)
        weights = self.weights[page.row, page.slot, keys.at]
        pair = dim_max(keys.at, keys.begin), dim_min(keys.at + 1, keys.end - 1)
        values = (self.cache.value(page, key, first) for key in pair)
        _dot_rows(k, n, total[0, 0, 0], weights, *values, columns=parts * width)


def _dot_rows(k: Kernel, n: int, total: Load, factors: Load, *pair: Load, columns: int) -> None:
    """Add to each of `n` rows of `total` the sum of two products: the row's first factor times the first row of `pair`, and the row's
    second factor times the second row of `pair`. If `pair` has one place, its second row follows the first one in memory."""
    stride = product_of(factors.buffer.shape[1:])
    k.tile(DotBf16Rows(n, columns, touching=len(pair) == 1), total, factors, *pair, dims=(stride,))
