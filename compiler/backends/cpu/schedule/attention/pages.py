"""Pages of the KV cache, as the units (walk.py) read and prefetch them. A row is a query head of a token.

The keys of a page are stored as [size, PAGE], with the keys innermost, but its values as [PAGE, value size]: products with weights read one
value after another. If pages have only keys, whose beginnings are the values, a unit transposes the values of a page into the layout [PAGE,
value size] before it multiplies them by weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.attention.operands import I64, PagedOperands
from compiler.ir.dims import Dim
from compiler.ir.dtypes import DType
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.write import Array, Kernel, cast
from compiler.machine.intrinsics.prefetch import Prefetch
from compiler.machine.intrinsics.transpose import SIDE, Transpose
from compiler.machine.target import LINE_BYTES
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES

assert SIDE == PAGE

F32 = DType.F32
TURNED = 2  # number of pages whose transposed values are in memory at the same time


@dataclass(frozen=True, slots=True)
class NextPage:
    """The page to prefetch while another page is read. `half` is KEYS or VALUES: which of the two to prefetch. If `part` is 0 or 1, only
    the first or the second half of a head's keys or values is prefetched, evenly divided among the calls of `Cache.prefetch`."""

    half: Dim
    page: Dim
    part: int | None = None


@dataclass(frozen=True, slots=True)
class HeadPage:
    """The keys and values of one page for one kv head. The rows from `row` on attend to them."""

    page: Dim  # its number in the cache
    slot: Dim  # its index in its block
    start: Dim  # the position of its first key
    kv_head: Dim
    row: Dim
    next_page: NextPage | None = None

    def below(self, at: Dim) -> HeadPage:
        """Return the same page, but for the rows from `row` + `at` on."""
        return replace(self, row=self.row + at)


@dataclass(frozen=True, slots=True)
class Head:
    """A kv head, and the first of the rows that attend to it."""

    kv_head: Dim
    row: Dim

    def of(self, page: HeadPage) -> HeadPage:
        """Return the page for this kv head and the rows from `row` on."""
        return replace(page, kv_head=self.kv_head, row=self.row)


@dataclass(frozen=True, slots=True)
class Cache:
    """The pages of a layer. `size` and `value_size` are the numbers of elements of a key and of a value."""

    stored: Array
    scales: Array | None  # scales of an 8-bit cache
    layer: Dim
    size: int
    value_size: int
    turned: Array | None  # [TURNED, PAGE, value size]: transposed values of some pages, if pages have only keys

    @staticmethod
    def open(k: Kernel, operands: PagedOperands) -> Cache:
        """Return the pages of the layer that the operands name, with memory for transposed values if pages have only keys."""
        stored, (size, value_size) = operands.cache, (operands.size, operands.value_size)
        turned = None if operands.pages.has_values else k.local("turned", TURNED, PAGE, value_size, dtype=stored.dtype)
        return Cache(stored, operands.scales, k.let("layer", cast(operands.pages.layer, I64)), size, value_size, turned)

    def element(self, page: HeadPage, half: int, index: Dim | int = 0) -> Load:
        """Return an element of the keys or the values of a page; `half` is KEYS or VALUES."""
        return self.stored[self.layer, half, page.page, page.kv_head, index]

    def value(self, page: HeadPage, key: Dim | int, element: Dim) -> Load:
        """Return an element of the value of a key. `key` is the index of the key in the page. If pages have only keys, `turn` must have
        transposed this page."""
        if self.turned is not None:
            return self.turned[page.slot % TURNED, key, element]
        return self.element(page, VALUES, key * self.size + element)

    def scale(self, page: HeadPage, half: int, lane: Dim) -> Scalar:
        """Return the scale of a key or value of an 8-bit cache. If pages have only keys, a value has the scale of its key."""
        assert self.scales is not None, self.stored
        return cast(self.scales[self.layer, KEYS if self.turned is not None else half, page.page, page.kv_head, lane], F32)

    def turn(self, k: Kernel, page: HeadPage) -> None:
        """Transpose the values of a page into `turned`, if the page has only keys."""
        if self.turned is None:
            return
        place, (squares, left) = page.slot % TURNED, divmod(self.value_size, PAGE)
        with k.serial("r", squares) as r:
            source = self.element(page, KEYS, r * (PAGE * PAGE))
            k.tile(Transpose(self.stored.dtype.num_bytes), self.turned[place, 0, r * PAGE], source, dims=(self.value_size,))
        if left:
            with k.nest((left, PAGE)) as (r, key):
                element = squares * PAGE + r
                self.turned[place, key, element] = self.element(page, KEYS, element * PAGE + key)

    def prefetch(self, k: Kernel, page: HeadPage, half: int, first: Dim, length: int, again: tuple[Dim, Dim] | None = None) -> None:
        """Prefetch a part of the page that is read next: `length` elements from element `first`. A unit calls this when it reads the same
        part of the current page. If `part` of `next_page` is set, prefetch half as many elements. If the page has no `next_page`, do
        nothing. `again` is a kv head that is read soon, with 1 if this head is read in the next page, or 0 if in the current page. The same
        elements of this head are prefetched a second time."""
        after = page.next_page
        if after is None:
            return
        if after.part is not None:
            first, length = (first + after.part * self.stored.shape[4]) // 2, length // 2
        heads = [(after.half, after.page, page.kv_head)]
        if again is not None:
            kv_head, wraps = again
            heads.append((half + wraps * (after.half - half), page.page + wraps * (after.page - page.page), kv_head))
        for place in heads:
            for offset in range(0, length, LINE_BYTES // self.stored.dtype.num_bytes):
                k.tile(Prefetch(far=True), self.stored[self.layer, *place, first + offset])
