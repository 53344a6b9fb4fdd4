"""Compute a block of keys and values for some rows of paged attention, on a matrix unit.

The unit multiplies bf16, the type of the pages, so queries and weights are rounded to bf16. Keys and values are interleaved in pairs when
they are loaded from their page, once for all rows that share them. Values that no row sees are loaded as zeros, because 0 * NaN is not 0.

A row has the same bits whatever other rows are in the tile: the products of a block are stored separately, and each row adds its own
products to its sums. A key that the row does not see has weight 0, so it adds a zero. That can only change the sign of a zero, and the sign
is lost, because accumulators begin with +0.
"""

from __future__ import annotations

import operator
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce

from compiler.backends.cpu.schedule.attention.rows import BLOCK, F32, PAGES, HeadPage, Rows, VisibleRange, masked, prefetch
from compiler.backends.cpu.schedule.attention.turned import TurnedValues
from compiler.backends.cpu.schedule.folds import fold_halves, larger, spread_largest
from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.write import Array, Kernel, cast, exp, fma, not_equal
from compiler.machine.intrinsics.amx import AmxBf16
from compiler.machine.intrinsics.interleave import InterleavePairs
from compiler.machine.intrinsics.round_bf16 import RoundBf16
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES
from compiler.ops.attention.plain import capped

HEIGHT = 32  # maximum number of rows of a product
CHUNK = 2 * 8  # number of rows that one tile interleaves
BF16 = DType.BF16


