"""The data of the walks of paged attention: the softmax state of rows, the page that is read for them, and the visible keys.

A row is a query head of a token.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, exp, less_equal, select
from compiler.machine.intrinsics.prefetch import Prefetch
from compiler.machine.target import LINE_BYTES
from compiler.ops.attention.kv_cache import PAGE

PAGES = 2  # number of pages per block
BLOCK = PAGES * PAGE  # number of keys per block

F32 = DType.F32


@dataclass(frozen=True, slots=True)
class Rows:
    """The state of the online softmax of some rows, in the thread's own memory."""

    queries: Array  # [rows, size], scaled
    scores: Array  # [rows, pages, PAGE]: scores of the current pages, which their exponentials replace
    rounded: Array | None  # the exponentials rounded to bf16; None: products multiply them in f32
    maximum: Array  # [rows, PAGE]: the largest score so far, in every lane
    sums: Array  # [rows, PAGE]: sums of the weights so far, with a lane per key of a page
    values: Array  # [rows, parts, width]: the weighted values so far

    @staticmethod
    def allocate(k: Kernel, count: int, pages: int, size: int, value_size: int, width: int, factors: DType) -> Rows:
        """Allocate the state. `factors` is the element type of queries and weights, in products with pages."""
        return Rows(
            k.local("queries", count, size, dtype=factors),
            k.local("scores", count, pages, PAGE),
            None if factors is F32 else k.local("weights", count, pages, PAGE, dtype=factors),
            k.local("maximum", count, PAGE),
            k.local("sums", count, PAGE),
            k.local("values", count, value_size // width, width),
        )

    @property
    def weights(self) -> Array:
        """The weights that products multiply by values."""
        return self.scores if self.rounded is None else self.rounded

    @property
    def least(self) -> float:
        """The maximum before the first key."""
        return float("-inf")

    def largest(self, row: Dim) -> Scalar:
        """Return the largest score of a row."""
        return self.maximum[row, 0]

    def clear(self, k: Kernel, row: Dim) -> None:
        _, parts, width = self.values.shape
        with k.vector(PAGE) as lane:
            self.maximum[row, lane] = self.least
        with k.vector(PAGE) as lane:
            self.sums[row, lane] = 0.0
        with k.serial("c", parts) as c, k.vector(width.const) as lane:
            self.values[row, c, lane] = 0.0

    def raise_maximum(self, k: Kernel, row: Dim, highest: Array) -> None:
        """Raise the maximum, and rescale the sums so far from the old maximum to the new one."""
        (_, parts, width), rescale = self.values.shape, k.local("rescale", PAGE)
        with k.vector(PAGE) as lane:
            rescale[lane] = exp(self.maximum[row, lane] - highest[lane])
        with k.vector(PAGE) as lane:
            self.maximum[row, lane] = highest[lane]
        with k.vector(PAGE) as lane:
            self.sums[row, lane] = self.sums[row, lane] * rescale[lane]
        with k.serial("c", parts) as c, k.vector(width.const) as lane:
            self.values[row, c, lane] = self.values[row, c, lane] * rescale[lane]


@dataclass(frozen=True, slots=True)
class NextPage:
    """The page to prefetch while another page is read. `half` says which half of it to prefetch: KEYS or VALUES. If `part` is 0 or 1, only
    the first or second part of a head's keys or values is prefetched, evenly."""

    half: Dim
    page: Dim
    part: int | None = None


@dataclass(frozen=True, slots=True)
class NextHead:
    """A kv head that is read soon: in the next page if `wraps` is 1, in the current page if it is 0."""

    kv_head: Dim
    wraps: Dim


@dataclass(frozen=True, slots=True)
class HeadPage:
    """A page of one kv head. The rows from `row` on read the page. Their scores for the keys of the page are at index `slot`."""

    row: Dim
    kv_head: Dim
    page: Dim
    slot: Dim
    start: Dim  # the position of the page's first key
    next_page: NextPage | None = None
    next_head: NextHead | None = None


@dataclass(frozen=True, slots=True)
class VisibleRange:
    """The positions that a token attends to: `low` to `high`."""

    low: Dim
    high: Dim
    clipped_low: bool  # whether a page may contain keys before `low`, as with sliding-window attention


# --- helpers -----------------------------------------------------------------------------------------------------------


def prefetch(k: Kernel, cache: Array, layer: Dim, page: HeadPage, half: int, first: Dim, length: int) -> None:
    """Prefetch a part of the page that is read next: `length` elements from element `first`. A walk calls this when it reads the same part
    of the current page."""
    after, head = page.next_page, page.next_head
    if after is None:
        return
    if after.part is not None:
        first, length = (first + after.part * cache.shape[4]) // 2, length // 2
    heads = [(after.half, after.page, page.kv_head)]
    if head is not None:
        heads.append((half + head.wraps * (after.half - half), page.page + head.wraps * (after.page - page.page), head.kv_head))
    for place in heads:
        for offset in range(0, length, LINE_BYTES // cache.dtype.num_bytes):
            k.tile(Prefetch(far=True), cache[layer, *place, first + offset])


def row_tiles(k: Kernel, count: int, most: int) -> Iterator[tuple[Dim, int]]:
    """Yield register tiles (first row, number of rows) that cover `count` rows: tiles of `most` rows, then smaller tiles for the rest.
    A loop in the kernel covers all tiles of `most` rows, so the caller's `for` emits their code once. It emits the code of each smaller
    tile separately."""
    whole = count // most
    if whole:
        with k.serial("io", whole) as io:
            yield io * most, most
    at, size = whole * most, most
    while at < count:
        while size > count - at:
            size //= 2
        yield Dim.of(at), size
        at += size


def masked(visible: VisibleRange, key: Dim, score: Scalar) -> Scalar:
    """Return the score of a visible key, or -inf for a key that is not visible."""
    inside = less_equal(key, visible.high)
    if visible.clipped_low:
        inside = inside & less_equal(visible.low, key)
    return select(inside, score, float("-inf"))


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a block of keys that some row sees: panels `first` to `end` - 1."""

    first: Dim
    end: Dim

    @staticmethod
    def seen(k: Kernel, start: Dim, low: Dim, high: Dim, columns: int, count: int, *, has_window: bool) -> Span:
        """Return the span of a block that begins at position `start` and has `count` panels of `columns` keys, if rows see positions `low`
        to `high`. Without a window, they see the beginning of every block."""
        first = k.let("first", dim_max(0, low - start) // columns) if has_window else Dim.of(0)
        return Span(first, k.let("end", dim_min(count, ceil_div(high + 1 - start, columns)), count))

    @property
    def count(self) -> Dim:
        return self.end - self.first

    @contextmanager
    def panels(self, k: Kernel) -> Generator[Dim]:
        with k.serial("c", self.count) as c:
            yield self.first + c
