"""Compute a block of keys and values for some rows of paged attention, on a matrix unit.

The unit multiplies bf16, the type of the pages, so queries and weights are rounded to bf16. Keys and values are interleaved in pairs when
they are loaded from their page, once for all rows that share them. Values that no row sees are loaded as zeros, because 0 * NaN is not 0.

The unit multiplies so fast that most of the time goes into the softmax. Therefore a block has many keys, the softmax has no branches, and
its exponentials have base 2 and few instructions (SoftmaxRows): queries are multiplied by log2(e). Where many rows share a block, the
softmax of some rows takes place while the unit multiplies others (AmxAttend).

A row has the same bits whatever other rows are in the tile: the products of a block are stored separately, and each row adds its own
products to its sums. A key that the row does not see has weight 0, so it adds a zero. That can only change the sign of a zero, and the sign
is lost, because accumulators begin with +0. A block of which the row sees no key leaves its sums unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import log

from compiler.backends.cpu.schedule.attention.rows import F32, HeadPage, Rows, Span, VisibleRange, masked, prefetch
from compiler.backends.cpu.schedule.attention.turned import TurnedValues
from compiler.backends.cpu.schedule.folds import fold_halves
from compiler.ir.dims import Dim, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.write import Array, Kernel, cast, fma, less
from compiler.machine.intrinsics.amx import AmxBf16, AmxStayAwake
from compiler.machine.intrinsics.amx_attend import AmxAttend
from compiler.machine.intrinsics.interleave import InterleavePairs
from compiler.machine.intrinsics.round_bf16 import RoundBf16
from compiler.machine.intrinsics.softmax_rows import SoftmaxRows
from compiler.machine.target import LINE_BYTES
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES
from compiler.ops.attention.plain import capped

PANEL_PAGES = 2  # number of pages of a panel
PANEL = PANEL_PAGES * PAGE  # number of keys, or of elements of values, that a product multiplies rows by
PANELS = 4  # number of panels of a block
BLOCK = PANELS * PANEL  # number of keys of a block
SPLIT = 8  # number of blocks of a split
HEIGHT = 32  # maximum number of rows of a product
LINES = PANEL * PAGE * 2 // LINE_BYTES  # cache lines of a page that a step of a product prefetches: PANEL elements of its keys or values
CHUNK = 2 * 8  # number of rows that one tile interleaves
LEAST = -1e30  # the maximum of a row that has seen no key
LOG2_E, LN_2 = 1 / log(2), log(2)
BF16 = DType.BF16


@dataclass(frozen=True, slots=True)
class MatrixRows(Rows):
    """The state of some rows. Queries are [rows, depth], the maximum is [rows], and values are [rows, parts, PAGE]. Scores and maximum are
    multiplied by log2(e). There are two buffers for scores and weights of a block, each with room for `block_rows` rows: scores are
    [2, PANELS, block rows, PANEL], and weights [2, block rows, BLOCK]."""

    block_rows: int

    @staticmethod
    def allocate_for(k: Kernel, count: int, block_rows: int, size: int, value_size: int) -> MatrixRows:
        return MatrixRows(
            k.local("queries", count, depth_of(size), dtype=BF16),
            k.local("scores", 2, PANELS, block_rows, PANEL),
            k.local("weights", 2, block_rows, BLOCK, dtype=BF16),
            k.local("maximum", count),
            k.local("sums", count, PAGE),
            k.local("values", count, value_size // PAGE, PAGE),
            block_rows,
        )

    def largest(self, row: Dim) -> Scalar:
        return self.maximum[row] * LN_2

    def clear(self, k: Kernel, row: Dim) -> None:
        self.maximum[row] = LEAST
        with k.vector(PAGE) as lane:
            self.sums[row, lane] = 0.0
        with k.serial("c", self.values.shape[1]) as c, k.vector(PAGE) as lane:
            self.values[row, c, lane] = 0.0


def load_query(k: Kernel, rows: MatrixRows, row: Dim, query: Load, scale: float, softcap: float) -> None:
    """Load, scale and round a query. Fill its end with zeros, up to a whole number of steps of the unit. With a softcap, scores are
    multiplied by log2(e) after they are capped."""
    size, depth = query.buffer.shape[-1].const, rows.queries.shape[1].const
    *before, first = query.indices
    scaled, factor = k.local("scaled", PAGE), scale if softcap else scale * LOG2_E
    with k.serial("c", size // PAGE) as c:
        with k.vector(PAGE) as lane:
            scaled[lane] = cast(Load(query.buffer, (*before, first + c * PAGE + lane)), F32) * factor
        k.tile(RoundBf16(), rows.queries[row, c * PAGE], scaled[0])
    for at in range(size, depth, PAGE):
        with k.vector(PAGE) as lane:
            rows.queries[row, at + lane] = 0.0


def height_of(count: int) -> int:
    """Return the number of rows of a product: the largest divisor of `count` that the unit supports."""
    return next(h for h in range(HEIGHT, 0, -1) if count % h == 0)


WHOLE = Span(Dim.of(0), Dim.of(PANELS))
FIRST = Dim.of(0)  # the first buffer


@dataclass(frozen=True, slots=True)
class MatrixUnit:
    rows: MatrixRows
    cache: Array
    layer: Dim
    size: int
    value_size: int
    softcap: float
    height: int  # number of rows of a product
    keys: Array  # [panels, depth / 2, 2 * PANEL]: panels of keys
    loaded: Array  # [value panels, keys / 2, 2 * PANEL]: values of the same number of panels of keys
    products: Array  # [value panels, rows, PANEL]: products of weights and values
    rescale: Array  # [2, rows]: 2^(old maximum - new maximum), the factor of the earlier sums, for the rows of each buffer
    turned: TurnedValues | None  # the values, if pages have only keys

    @staticmethod
    @contextmanager
    def configured(
        k: Kernel,
        rows: MatrixRows,
        cache: Array,
        layer: Dim,
        sizes: tuple[int, int],
        softcap: float,
        height: int,
        panels: int,
        turned: TurnedValues | None,
    ) -> Generator[MatrixUnit]:
        """Configure the unit for products of `height` rows, with room for `panels` panels of keys and of values. `sizes` are those of keys
        and values. The configuration holds for the code that the caller writes inside this context."""
        (size, value_size), (depth, value_panels) = sizes, (depth_of(sizes[0]), -(-sizes[1] // PANEL))
        count = rows.block_rows
        with k.scope():
            keys = k.local("keys", panels, depth // 2, 2 * PANEL, dtype=BF16)
            loaded = k.local("taken", value_panels, panels * PANEL // 2, 2 * PANEL, dtype=BF16)
            products = k.local("products", value_panels, count, PANEL)
            rescale = k.local("rescale", 2, -(-count // PAGE) * PAGE)
            unit = MatrixUnit(rows, cache, layer, size, value_size, softcap, height, keys, loaded, products, rescale, turned)
            k.tile(unit.product(fresh=True).configuration)
            unit.pad(k)
            yield unit

    def pad(self, k: Kernel) -> None:
        """Write zeros to those parts of the buffers that keys and values do not fill."""
        panels, pairs, left, last_panel = self.keys.shape[0], self.size // 2, self.value_size % PANEL, self.loaded.shape[0] - 1
        rest = depth_of(self.size) // 2 - pairs
        if rest:
            with k.nest((panels, rest, 2 * PANEL_PAGES)) as (p, r, c), k.vector(PAGE) as lane:
                self.keys[p, pairs + r, c * PAGE + lane] = 0.0
        if left:
            with k.nest((self.loaded.shape[1], 2 * (PANEL - left) // PAGE)) as (r, c), k.vector(PAGE) as lane:
                self.loaded[last_panel, r, 2 * left + c * PAGE + lane] = 0.0

    def product(self, *, fresh: bool, later: Load | None = None) -> AmxBf16:
        return AmxBf16(self.height, PANEL, fresh=fresh, cached_panel=True, prefetching=later is not None)

    # --- scores --------------------------------------------------------------------------------------------------------

    def load_keys(self, k: Kernel, panel: Sequence[HeadPage], place: Dim) -> None:
        """Load a panel of keys. Row i of a page stores element i of all its keys."""
        for v, page in enumerate(panel):
            with k.serial("r", self.size // CHUNK) as r:
                first = r * (CHUNK * PAGE)
                self.prefetch(k, page, KEYS, first, CHUNK * PAGE)
                target, source = self.keys[place, r * (CHUNK // 2), 2 * PAGE * v], self.element(page, KEYS, first)
                k.tile(InterleavePairs(PAGE), target, source, dims=(2 * PANEL, PAGE))
            k.tile(AmxStayAwake())

    def multiply_keys(self, k: Kernel, panel: Dim, place: Dim, query: Dim, row: Dim, later: Load | None = None) -> None:
        """Compute the scores of `height` rows for a panel of keys. `query` is the first row of queries, and `row` of scores. If `later` is
        the place of a head's page, prefetch that page."""
        depth = depth_of(self.size)
        operands = self.rows.scores[0, panel, row, 0], self.rows.queries[query, 0], self.keys[place, 0, 0]
        ahead, share = ((), ()) if later is None else ((later,), (0, LINES))
        k.tile(self.product(fresh=True, later=later), *operands, *ahead, dims=(depth, depth, *share))

    # --- weights -------------------------------------------------------------------------------------------------------

    def cap(self, k: Kernel, buffer: Dim, count: Dim | int) -> None:
        """Cap the scores of `count` rows, if the model caps scores."""
        if self.softcap:
            with k.nest((count, PANELS, PANEL_PAGES)) as (m, panel, v), k.vector(PAGE) as lane:
                at, scores = v * PAGE + lane, self.rows.scores
                scores[buffer, panel, m, at] = capped(scores[buffer, panel, m, at], self.softcap) * LOG2_E

    def hide(
        self, k: Kernel, buffer: Dim, count: Dim | int, visible: Callable[[Dim], VisibleRange], start: Dim, span: Span = WHOLE
    ) -> None:
        """Set scores in the panels of `span` to -inf where a row does not see the key. `start` is the position of the block's first key."""
        scores = self.rows.scores
        with k.serial("m", count) as m:
            seen = visible(m)
            with span.panels(k) as panel, k.serial("v", PANEL_PAGES) as v, k.vector(PAGE) as lane:
                at = v * PAGE + lane
                scores[buffer, panel, m, at] = masked(seen, start + panel * PANEL + at, scores[buffer, panel, m, at])

    def update_softmax(self, k: Kernel, first: Dim, count: Dim | int) -> None:
        """Turn the scores of `count` rows in the first buffer into weights, and add the weights to `sums`. Set `rescale` to the factors of
        the earlier sums. `first` is the first row; its scores are in row 0."""
        k.tile(SoftmaxRows(self.rows.block_rows, PANELS), *self.softmax(Dim.of(0), first), dims=(count,))

    def softmax(self, buffer: Dim, first: Dim) -> tuple[Load, ...]:
        """Return the operands of the softmax of the rows in a buffer."""
        rows = self.rows
        block = rows.weights[buffer, 0, 0], rows.scores[buffer, 0, 0, 0]
        return *block, rows.maximum[first], rows.sums[first, 0], self.rescale[buffer, 0]

    # --- a block with many rows ----------------------------------------------------------------------------------------

    def attend(self, k: Kernel, count: Dim, seen: Callable[[Dim], Dim], prepare: Callable[[Dim, Dim], None]) -> None:
        """Add a block, whose keys and values are loaded, to `count` times `height` rows. Given the number of a product, `seen` returns how
        many panels its rows see, at least one. The softmax of some rows takes place while the unit multiplies those after and before them,
        in the other buffer. `prepare` changes the scores of a product, given its number and buffer, before their softmax."""
        rows, height, depth, zero = self.rows, self.height, depth_of(self.size), Dim.of(0)
        last, stage = count - 1, AmxAttend(height, PANELS, depth, self.products.shape[0].const)
        with k.serial("c", seen(zero)) as panel:
            self.multiply_keys(k, panel, panel, zero, zero)
        with k.serial("io", count) as io:
            buffer, other, later = io % 2, (io + 1) % 2, dim_min(io + 1, last)
            prepare(io, buffer)
            keys = rows.scores[other, 0, 0, 0], rows.queries[later * height, 0], self.keys[0, 0, 0]
            values = self.products[0, 0, 0], rows.weights[other, 0, 0], self.loaded[0, 0, 0]
            key_panels, value_panels = dim_min(1, last - io) * seen(later), dim_min(1, io) * self.products.shape[0]
            given = seen(io), key_panels, value_panels, seen(dim_max(0, io - 1))
            k.tile(stage, *self.softmax(buffer, io * height), *keys, *values, dims=given)
            with k.when(less(zero, io)):
                self.add_rows(k, (io - 1) * height, other)
        self.multiply_values(k, zero, Span(zero, seen(last)), zero, fresh=True, buffer=last % 2)
        self.add_rows(k, last * height, last % 2)

    def add_rows(self, k: Kernel, first: Dim, buffer: Dim) -> None:
        with k.serial("m", self.height) as m:
            self.add(k, m, first + m, buffer)

    # --- values --------------------------------------------------------------------------------------------------------

    def load_values(self, k: Kernel, panel: Sequence[HeadPage], place: Dim, seen: tuple[Dim, Dim] | None) -> None:
        """Load the values of a panel of keys. Write zeros for keys that are not between the positions `seen`; None means that all are."""
        for v, page in enumerate(panel):
            if self.turned is not None:
                self.turned.turn(k, page)
            for p, columns in self.value_panels(k):
                if self.turned is None:
                    self.prefetch(k, page, VALUES, p * (PANEL * PAGE), columns * PAGE)
                target, source = self.loaded[p, place * (PANEL // 2) + v * PAGE // 2, 0], self.value(page, p * PANEL)
                limits = () if seen is None else (seen[0] - page.start, seen[1] + 1 - page.start)
                dims = (2 * PANEL, self.value_size, *limits)
                k.tile(InterleavePairs(columns, masked=seen is not None), target, source, dims=dims)
            k.tile(AmxStayAwake())

    def value_panels(self, k: Kernel) -> Iterator[tuple[Dim, int]]:
        """Yield the index of each panel of elements of values, and its number of columns. The code that the caller's `for` emits becomes
        the body of a loop."""
        whole, left = divmod(self.value_size, PANEL)
        if whole:
            with k.serial("p", whole) as p:
                yield p, PANEL
        if left:
            yield Dim.of(whole), left

    def multiply_values(
        self, k: Kernel, row: Dim, span: Span, place: Dim, *, fresh: bool, later: Load | None = None, buffer: Dim = FIRST
    ) -> None:
        """Multiply the weights of `height` rows for the panels of `span` by the values at `place`. If `later` is the place of a head's
        page, `span` is one panel; prefetch that page."""
        with k.serial("p", self.products.shape[0]) as p:
            operands = self.products[p, row, 0], self.rows.weights[buffer, row, span.first * PANEL], self.loaded[p, place * (PANEL // 2), 0]
            ahead, share = ((), ()) if later is None else ((later,), (p * LINES, LINES))
            k.tile(self.product(fresh=fresh, later=later), *operands, *ahead, dims=(span.count * PANEL, BLOCK, *share))

    def clear_products(self, k: Kernel, count: Dim) -> None:
        with k.serial("p", self.products.shape[0]) as p, k.serial("m", count) as m:
            for v in range(PANEL_PAGES):
                with k.vector(PAGE) as lane:
                    self.products[p, m, v * PAGE + lane] = 0.0

    def add(self, k: Kernel, m: Dim, row: Dim, buffer: Dim = FIRST) -> None:
        """Rescale the weighted values of a row, and add the products of the current block to them."""
        values = self.rows.values
        with k.serial("c", self.value_size // PAGE) as c, k.vector(PAGE) as lane:
            product = self.products[c // PANEL_PAGES, m, c % PANEL_PAGES * PAGE + lane]
            values[row, c, lane] = fma(values[row, c, lane], self.rescale[buffer, m], product)

    def look_for_infinite(self, k: Kernel, found: Array, ranges: Sequence[tuple[Dim, Dim]]) -> None:
        """Make the first element of `found`, which is 0, NaN if a value of keys in the ranges is infinite or NaN. Such a value would affect
        even rows that do not see its key. A range is the first and the last key, counted from the beginning of the block; it may be empty.
        The code uses that x - x is 0 only for finite numbers."""
        panels, _, length = self.loaded.shape
        for low, high in ranges:
            first = k.let("pair", low // 2)
            with k.nest((high // 2 + 1 - first, panels, length // PAGE)) as (r, p, c), k.vector(PAGE) as lane:
                x = cast(self.loaded[p, first + r, c * PAGE + lane], F32)
                found[lane] += x - x
        fold_halves(k, found, operator.add)

    # --- helpers -------------------------------------------------------------------------------------------------------

    def prefetch(self, k: Kernel, page: HeadPage, half: int, first: Dim, length: int) -> None:
        prefetch(k, self.cache, self.layer, page, half, first, length)

    def element(self, page: HeadPage, half: int, index: Dim) -> Load:
        return self.cache[self.layer, half, page.page, page.kv_head, index]

    def value(self, page: HeadPage, element: Dim) -> Load:
        """Return the place of an element of the page's first value."""
        return self.element(page, VALUES, element) if self.turned is None else self.turned.element(page, Dim.of(0), element)


def depth_of(size: int) -> int:
    """Return the number of elements of a key, rounded up to whole steps of the unit."""
    return -(-size // PANEL) * PANEL
