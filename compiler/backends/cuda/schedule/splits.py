"""What the schedules of attention on a GPU share: splits of keys, and the online softmax that merges them.

A split is SPLIT keys, beginning at a multiple of SPLIT in their sequence. Splits are merged in order. For up to FEW tokens, each split has
a block of its own, and the block that finishes last merges all splits of its token. For more tokens, one block computes all splits of a
token. Both ways compute the same, so a token has the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from compiler.ir.dims import Dim, ceil_div
from compiler.ir.dtypes import DType
from compiler.ir.loops.attention import Attention, Ragged
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, cast, const, exp, fma, halvings, less, maximum
from compiler.machine.intrinsics.arrive import Arrive
from compiler.ops.attention.kv_cache import PAGE

F32, I64 = DType.F32, DType.I64
LOWEST = float("-inf")
ZERO = const(0.0, F32)
SPLIT = Arrive.threads  # number of keys of a split, and of threads of a block
FEW = 8  # maximum number of tokens whose splits run in parallel
MOST_HEADS = 8  # maximum number of heads of a block
LANES = 16  # number of threads that reduce the scores of a row

State = tuple[Scalar, Scalar, Scalar]  # largest score, sum of weights, sum of weighted values


@dataclass(frozen=True, slots=True)
class Partial:
    """An array of online softmaxes. Each is over some of a row's keys."""

    top: Array
    weights: Array  # the sum of exp(score - top)
    means: Array  # the sum of weighted values, by row and element


def join(earlier: State, later: State) -> State:
    """Merge two online softmaxes over different keys into the softmax over all these keys."""
    top = maximum(earlier[0], later[0])
    a, b = exp(earlier[0] - top), exp(later[0] - top)
    return top, fma(later[1], b, earlier[1] * a), fma(later[2], b, earlier[2] * a)


class SplitAttention:
    """Writes the kernel of an attention node. A block computes some of the query heads of one kv head."""

    def __init__(self, node: Attention) -> None:
        self.node, self.k = node, Kernel()
        self.out, self.queries = self.k.arrays(node.out, node.queries)
        self.tokens, heads, size = self.queries.shape
        self.heads, self.size, self.value_size = heads.const, size.const, self.out.shape[2].const
        kv_heads = (node.keys.keys.shape[1] if isinstance(node.keys, Ragged) else node.keys.cache.shape[3]).const
        self.shared_heads = self.heads // kv_heads  # number of query heads that share a kv head
        self.block_heads = next(n for n in range(min(MOST_HEADS, self.shared_heads), 0, -1) if self.shared_heads % n == 0)
        self.groups = self.heads // self.block_heads

    @property
    def most_splits(self) -> Dim:
        source = self.node.keys
        return ceil_div(self.tokens if isinstance(source, Ragged) else source.tables.shape[1] * PAGE, SPLIT)

    def allocate_stored(self, few: Dim, splits: Dim) -> Partial:
        """Allocate memory that all blocks see for the softmax of each split, for few tokens."""
        k = self.k
        return Partial(
            k.workspace("tops", few, self.heads, splits),
            k.workspace("sums", few, self.heads, splits),
            k.workspace("means", few, self.heads, splits, self.value_size),
        )

    def begin(self, h: Dim) -> tuple[Scalar, Scalar]:
        """Return the largest score and the sum of weights before the first key. If the head has a sink, these are the sink's score and 1,
        because a sink is a key without a value."""
        if self.node.sinks is None:
            return const(LOWEST, F32), ZERO
        return cast(self.k.array(self.node.sinks)[h], F32), const(1.0, F32)

    def join_stored(self, t: Dim, h: Dim, j: Dim, splits: tuple[Dim, Dim], stored: Partial) -> None:
        """Merge all splits, and write element `j` of the mean. `splits` is the index of the first split and the number of splits."""
        k = self.k
        own, after = k.local("own", 3), k.local("after", 3)
        own[0], own[1] = self.begin(h)
        own[2] = 0.0
        with k.serial("n", splits[1]) as n:
            split = splits[0] + n
            found = stored.top[t, h, split], stored.weights[t, h, split], stored.means[t, h, split, j]
            after[0], after[1], after[2] = join((own[0], own[1], own[2]), found)
            for i in range(3):
                own[i] = after[i]
        self.out[t, h, j] = cast(own[2] / own[1], self.out.dtype)

    @contextmanager
    def own_elements(self, i: Dim, size: int | None = None) -> Generator[Dim]:
        """Loop over the elements of a value that a thread computes, or over its share of `size` elements."""
        size = self.value_size if size is None else size
        with self.k.serial("u", -(-size // SPLIT)) as u:
            j = i + u * SPLIT
            with self.k.when(less(j, size)):
                yield j

    def fold(self, scores: Array, lanes: Array, result: Array, rows: int, combine: Callable[[Scalar, Scalar], Scalar]) -> None:
        """Reduce the scores of each row. First each lane combines the scores that are LANES apart; then halves of the lanes are
        combined."""
        k = self.k
        with self._lanes_of(rows, LANES) as (g, lane):
            total: Scalar = scores[g, lane]
            for distance in range(LANES, SPLIT, LANES):
                total = combine(total, scores[g, lane + distance])
            lanes[g, lane] = total
        for half in halvings(LANES):
            with self._lanes_of(rows, half) as (g, lane):
                lanes[g, lane] = combine(lanes[g, lane], lanes[g, lane + half])
        with k.threads("g", rows) as g:
            result[g] = lanes[g, 0]

    @contextmanager
    def _lanes_of(self, rows: int, count: int) -> Generator[tuple[Dim, Dim]]:
        """Distribute `count` lanes of each row among threads."""
        k, at_once = self.k, SPLIT // count
        with k.threads("i", min(rows, at_once) * count) as i, k.serial("m", -(-rows // at_once)) as m:
            g = m * at_once + i // count
            with k.when(less(g, rows)) if rows > at_once and rows % at_once else nullcontext():
                yield g, i % count
