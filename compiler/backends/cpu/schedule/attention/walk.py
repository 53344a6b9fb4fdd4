"""The loop of a work item over its keys (the walk), which is the same for all units, and what a unit is.

    for each split of the sequence, in order         a split may be an item of its own: then a later phase merges the splits
        for each block of the split                  (`Rows.add`)
            scores = queries * keys                  some pages at a time, each for all kv heads of the item
            weights = softmax(scores)                of a panel, or of the block; keys that a row does not see get weight 0
            sums += weights * values
        merge the split's softmax into that of the splits before it

A unit (`Unit`) multiplies with one kind of instructions: vectors (floats.py), exact products of integers (integers.py), or a matrix unit
(matrix.py). A unit consists of a few numbers, the order in which items read a block (`Order`), and how pages are loaded and multiplied
(`Rows`). A new format of pages, or a new instruction, needs a new unit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from compiler.backends.cpu.schedule.attention.blocks import Block, Cut, Span, each
from compiler.backends.cpu.schedule.attention.items import Item, Part
from compiler.backends.cpu.schedule.attention.operands import PagedOperands, Seen
from compiler.backends.cpu.schedule.attention.pages import F32, Cache, Head, HeadPage
from compiler.backends.cpu.schedule.attention.softmax import OnlineSoftmax, PartialSoftmax, PartialSoftmaxes, fill
from compiler.backends.cpu.schedule.folds import larger, spread_largest
from compiler.ir.dims import Dim, dim_max, dim_min
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, cast, const, exp, select
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES

# --- what a unit is ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which an item reads a block."""

    cut: Cut
    keys: int  # number of pages whose keys are multiplied at once
    values: int  # number of pages whose values are multiplied at once: a part of a panel, a panel, or the block
    heads: int = 1  # number of kv heads whose scores are computed at once
    by_panel: bool = False  # whether the softmax is updated after each panel, not once per block
    prefetches: bool = False  # whether reading pages prefetches the pages that are read next
    whole_apart: bool = False  # whether `Rows.add` adds blocks token by token unless all rows see them whole