def allocate_rows(k: Kernel, count: int, blocks: int, size: int, value_size: int) -> Rows:
    """Allocate the state of `count` rows: queries [rows, depth], scores of the current blocks [blocks, rows, BLOCK], and weights of one
    block [rows, BLOCK]."""
    return Rows(
        k.local("queries", count, depth_of(size), dtype=BF16),
        k.local("scores", blocks, count, BLOCK),
        k.local("weights", count, BLOCK, dtype=BF16),
        k.local("maximum", count, PAGE),
        k.local("sums", count, PAGE),
        k.local("values", count, value_size // PAGE, PAGE),
    )


def pad_queries(k: Kernel, rows: Rows, row: Dim, size: int) -> None:
    """Fill the end of a query with zeros, up to a whole number of steps of the unit."""
    for at in range(size, depth_of(size), PAGE):
        with k.vector(PAGE) as lane:
            rows.queries[row, at + lane] = 0.0


@dataclass(frozen=True, slots=True)
class MatrixUnit:
    rows: Rows
    cache: Array
    layer: Dim
    size: int
    value_size: int
    softcap: float
    count: int  # number of rows, which share a kv head
    keys: Array  # [depth / 2, BLOCK, 2]: the keys of a block
    loaded: Array  # [panels, BLOCK / 2, BLOCK, 2]: the values of a block
    products: Array  # [panels, rows, BLOCK]: products of weights and values
    rescale: Array  # [rows]: exp(old maximum - new maximum), the factor of the earlier sums
    turned: TurnedValues | None  # the values, if pages have only keys

    @staticmethod
    @contextmanager
    def configured(
        k: Kernel, rows: Rows, cache: Array, layer: Dim, sizes: tuple[int, int], softcap: float, count: int, turned: TurnedValues | None
    ) -> Generator[MatrixUnit]:
        """Configure the unit for `count` rows. `sizes` are those of keys and values. The configuration holds for the code that the caller
        writes inside this context."""
        (size, value_size), (depth, panels) = sizes, (depth_of(sizes[0]), -(-sizes[1] // BLOCK))
        with k.scope():
            keys = k.local("keys", depth // 2, 2 * BLOCK, dtype=BF16)
            loaded = k.local("taken", panels, BLOCK // 2, 2 * BLOCK, dtype=BF16)
            products = k.local("products", panels, count, BLOCK)
            rescale = k.local("rescale", count)
            unit = MatrixUnit(rows, cache, layer, size, value_size, softcap, count, keys, loaded, products, rescale, turned)
            k.tile(unit.product.configuration)
            unit.pad(k)
            yield unit

    def pad(self, k: Kernel) -> None:
        """Write zeros to those parts of the buffers that keys and values do not fill."""
        pairs, left, last_panel = self.size // 2, self.value_size % BLOCK, self.loaded.shape[0] - 1
        if self.size % BLOCK:
            with k.serial("r", depth_of(self.size) // 2 - pairs) as r, k.serial("c", 2 * PAGES) as c, k.vector(PAGE) as lane:
                self.keys[pairs + r, c * PAGE + lane] = 0.0
        if left == 0:
            return
        with k.serial("r", BLOCK // 2) as r, k.serial("c", 2 * (BLOCK - left) // PAGE) as c, k.vector(PAGE) as lane:
            self.loaded[last_panel, r, 2 * left + c * PAGE + lane] = 0.0

    @property
    def height(self) -> int:
        """The number of rows of a tile: the largest divisor of `count` that the unit supports."""
        return next(h for h in range(HEIGHT, 0, -1) if self.count % h == 0)

    @property
    def product(self) -> AmxBf16:
        return AmxBf16(self.height, BLOCK, fresh=True, cached_panel=True)

    # --- scores --------------------------------------------------------------------------------------------------------

    def scores(self, k: Kernel, block: Sequence[HeadPage], row: Dim, slot: Dim) -> None:
        """Compute the scores of all rows that share a kv head, beginning with row `row`."""
        for v, page in enumerate(block):
            self.load_keys(k, v, page)
        with self.row_tiles(k) as m:
            self.multiply(k, self.rows.scores[slot, row + m, 0], self.rows.queries[row + m, 0], self.keys[0, 0], depth_of(self.size))

    def load_keys(self, k: Kernel, v: int, page: HeadPage) -> None:
        """Load the keys of a page. Row i of the page stores element i of all its keys."""
        with k.serial("r", self.size // CHUNK) as r:
            first = r * (CHUNK * PAGE)
            self.prefetch(k, page, KEYS, first, CHUNK * PAGE)
            target, source = self.keys[r * (CHUNK // 2), 2 * PAGE * v], self.element(page, KEYS, first)
            k.tile(InterleavePairs(PAGE), target, source, dims=(2 * BLOCK, PAGE))

    # --- weights -------------------------------------------------------------------------------------------------------

    def update_softmax(self, k: Kernel, m: Dim, row: Dim, slot: Dim, start: Dim, visible: VisibleRange | None) -> None:
        """Turn the scores of a row into weights, and add the weights to `sums`. Set `rescale` to the factor of the earlier sums."""
        rows, rescale = self.rows, self.rescale
        found, highest = k.local("found", PAGES, PAGE), k.local("highest", PAGE)
        for v in range(PAGES):
            with k.vector(PAGE) as lane:
                score = capped(rows.scores[slot, row, v * PAGE + lane], self.softcap)
                found[v, lane] = score if visible is None else masked(visible, start + v * PAGE + lane, score)
        with k.vector(PAGE) as lane:
            highest[lane] = reduce(larger, [found[v, lane] for v in range(PAGES)])
        spread_largest(k, highest)
        rescale[m] = 1.0
        with k.when(rows.maximum[row, 0] < highest[0]):
            rescale[m] = exp(rows.maximum[row, 0] - highest[0])
            with k.vector(PAGE) as lane:
                rows.maximum[row, lane] = highest[lane]
        for v in range(PAGES):
            with k.vector(PAGE) as lane:
                found[v, lane] = exp(found[v, lane] - rows.maximum[row, lane])
        for v in range(PAGES):
            k.tile(RoundBf16(), rows.weights[m, v * PAGE], found[v, 0])
        with k.vector(PAGE) as lane:
            weights = [cast(rows.weights[m, v * PAGE + lane], F32) for v in range(PAGES)]
            rows.sums[row, lane] = fma(rows.sums[row, lane], rescale[m], reduce(operator.add, weights))

    # --- values --------------------------------------------------------------------------------------------------------

    def load_values(self, k: Kernel, block: Sequence[HeadPage], low: Dim, high: Dim) -> None:
        """Load the values of keys `low` to `high`, and write zeros for all other keys."""
        for v, page in enumerate(block):
            if self.turned is not None:
                self.turned.turn(k, page)
            for p, columns in self.panels(k):
                if self.turned is None:
                    self.prefetch(k, page, VALUES, p * (BLOCK * PAGE), columns * PAGE)
                target, source = self.loaded[p, v * PAGE // 2, 0], self.value(page, p * BLOCK)
                dims = (2 * BLOCK, self.value_size, low - page.start, high + 1 - page.start)
                k.tile(InterleavePairs(columns, masked=True), target, source, dims=dims)

    def panels(self, k: Kernel) -> Iterator[tuple[Dim, int]]:
        """Yield the index of each panel of values, and its number of columns. The code that the caller's `for` emits becomes the body of a
        loop."""
        whole, left = divmod(self.value_size, BLOCK)
        if whole:
            with k.serial("p", whole) as p:
                yield p, BLOCK
        if left:
            yield Dim.of(whole), left

    def multiply_values(self, k: Kernel) -> None:
        """Multiply the weights of all rows by the loaded values."""
        with k.serial("p", self.products.shape[0]) as p, self.row_tiles(k) as m:
            self.multiply(k, self.products[p, m, 0], self.rows.weights[m, 0], self.loaded[p, 0, 0], BLOCK)

    def add(self, k: Kernel, m: Dim, row: Dim) -> None:
        """Rescale the weighted values of a row, and add the products of the current block to them."""
        values = self.rows.values
        with k.serial("c", self.value_size // PAGE) as c, k.vector(PAGE) as lane:
            product = self.products[c // PAGES, m, c % PAGES * PAGE + lane]
            values[row, c, lane] = fma(values[row, c, lane], self.rescale[m], product)

    def not_finite(self, k: Kernel, suspect: Scalar) -> Scalar:
        """Return whether a loaded value is infinite or NaN. Such a value would affect even rows that do not see its key. The code examines
        values only if `suspect` is true. It uses that x - x is 0 only for finite numbers."""
        panels, pairs, length = self.loaded.shape
        found = k.local("found", PAGE)
        with k.vector(PAGE) as lane:
            found[lane] = 0.0
        with k.when(suspect), k.nest((panels, pairs, length // PAGE)) as (p, r, c), k.vector(PAGE) as lane:
            x = cast(self.loaded[p, r, c * PAGE + lane], F32)
            found[lane] += x - x
        fold_halves(k, found, operator.add)
        return not_equal(found[0], 0.0)

    # --- helpers -------------------------------------------------------------------------------------------------------

    @contextmanager
    def row_tiles(self, k: Kernel) -> Generator[Dim]:
        with k.serial("io", self.count // self.height) as io:
            yield io * self.height

    def multiply(self, k: Kernel, total: Load, rows: Load, pairs: Load, depth: int) -> None:
        k.tile(self.product, total, rows, pairs, dims=(depth, depth))

    def prefetch(self, k: Kernel, page: HeadPage, half: int, first: Dim, length: int) -> None:
        prefetch(k, self.cache, self.layer, page, half, first, length)

    def element(self, page: HeadPage, half: int, index: Dim) -> Load:
        return self.cache[self.layer, half, page.page, page.kv_head, index]

    def value(self, page: HeadPage, element: Dim) -> Load:
        """Return the place of an element of the page's first value."""
        return self.element(page, VALUES, element) if self.turned is None else self.turned.element(page, Dim.of(0), element)


def depth_of(size: int) -> int:
    """Return the number of elements of a key, rounded up to whole steps of the unit."""
    return -(-size // BLOCK) * BLOCK
