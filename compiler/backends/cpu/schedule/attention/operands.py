"""The operands of paged attention: their sizes, the tokens and pages of sequences, and the keys that a row (a query head of a token)
sees."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.dims import Dim, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.attention import Attention, Paged
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import ReduceFn
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, cast, fold, less, less_equal, select
from compiler.ops.attention.kv_cache import PAGE
from compiler.ops.attention.reach import FIRST, first_of_window, first_position, has_window, last_position

I64 = DType.I64


@dataclass(frozen=True, slots=True)
class Seen:
    """Positions `low` to `high`: those that a row sees, or those that at least one of several rows sees, or those that all of them see."""

    low: Dim
    high: Dim
    has_window: bool  # whether there may be keys before `low`, which are not seen

    def overlaps(self, begin: Dim, end: Dim) -> Scalar:
        """Return whether any of the positions `begin` to `end` - 1 is seen."""
        return less_equal(begin, self.high) & less(self.low, end)

    def lacks(self, begin: Dim, end: Dim) -> Scalar:
        """Return whether any of the positions `begin` to `end` - 1 is not seen. Without a window, all rows see their sequence from its
        beginning, so `begin` does not matter."""
        late = less(self.high + 1, end)
        return late | less(begin, self.low) if self.has_window else late

    def hide(self, position: Dim, score: Scalar) -> Scalar:
        """Return the score of a key that is seen, or -inf for any other key."""
        inside = less_equal(position, self.high)
        if self.has_window:
            inside = inside & less_equal(self.low, position)
        return select(inside, score, float("-inf"))


@dataclass(frozen=True, slots=True)
class PagedOperands:
    """The operands of attention over pages, as arrays of the kernel: see `Attention` and `Paged` of compiler/ir/loops/attention.py."""

    node: Attention
    pages: Paged
    queries: Array  # [tokens, heads, size]
    sequences: Array  # [tokens]: the sequence of each token
    positions: Array  # [tokens] or [tokens, 2]: the last position that each token sees, or the first and the last one
    cache: Array  # keys and values: see compiler/ops/attention/kv_cache.py
    tables: Array  # [sequences, pages]: the pages of each sequence
    scales: Array | None  # [layers, 2 or 1, pages, kv_heads, PAGE]: scales of an 8-bit cache
    sinks: Array | None  # [heads]: for each head, the score of a key without a value
    out: Array  # [tokens, heads, size of a value]

    @staticmethod
    def of(k: Kernel, node: Attention, pages: Paged, positions: Buffer) -> PagedOperands:
        """Return the operands as arrays. `positions` are those of the node, which a paged attention always has."""
        scales, sinks = (None if buffer is None else k.array(buffer) for buffer in (pages.scales, node.sinks))
        queries, sequences, positions_, cache, tables = k.arrays(node.queries, node.sequences, positions, pages.cache, pages.tables)
        return PagedOperands(node, pages, queries, sequences, positions_, cache, tables, scales, sinks, k.array(node.out))

    # --- sizes ---------------------------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> Dim:
        return self.queries.shape[0]

    @property
    def heads(self) -> int:
        return self.queries.shape[1].const

    @property
    def kv_heads(self) -> int:
        return self.cache.shape[3].const

    @property
    def group(self) -> int:
        """The number of query heads per kv head."""
        return self.heads // self.kv_heads

    @property
    def size(self) -> int:
        """The number of elements of a query or a key."""
        return self.queries.shape[2].const

    @property
    def value_size(self) -> int:
        return self.out.shape[2].const

    @property
    def width(self) -> int:
        """The number of lanes of a vector of values: the largest power of two up to PAGE that divides the sizes of keys and values."""
        width = PAGE
        while self.size % width or self.value_size % width:
            width //= 2
        return width

    @property
    def parts(self) -> int:
        """The number of vectors of a value."""
        return self.value_size // self.width

    @property
    def fits_pairs(self) -> bool:
        """Whether products may multiply pairs of bf16: the program lets them round queries and weights, pages hold bf16, and the sizes of
        keys and values are multiples of PAGE."""
        return not self.node.exact and self.cache.dtype is DType.BF16 and self.size % PAGE == self.value_size % PAGE == 0

    # --- tokens and pages ----------------------------------------------------------------------------------------------

    def sequence(self, k: Kernel, token: Dim) -> Dim:
        """Return the number of the sequence of a token."""
        return k.let("s", cast(self.sequences[token], I64))

    def extreme_position(self, first: Dim, count: Dim, fn: ReduceFn) -> Scalar:
        """Return the smallest or the largest (`fn`) last position that any of `count` tokens from token `first` on sees. Leave out tokens
        beyond the end of the batch."""
        return fold(fn, (self.tokens_from(first, count),), lambda i: last_position(self.positions, first + i))

    def token_of(self, first: Dim, i: Dim) -> Dim:
        """Return the index of token `first` + `i` in the batch, or of the last token if the batch has fewer tokens."""
        return dim_min(first + i, self.num_tokens - 1)

    def tokens_from(self, first: Dim, count: Dim) -> Dim:
        """Return how many of `count` tokens from token `first` on exist."""
        return dim_min(count, self.num_tokens - first)

    def seen(self, k: Kernel, token: Dim) -> Seen:
        """Return the positions that a token sees."""
        last = k.let("position", last_position(self.positions, token))
        first = first_position(k, self.node, self.positions, token, last)
        return Seen(k.let("low", first) if self.node.window else first, last, has_window(self.node))

    def extreme_seen(self, k: Kernel, first: Dim, count: Dim, fn: ReduceFn) -> Seen:
        """Return the smallest or the largest (`fn`) first position that any of `count` tokens from token `first` on sees, and the smallest
        or the largest last position."""
        last = k.let("position", self.extreme_position(first, count, fn))
        if self.node.window or not has_window(self.node):
            low = first_of_window(self.node, last)
        else:
            low = fold(fn, (self.tokens_from(first, count),), lambda i: cast(self.positions[first + i, FIRST], I64))
        return Seen(k.let("low", low) if has_window(self.node) else Dim.of(0), last, has_window(self.node))

    def page(self, k: Kernel, sequence: Dim, index: Dim, seen: Seen) -> Dim:
        """Return the number, in the cache, of page `index` of a sequence. If no key of this page is in `seen`, take the nearest page that
        has a key in `seen`."""
        index = dim_min(index, seen.high // PAGE)
        index = dim_max(index, seen.low // PAGE) if seen.has_window else index
        return k.let("page", cast(self.tables[sequence, index], I64))
