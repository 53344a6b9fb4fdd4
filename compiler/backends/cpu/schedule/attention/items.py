"""The work items of paged attention: which rows (query heads of tokens) a thread computes together, and loops over these rows."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import lcm

from compiler.backends.cpu.schedule.attention.operands import PagedOperands, Seen
from compiler.backends.cpu.schedule.attention.pages import Head
from compiler.ir.dims import Dim
from compiler.ir.loops.functions import ReduceFn
from compiler.ir.loops.write import Kernel

TILE_ROWS = 32  # approximate number of rows of a tile


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of each kv head of an item: those of one token, or all. A block of keys and values is added to the softmax of these rows in
    one pass."""

    row: Dim  # the first row, counted from the first row of a kv head
    count: int
    seen: Seen | None  # the positions that at least one of these rows sees; None: all of them see the whole block


@dataclass(frozen=True, slots=True)
class Item:
    """Rows that a thread computes together: query heads of adjacent tokens of a sequence. Heads that share a kv head are adjacent. An item
    is either one token with one or more kv heads, or one or more adjacent tiles: several tokens with one kv head. A tile at the end of the
    batch may not be full: rows of missing tokens compute the last token again."""

    operands: PagedOperands
    sequence: Dim
    first: Dim  # index of the first token in the batch
    num_tokens: Dim
    kv_first: Dim  # the first of the item's kv heads, which are adjacent
    kv_count: Dim
    seen: Seen  # the positions that at least one token sees
    seen_by_all: Seen  # the positions that all tokens see
    most_rows: int  # maximum number of rows of an item of this kind
    is_tile: bool

    @staticmethod
    def token(k: Kernel, operands: PagedOperands, number: Dim, kv_first: Dim, kv_count: Dim) -> Item:
        """Make the item of token `number` of the batch, with `kv_count` kv heads from `kv_first` on."""
        sequence, seen = operands.sequence(k, number), operands.seen(k, number)
        return Item(operands, sequence, number, Dim.of(1), kv_first, kv_count, seen, seen, operands.heads, is_tile=False)

    @staticmethod
    def tile(k: Kernel, operands: PagedOperands, first: Dim, num_tokens: Dim, kv_head: Dim, most_tokens: int) -> Item:
        """Make the item of one or more tiles with one kv head: `num_tokens` tokens, at most `most_tokens`, from token `first` of the batch
        on. `num_tokens` also counts tokens after the end of the batch."""
        least, most = (operands.extreme_seen(k, first, num_tokens, fn) for fn in (ReduceFn.MIN, ReduceFn.MAX))
        seen, seen_by_all = replace(most, low=least.low), replace(least, low=most.low)
        sequence, rows = operands.sequence(k, first), most_tokens * operands.group
        return Item(operands, sequence, first, num_tokens, kv_head, Dim.of(1), seen, seen_by_all, rows, is_tile=True)

    @property
    def group(self) -> int:
        return self.operands.group

    @property
    def rows_per_kv(self) -> Dim:
        """The number of rows that attend to a kv head."""
        return self.num_tokens * self.group

    @contextmanager
    def each_kv(self, k: Kernel, step: int = 1) -> Generator[tuple[Dim, Dim]]:
        """Loop over the kv heads, or over each `step`-th of them. Yield the kv head and the first row that attends to it. A tile has one kv
        head, so no loop is written."""
        if self.is_tile:
            yield self.kv_first, Dim.of(0)
            return
        with k.serial("kv", self.kv_count // step) as kv:
            yield self.kv_first + kv * step, kv * (step * self.group)

    def heads(self, k: Kernel, part: Part, step: int = 1) -> Iterator[list[Head]]:
        """Loop over the kv heads, `step` at a time. Yield these heads, each with its first row in the part. The code that the caller's
        `for` emits becomes the body of the loop."""
        with self.each_kv(k, step) as (kv, row):
            yield [Head(kv + h, row + part.row + h * self.group) for h in range(step)]

    @contextmanager
    def tokens(self, k: Kernel) -> Generator[tuple[Dim, Seen]]:
        """Loop over the tokens. Yield the first row of each token, counted from the first row of a kv head, and the positions that the
        token sees. There is no loop if the item is a single token."""
        if not self.is_tile:
            yield Dim.of(0), self.seen
            return
        with k.serial("i", self.num_tokens) as i:
            yield i * self.group, self.seen_by_row(k, i * self.group)

    def seen_by_row(self, k: Kernel, row: Dim) -> Seen:
        """Return the positions that a row sees. `row` is counted from the first row of its kv head."""
        if not self.is_tile:
            return self.seen
        token = self.operands.token_of(self.first, row // self.group)
        return self.operands.seen(k, token)

    @contextmanager
    def rows(self, k: Kernel) -> Generator[tuple[Dim, Dim, Dim]]:
        """Loop over the rows. Yield each row with its token and its query head."""
        with self.each_kv(k) as (kv_head, first), k.serial("i", self.num_tokens) as i, k.serial("g", self.group) as g:
            yield first + i * self.group + g, self.operands.token_of(self.first, i), kv_head * self.group + g

    @contextmanager
    def rows_that_see(self, k: Kernel, begin: Dim, end: Dim) -> Generator[Dim]:
        """Loop over the rows that see any of the positions `begin` to `end` - 1."""
        with (
            self.each_kv(k) as (_, first),
            self.tokens(k) as (row, seen),
            k.when(seen.overlaps(begin, end)),
            k.serial("g", self.group) as g,
        ):
            yield first + row + g


def row_tiles(k: Kernel, count: int, most: int) -> Iterator[tuple[Dim, int]]:
    """Yield register tiles (first row, number of rows) that cover `count` rows: tiles of `most` rows, then smaller tiles for the rest. A
    loop in the kernel covers all tiles of `most` rows, so the caller's `for` emits the code of these tiles once. The `for` emits the code
    of each smaller tile separately."""
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


def tokens_of_tile(operands: PagedOperands, register_rows: int) -> int:
    """Return the number of tokens of a tile. The rows of a tile fill whole register tiles. A tile has at most TILE_ROWS rows, or fewer if
    the sums of so many rows would not stay in the first-level cache. But a tile never has fewer rows than the smallest number of whole
    tokens that fills whole register tiles. The number of tokens may be 1, if many query heads share a kv head; then no tokens are computed
    as a tile (paged.py)."""
    rows = lcm(operands.group, register_rows)
    return rows * max(1, min(TILE_ROWS, 4096 // operands.size) // rows) // operands.group
