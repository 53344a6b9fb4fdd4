"""A few pages of keys and values for some rows of paged attention, on vectors: scores, weights, weighted values.

Scores and sums are made in register tiles of several rows, which share what they load of keys and values. Every score adds its products in
the order of elements, and every sum in the order of keys (attention_products.py): so a row has the same bits whatever stands beside it in
the tile.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from compiler.backends.cpu.schedule.attention_products import KeyStep, Pairs, Singles
from compiler.backends.cpu.schedule.attention_rows import F32, HeadPage, Rows, Seen, capped, hidden_unless, prefetch
from compiler.backends.cpu.schedule.folds import larger, spread_largest
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.loops import Scalar
from compiler.ir.write import Array, Kernel, cast, exp
from compiler.machine.products import TileShape
from compiler.ops.kv_cache import KEYS, PAGE, VALUES

UNROLLED = 4  # steps of a product written out


@dataclass(frozen=True, slots=True)
class VectorUnit:
    rows: Rows
    cache: Array
    scales: Array | None  # of an 8-bit cache
    layer: Dim
    size: int
    width: int  # lanes of a part of a value
    softcap: float
    tile: TileShape
    products: Singles | Pairs

    @property
    def parts(self) -> int:
        return self.size // self.width

    @property
    def most(self) -> int:
        """Accumulators of a register tile."""
        return self.tile.rows * self.tile.vectors

    # --- scores --------------------------------------------------------------------------------------------------------

    def scores(self, k: Kernel, pages: Sequence[HeadPage], n: int, seen: Seen | None) -> None:
        """The scores of `n` rows of each page; they see all of it, or what `seen` says."""
        step = self.products.step
        unrolled = step * next(u for u in (UNROLLED, 2, 1) if self.size % (u * step) == 0)
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
                    if seen is not None:
                        value = hidden_unless(seen, page.start + lane, value)
                    self.rows.scores[page.row + m, page.place, lane] = value

    def finished(self, page: HeadPage, score: Scalar, lane: Dim) -> Scalar:
        if self.scales is not None:
            score = score * self.scale(page, KEYS, lane)
        return capped(score, self.softcap)

    # --- weights -------------------------------------------------------------------------------------------------------

    def weigh(self, k: Kernel, row: Dim, block: Sequence[HeadPage]) -> None:
        """Turn scores into weights and add them to `sums`. The scale of an 8-bit value goes into its weight."""
        rows, places = self.rows, [page.place for page in block]
        with k.scope():
            most = k.local("most", PAGE)
            with k.vector(PAGE) as lane:
                most[lane] = reduce(larger, [rows.scores[row, place, lane] for place in places])
            spread_largest(k, most)
            with k.when(rows.top[row, 0] < most[0]):
                self.raise_top(k, row, most)
            for place in places:
                with k.vector(PAGE) as lane:
                    rows.scores[row, place, lane] = exp(rows.scores[row, place, lane] - rows.top[row, lane])
            for page in block:
                self.products.round_weights(k, row, page)
            with k.vector(PAGE) as lane:
                rows.sums[row, lane] += reduce(operator.add, [cast(rows.weights[row, place, lane], F32) for place in places])
            if self.scales is not None:
                for page in block:
                    with k.vector(PAGE) as lane:
                        rows.scores[row, page.place, lane] = rows.scores[row, page.place, lane] * self.scale(page, VALUES, lane)

    def raise_top(self, k: Kernel, row: Dim, most: Array) -> None:
        """Rescale all that was summed before by the change of the maximum."""
        rows, change = self.rows, k.local("change", PAGE)
        with k.vector(PAGE) as lane:
            change[lane] = exp(rows.top[row, lane] - most[lane])
        with k.vector(PAGE) as lane:
            rows.top[row, lane] = most[lane]
        with k.vector(PAGE) as lane:
            rows.sums[row, lane] = rows.sums[row, lane] * change[lane]
        with k.serial("c", self.parts) as c, k.vector(self.width) as lane:
            rows.values[row, c, lane] = rows.values[row, c, lane] * change[lane]

    # --- values --------------------------------------------------------------------------------------------------------

    def values(self, k: Kernel, pages: Sequence[HeadPage], n: int, seen: Seen | None) -> None:
        """Add the weighted values of pages that belong to the same `n` rows. Keys that are not seen have no weight, but 0 * value is no
        0 where memory holds a NaN: they are left out."""
        at_once = min(self.parts, max(1, self.most // n))
        whole, left = divmod(self.parts, at_once)
        with k.serial("c", whole) as c:
            self.values_of_parts(k, pages, n, c * at_once, at_once, seen)
        if left:
            self.values_of_parts(k, pages, n, Dim.of(whole * at_once), left, seen)

    def values_of_parts(self, k: Kernel, pages: Sequence[HeadPage], n: int, first: Dim, parts: int, seen: Seen | None) -> None:
        values, width, row = self.rows.values, self.width, pages[0].row
        with k.scope():
            total = k.local("total", n, parts, width)
            with k.unroll("m", n) as m:
                for c in range(parts):
                    with k.vector(width) as lane:
                        total[m, c, lane] = values[row + m, first + c, lane]
            for page in pages:
                for keys in self.key_steps(k, page, seen):
                    for u in range(self.products.step):
                        self.prefetch(k, page, VALUES, (keys.at + u) * self.size + first * width, parts * width)
                    self.products.values(k, page, n, keys, first * width, total)
            with k.unroll("m", n) as m:
                for c in range(parts):
                    with k.vector(width) as lane:
                        values[row + m, first + c, lane] = total[m, c, lane]

    def key_steps(self, k: Kernel, page: HeadPage, seen: Seen | None) -> Iterator[KeyStep]:
        """Loops over the keys of a page that are seen. The caller writes the body of each step."""
        step = self.products.step
        if seen is None:
            unrolled = step * UNROLLED
            with k.serial("j", PAGE // unrolled) as j:
                for u in range(0, unrolled, step):
                    yield KeyStep(j * unrolled + u, Dim.of(0), Dim.of(PAGE))
            return
        begin = dim_min(PAGE, dim_max(0, seen.low - page.start)) if seen.from_low else Dim.of(0)
        end = dim_max(0, dim_min(PAGE, seen.high + 1 - page.start))
        with k.serial("j", dim_max(0, ceil_div(end, step) - begin // step)) as j:
            yield KeyStep((begin // step + j) * step, begin, end)

    # --- the cache -----------------------------------------------------------------------------------------------------

    def scale(self, page: HeadPage, half: int, lane: Dim) -> Scalar:
        assert self.scales is not None
        return cast(self.scales[self.layer, half, page.page, page.kv_head, lane], F32)

    def prefetch(self, k: Kernel, page: HeadPage, half: int, first: Dim, length: int) -> None:
        prefetch(k, self.cache, self.layer, page, half, first, length)