@dataclass(frozen=True, slots=True)
class Rows(ABC):
    """The rows of an item (each is a query head of a token): their state, and how a unit computes with it."""

    item: Item
    order: Order
    cache: Cache
    softmax: OnlineSoftmax
    scores: Array  # [rows, pages of a block, PAGE], unless the unit has a softmax of its own

    @abstractmethod
    def load_query(self, k: Kernel, row: Dim, query: Callable[[Dim], Scalar]) -> None:
        """Scale and store the query of a row. `query` returns the element at an index, as f32."""

    @abstractmethod
    def multiply_keys(self, k: Kernel, pages: Sequence[HeadPage], count: int) -> None:
        """Compute the scores of `count` rows of each head for the keys of `pages`. This list has an entry for each page and head."""

    @abstractmethod
    def load_values(self, k: Kernel, pages: Sequence[HeadPage], seen: Seen | None) -> None:
        """Prepare the values of pages for products. `seen` says which keys rows see; None means all keys of the block."""

    @abstractmethod
    def multiply_values(self, k: Kernel, block: Block, head: Head, pages: Sequence[HeadPage], part: Part) -> None:
        """Add weighted values to a part of the rows of a head: the values of `pages`, or of the whole block if `pages` is empty.
        `load_values` has prepared them."""

    def weigh(self, k: Kernel, row: Dim, slot: Dim) -> Array:
        """Round the weights of a row for the page at `slot` of its block, if the unit rounds weights. Return the array of the weights to
        multiply."""
        return self.scores

    # --- a block -------------------------------------------------------------------------------------------------------

    def add(self, k: Kernel, block: Block) -> None:
        """Add a block of keys and values to the softmax of the rows that see it. If `whole_apart` of the order is set, add the block to all
        rows together only if all see the whole block, otherwise token by token."""
        item = self.item
        if not self.order.whole_apart:
            self.attend(k, block, Part(Dim.of(0), item.rows_per_kv.const, item.seen))
            return
        with k.when(~item.seen_by_all.lacks(block.start, block.end)):
            self.attend(k, block.whole, Part(Dim.of(0), item.rows_per_kv.const, None))
        with k.orelse(), item.tokens(k) as (row, seen), k.when(seen.overlaps(block.start, block.end)):
            self.attend(k, block, Part(row, item.group, seen))

    def attend(self, k: Kernel, block: Block, part: Part) -> None:
        """Add a block to a part of the rows of each kv head. Compute all scores of the block. Then, for the whole block or panel after
        panel, turn scores into weights, and add the weighted values."""
        order = self.order
        for pages in self.runs(k, block, KEYS, block.span):
            for heads in self.item.heads(k, part, order.heads):
                self.multiply_keys(k, [head.of(page) for page in pages for head in heads], part.count)
        for span in block.span.panels_apart(k) if order.by_panel else [block.span]:
            self.update_softmax(k, block, span, part)
            if order.values > order.cut.panel_pages:  # head by head
                for (head,) in self.item.heads(k, part):
                    for pages in self.runs(k, block, VALUES, span):
                        self.load_values(k, [head.of(page) for page in pages], part.seen)
                    self.multiply_values(k, block, head, [], part)
            else:  # pages after pages
                for pages in self.runs(k, block, VALUES, span):
                    for (head,) in self.item.heads(k, part):
                        of_head = [head.of(page) for page in pages]
                        self.load_values(k, of_head, part.seen)
                        self.multiply_values(k, block, head, of_head, part)

    def runs(self, k: Kernel, block: Block, half: int, span: Span) -> Iterator[list[HeadPage]]:
        """Emit a loop over a span, and yield once: the pages that an iteration reads at once. The code that the caller's `for` emits
        becomes the body of the loop."""
        panel_pages = self.order.cut.panel_pages
        at_once = min(panel_pages, self.order.keys if half == KEYS else self.order.values)
        with each(k, span.count * (panel_pages // at_once)) as v:
            pages = block.pages(k, span.first * panel_pages + v * at_once, at_once)
            yield block.prefetching(k, half, pages) if self.order.prefetches else pages

    # --- the softmax of a row ------------------------------------------------------------------------------------------

    def update_softmax(self, k: Kernel, block: Block, span: Span, part: Part) -> None:
        """Turn the scores of rows into weights."""
        for (head,) in self.item.heads(k, part):
            with k.serial("m", part.count) as m:
                self.update_row(k, block, span, head, head.row + m, part.seen)

    def update_row(self, k: Kernel, block: Block, span: Span, head: Head, row: Dim, seen: Seen | None) -> None:
        """Turn the scores of a row for a span of a block into weights, add the weights to the row's sums, and raise the row's maximum.
        `seen` is None if the row sees the whole block. With an 8-bit cache, then multiply each weight by the scale of its value. A weight
        of 0 stays 0, because the scale of a value that the row does not see may be NaN."""
        cut, scores, softmax = self.order.cut, self.scores, self.softmax
        if seen is not None:
            begin, end = (block.start + at * cut.panel for at in (span.first, span.end))
            with k.when(seen.lacks(begin, end)):
                for slot in span.pages(k, cut.panel_pages):
                    with k.vector(PAGE) as lane:
                        scores[row, slot, lane] = seen.hide(block.start + slot * PAGE + lane, scores[row, slot, lane])
        with k.scope():
            highest, added = k.local("highest", PAGE), k.local("added", PAGE)
            fill(k, highest, None, float("-inf"))
            for slot in span.pages(k, cut.panel_pages):
                with k.vector(PAGE) as lane:
                    highest[lane] = larger(highest[lane], scores[row, slot, lane])
            spread_largest(k, highest)
            with k.when(softmax.maximum[row, 0] < highest[0]):
                softmax.raise_maximum(k, row, highest)
            fill(k, added, None, 0.0)
            for slot in span.pages(k, cut.panel_pages):
                with k.vector(PAGE) as lane:
                    scores[row, slot, lane] = exp(scores[row, slot, lane] - softmax.maximum[row, lane])
                weights = self.weigh(k, row, slot)
                with k.vector(PAGE) as lane:
                    added[lane] += cast(weights[row, slot, lane], F32)
                if self.cache.scales is not None:
                    page = head.of(*block.pages(k, slot, 1))
                    with k.vector(PAGE) as lane:
                        weight = scores[row, slot, lane]
                        scores[row, slot, lane] = select(const(0.0, F32) < weight, weight * self.cache.scale(page, VALUES, lane), 0.0)
            with k.vector(PAGE) as lane:
                softmax.sums[row, lane] += added[lane]


@dataclass(frozen=True, slots=True)
class Unit:
    """The properties of one kind of instructions that the walk uses: the orders in which items read a block, the size of tiles, a function
    that allocates the rows of an item, and the number of tiles that an item joins."""

    token: Order
    tile: Order  # its splits have as many keys as those of `token`
    # Number of tokens of a tile. A single token is never computed as a tile, because a tile computes all splits on one thread, which is
    # slow for one token.
    tile_tokens: int
    rows: Callable[[Kernel, Item, Order], Rows]  # allocates the state of the rows of an item, in the current block of the kernel
    most_tiles: int = 1  # maximum number of adjacent tiles that an item joins
    slow_division: bool = False  # whether divisions would take a large share of the time, because products are fast

    @property
    def split(self) -> int:
        """The number of keys of a split."""
        return self.token.cut.keys * self.token.cut.blocks


# --- the walk ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Walk:
    """The loops of an item over the splits of its sequence and over the blocks of each split."""

    operands: PagedOperands
    unit: Unit

    def attend(self, k: Kernel, item: Item) -> None:
        """Compute attention for all rows of an item: compute the splits of the sequence in order, merge the softmax of each into that of
        the splits before it, and store the results."""
        joined = self.softmaxes(k.local, "joined", item.most_rows)
        with item.rows(k) as (row, _, head):
            joined.store(k, (row,), self.initial(head))
        with k.scope():
            rows = self.rows(k, item)
            with self.splits(k, item.seen) as split:
                self.add_split(k, item, rows, split)
                with item.rows_that_see(k, *self.bounds(split)) as row:
                    joined.merge(k, (row,), rows.softmax.partial(k, row))
        with item.rows(k) as (row, token, head):
            self.store_result(k, token, head, joined.at(row))

    def store_split(self, k: Kernel, item: Item, place: Dim, split: Dim, splits: PartialSoftmaxes) -> None:
        """Compute the softmax of a token over one split, and write it to workspace at `place`. Do nothing if the token sees no key of the
        split."""
        with k.when(item.seen.overlaps(*self.bounds(split))):
            rows = self.rows(k, item)
            self.add_split(k, item, rows, split)
            with item.rows(k) as (row, _, head):
                splits.store(k, (place, head, split), rows.softmax.partial(k, row))

    def merge_splits(self, k: Kernel, token: Dim, place: Dim, head: Dim, splits: PartialSoftmaxes) -> None:
        """Merge the softmaxes of a row over all splits of which the row sees a key, and store the result. An earlier phase wrote these
        softmaxes to workspace at `place`."""
        joined, row = self.softmaxes(k.local, "joined", 1), Dim.of(0)
        joined.store(k, (row,), self.initial(head))
        with k.scope():
            seen = self.operands.seen(k, token)
            with self.splits(k, seen) as split:
                joined.merge(k, (row,), splits.at(place, head, split))
        self.store_result(k, token, head, joined.at(row))

    def rows(self, k: Kernel, item: Item) -> Rows:
        """Allocate the rows of an item, and load their queries."""
        rows, queries = self.unit.rows(k, item, self.unit.tile if item.is_tile else self.unit.token), self.operands.queries
        with item.rows(k) as (row, token, head):
            rows.load_query(k, row, lambda at: cast(queries[token, head, at], F32))
        return rows

    @contextmanager
    def splits(self, k: Kernel, seen: Seen) -> Generator[Dim]:
        """Loop, in order, over the splits with keys that rows see."""
        first, last = (at // self.unit.split for at in (seen.low, seen.high))
        with k.serial("split", last + 1 - first) as split:
            yield first + split

    def bounds(self, split: Dim) -> tuple[Dim, Dim]:
        """Return the position of the first key of a split, and that of the first key after it."""
        begin, end = (n * self.unit.split for n in (split, split + 1))
        return begin, end

    def add_split(self, k: Kernel, item: Item, rows: Rows, split: Dim) -> None:
        """Reset the softmax of all rows of an item, and then add the blocks of a split in order."""
        cut, seen = rows.order.cut, item.seen
        with item.rows(k) as (row, _, _):
            rows.softmax.clear(k, row)
        begin = k.let("begin", dim_max(seen.low // cut.keys, split * cut.blocks))
        end = dim_min(seen.high // cut.keys + 1, split * cut.blocks + cut.blocks)
        with k.serial("b", end - begin) as b:
            rows.add(k, Block.make(k, item, cut, begin + b))

    # --- softmaxes -----------------------------------------------------------------------------------------------------

    def softmaxes(self, allocate: Callable[..., Array], name: str, *shape: Dim | int) -> PartialSoftmaxes:
        """Allocate an array of partial softmaxes of this shape, for the sizes of the operands: see `PartialSoftmaxes.allocate`."""
        return PartialSoftmaxes.allocate(allocate, name, *shape, parts=self.operands.parts, width=self.operands.width)

    def initial(self, head: Dim) -> PartialSoftmax:
        """Return the softmax with which merging begins. It contains no key, or only the head's sink, which is the score of a key without a
        value."""
        sinks, zero = self.operands.sinks, const(0.0, F32)
        if sinks is None:
            return PartialSoftmax(const(float("-inf"), F32), zero, lambda c, lane: zero)
        return PartialSoftmax(cast(sinks[head], F32), const(1.0, F32), lambda c, lane: zero)

    def store_result(self, k: Kernel, token: Dim, head: Dim, softmax: PartialSoftmax) -> None:
        """Store the result of a row: its weighted values, divided by the sum of its weights. If `slow_division` of the unit is set,
        multiply by the reciprocal of the sum instead."""
        out, width = self.operands.out, self.operands.width
        with k.scope():
            inverse = k.local("inverse", 1)
            if self.unit.slow_division:
                inverse[0] = const(1.0, F32) / softmax.total
            with k.serial("c", self.operands.parts) as c, k.vector(width) as lane:
                value = softmax.values(c, lane)
                value = value * inverse[0] if self.unit.slow_division else value / softmax.total
                out[token, head, c * width + lane] = cast(value, out.dtype)
