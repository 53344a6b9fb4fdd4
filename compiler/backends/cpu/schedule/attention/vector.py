"""Compute a few pages of keys and values for some rows of paged attention, on vectors: scores, weights, weighted values.

Register tiles of several rows share the keys and values that they load. Every score adds its products in the order of elements, and every
sum adds values in the order of keys (vector_products.py). So a row has the same bits whatever other rows are in the tile.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from compiler.backends.cpu.schedule.attention.rows import F32, HeadPage, Rows, VisibleRange, masked, prefetch
from compiler.backends.cpu.schedule.attention.turned import TurnedValues
from compiler.backends.cpu.schedule.attention.vector_products import F32Products, KeyStep, PairProducts
from compiler.backends.cpu.schedule.folds import larger, spread_largest
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, cast, exp
from compiler.machine.products import TileShape
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES
from compiler.ops.attention.plain import capped


@dataclass(frozen=True, slots=True)
class VectorUnit:
    rows: Rows
    cache: Array
    scales: Array | None  # scales of an 8-bit cache
    layer: Dim
    size: int
    value_size: int
    width: int  # number of lanes of a vector of values
    softcap: float
    tile: TileShape
    steps: int  # maximum number of unrolled steps of a product
    products: F32Products | PairProducts

    @property
    def parts(self) -> int:
        return self.value_size // self.width

    @property
    def accumulators(self) -> int:
        """The number of accumulators in a register tile."""
        return self.tile.rows * self.tile.vectors

    # --- scores --------------------------------------------------------------------------------------------------------

    def scores(self, k: Kernel, pages: Sequence[HeadPage], n: int, visible: VisibleRange | None) -> None:
        """Compute the scores of `n` rows for each page. If `visible` is None, all keys of the pages are visible."""
        step = self.products.step
        unrolled = step * next(u for u in (self.steps, 2, 1) if self.size % (u * step) == 0)
        with k.scope():
            score = k.local("score", len(pages), n, PAGE)
            for v in range(len(pages)):
                with k.unroll("m", n) as m, k.vector(PAGE) as lane:
                    score[v, m, lane] = 0.0
            with k.serial("r", self.size // unrolled) as r:
                for page in pages:
                    self.prefetch(k, page, KEYS, r * (unrolled * PAGE), unrolled * PAGE)
                for u in range(0, unrolled, step):
                    self.products.scores(k, pages, n, r * unrolled + u, score)
            for v, page in enumerate(pages):
                with k.unroll("m", n) as m, k.vector(PAGE) as lane:
                    value = self.finished(page, score[v, m, lane], lane)
                    if visible is not None:
                        value = masked(visible, page.start + lane, value)
                    self.rows.scores[page.row + m, page.slot, lane] = value

    def finished(self, page: HeadPage, score: Scalar, lane: Dim) -> Scalar:
        if self.scales is not None:
            score = score * self.scale(page, KEYS, lane)
        return capped(score, self.softcap)

    # --- weights -------------------------------------------------------------------------------------------------------

    def update_softmax(self, k: Kernel, row: Dim, block: Sequence[HeadPage]) -> None:
        """Turn the scores of a row into weights, and add the weights to `sums`. With an 8-bit cache, also multiply each weight by the scale
        of its value."""
        rows, slots = self.rows, [page.slot for page in block]
        with k.scope():
            highest = k.local("highest", PAGE)
            with k.vector(PAGE) as lane:
                highest[lane] = reduce(larger, [rows.scores[row, slot, lane] for slot in slots])
            spread_largest(k, highest)
            with k.when(rows.maximum[row, 0] < highest[0]):
                rows.raise_maximum(k, row, highest)
            for slot in slots:
                with k.vector(PAGE) as lane:
                    rows.scores[row, slot, lane] = exp(rows.scores[row, slot, lane] - rows.maximum[row, lane])
            for page in block:
                self.products.round_weights(k, row, page)
            with k.vector(PAGE) as lane:
                rows.sums[row, lane] += reduce(operator.add, [cast(rows.weights[row, slot, lane], F32) for slot in slots])
            if self.scales is not None:
                for page in block:
                    with k.vector(PAGE) as lane:
                        rows.scores[row, page.slot, lane] = rows.scores[row, page.slot, lane] * self.scale(
                            page, VALUES if self.turned is None else KEYS, lane
                        )

    # --- values --------------------------------------------------------------------------------------------------------

    @property
    def turned(self) -> TurnedValues | None:
        return self.products.turned

    def turn(self, k: Kernel, page: HeadPage) -> None:
        """Prepare the values of a page."""
        if self.turned is not None:
            self.turned.turn(k, page)

    def values(self, k: Kernel, pages: Sequence[HeadPage], n: int, visible: VisibleRange | None) -> None:
        """Add the weighted values of pages that the same `n` rows read. Skip keys that are not visible: their weight is 0, but their value
        may be NaN, and 0 * NaN is NaN."""
        at_once = min(self.parts, max(1, self.accumulators // n))
        whole, left = divmod(self.parts, at_once)
        with k.serial("c", whole) as c:
            self.values_of_parts(k, pages, n, c * at_once, at_once, visible)
        if left:
            self.values_of_parts(k, pages, n, Dim.of(whole * at_once), left, visible)

    def values_of_parts(self, k: Kernel, pages: Sequence[HeadPage], n: int, first: Dim, parts: int, visible: VisibleRange | None) -> None:
        values, width, row = self.rows.values, self.width, pages[0].row
        with k.scope():
            total = k.local("total", n, parts, width)
            with k.unroll("m", n) as m:
                for c in range(parts):
                    with k.vector(width) as lane:
                        total[m, c, lane] = values[row + m, first + c, lane]
            for page in pages:
                for keys in self.key_steps(k, page, visible):
                    for u in range(0 if self.turned is not None else self.products.step):
                        self.prefetch(k, page, VALUES, (keys.at + u) * self.size + first * width, parts * width)
                    self.products.values(k, page, n, keys, first * width, total)
            with k.unroll("m", n) as m:
                for c in range(parts):
                    with k.vector(width) as lane:
                        values[row + m, first + c, lane] = total[m, c, lane]

    def key_steps(self, k: Kernel, page: HeadPage, visible: VisibleRange | None) -> Iterator[KeyStep]:
        """Loop in steps over the visible keys of a page. The code that the caller's `for` emits becomes the body of the loop."""
        step = self.products.step
        if visible is None:
            unrolled = step * self.steps
            with k.serial("j", PAGE // unrolled) as j:
                for u in range(0, unrolled, step):
                    yield KeyStep(j * unrolled + u, Dim.of(0), Dim.of(PAGE))
            return
        begin = dim_min(PAGE, dim_max(0, visible.low - page.start)) if visible.clipped_low else Dim.of(0)
        end = dim_max(0, dim_min(PAGE, visible.high + 1 - page.start))
        with k.serial("j", dim_max(0, ceil_div(end, step) - begin // step)) as j:
            yield KeyStep((begin // step + j) * step, begin, end)

    # --- reading the cache ---------------------------------------------------------------------------------------------

    def scale(self, page: HeadPage, half: int, lane: Dim) -> Scalar:
        assert self.scales is not None
        return cast(self.scales[self.layer, half, page.page, page.kv_head, lane], F32)

    def prefetch(self, k: Kernel, page: HeadPage, half: int, first: Dim, length: int) -> None:
        prefetch(k, self.cache, self.layer, page, half, first, length)
