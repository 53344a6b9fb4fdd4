"""The walk of a block over the splits of the keys that its rows see.

The weight of a key is exp(score - top), where top is the largest score. The weight is computed as a power of 2, because GPUs have an
instruction for powers of 2: a score times `unit` is an exponent of 2 (a logarithm to base 2), and each `top` is kept as such an exponent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from itertools import islice

import numpy as np

from compiler.backends.cuda.schedule.hold import at_once, hold
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.attention import Attention, Ragged
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.write import (
    Array,
    Kernel,
    cast,
    const,
    equal,
    exp2,
    fma,
    halvings,
    index,
    less,
    less_equal,
    maximum,
    not_equal,
    select,
)
from compiler.llvm.ex2 import LOG2_E
from compiler.machine.intrinsics.arrive import Arrive
from compiler.ops.attention.kv_cache import PAGE
from compiler.ops.attention.plain import capped, relative

F32, I32, I64 = DType.F32, DType.I32, DType.I64
LOWEST = float("-inf")
ZERO = const(0.0, F32)
SPLIT = Arrive.threads  # number of keys of a split, and of threads of a block
FEW = 8  # maximum number of tokens whose splits run in parallel
MOST_HEADS = 8  # maximum number of heads of a block
LANES = 16  # number of threads that reduce the scores of a row
ROWS_AT_ONCE, MEANS_AT_ONCE = 4, 16  # maximum numbers of rows whose scores, and whose means, a thread holds in registers at once
LANE_PITCH = LANES + 1  # distance between rows of `lanes`, so that threads that each read a row use different banks

State = tuple[Scalar, Scalar, Scalar]  # top, sum of weights, sum of weighted values


@dataclass(frozen=True, slots=True)
class Partial:
    """An array of online softmaxes. Each softmax covers some of a row's keys."""

    top: Array  # the largest score, as a logarithm to base 2
    weights: Array  # the sum of weights
    means: Array  # the sum of weighted values, by row and element


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent tokens of one sequence, with a group of heads."""

    token: Dim  # index of the first token
    group: Dim  # index of the group of heads
    count: Dim  # number of tokens
    sequence: Dim
    low: Dim  # the first position that a token of the run sees
    high: Dim  # one past the last position that a token of the run sees
    start: Dim  # the index of the sequence's first key in concatenated texts; 0 for keys in pages
    layer: Dim  # the layer of the cache

    @property
    def first_split(self) -> Dim:
        """The number of the first split that a token of the run sees. Splits are numbered from the beginning of the sequence."""
        return self.low // SPLIT

    @property
    def num_splits(self) -> Dim:
        """The number of splits from the first to the last one of which a token of the run sees a key."""
        return ceil_div(self.high, SPLIT) - self.first_split


class Walk(ABC):
    """Writes the kernel of an attention node. Subclasses are units: they allocate shared memory for the rows of a block, find runs, and
    compute splits."""

    row_counts: tuple[int, ...]  # the numbers of rows of a block for which there is code; a run uses the first that suffices
    rows: Array  # [rows, pitch]: the queries
    scores: Array  # [rows, pitch]: the scores of a split, then its weights
    lanes: Array  # [rows, LANE_PITCH]: the largest score, then the sum of weights, of the keys of each lane
    joined: Partial  # the softmax over all splits so far
    found: Partial  # the softmax over the current split
    factors: Array  # [2, rows]: the factors of `joined` and of `found` when they are joined

    def __init__(self, node: Attention) -> None:
        """Compute the sizes of heads, the number of heads of a block, and the factor `unit` that turns scores into logarithms to base 2."""
        self.node, self.k = node, Kernel()
        self.out, self.queries = self.k.arrays(node.out, node.queries)
        self.tokens, heads, size = self.queries.shape
        self.heads, self.size, self.value_size = heads.const, size.const, self.out.shape[2].const
        kv_heads = (node.keys.keys.shape[1] if isinstance(node.keys, Ragged) else node.keys.cache.shape[3]).const
        self.shared_heads = self.heads // kv_heads  # number of query heads that share a kv head
        self.block_heads = next(n for n in range(min(MOST_HEADS, self.shared_heads), 0, -1) if self.shared_heads % n == 0)
        self.groups, self.is_few = self.heads // self.block_heads, less(self.tokens, FEW + 1)
        # If scores are neither capped nor biased, and `scale` is positive, a score is the product of a query and a key: `unit` scales it.
        self.is_plain = not node.softcap and node.bias is None and node.scale > 0
        self.unit = float(np.float32(LOG2_E * (node.scale if self.is_plain else 1.0)))

    # --- what a unit computes ------------------------------------------------------------------------------------------

    @abstractmethod
    def begins_run(self, t: Dim, group: Dim) -> Scalar:
        """Return whether this walk computes a run that begins at token `t`. The result is used only if there are more than FEW tokens;
        otherwise every token is a run."""

    @abstractmethod
    def allocate(self) -> None:
        """Allocate shared memory."""

    @abstractmethod
    def find_run(self, t: Dim, group: Dim) -> Run:
        """Find the run that begins at token `t`, for a group of heads."""

    @abstractmethod
    def add_split(self, run: Run, rows: int, split: Dim) -> None:
        """Compute the softmax of a split, and join it with the splits before it."""

    # --- blocks --------------------------------------------------------------------------------------------------------

    @property
    def most_splits(self) -> Dim:
        """The largest number of splits of a sequence."""
        source = self.node.keys
        return ceil_div(self.tokens if isinstance(source, Ragged) else source.tables.shape[1] * PAGE, SPLIT)

    def body(self) -> Stmt:
        """Write the kernel, and return it as a statement."""
        self.write_blocks(self.stored())
        return self.k.body()

    def stored(self) -> Partial:
        """Allocate memory for the softmaxes of the splits of few tokens, which run in parallel."""
        k, shape = self.k, (dim_min(self.tokens, FEW), self.heads, self.most_splits)
        return Partial(k.workspace("tops", *shape), k.workspace("sums", *shape), k.workspace("means", *shape, self.value_size))

    @property
    def is_many(self) -> Dim:
        """0 if there are few tokens, otherwise 1."""
        return dim_min(1, self.tokens // (FEW + 1))

    @property
    def few_items(self) -> Dim:
        """The maximum number of splits, for all tokens and groups of heads, if there are few tokens, otherwise 0."""
        return dim_min(self.tokens, FEW) * self.groups * self.most_splits * (1 - self.is_many)

    @property
    def num_items(self) -> Dim:
        """The number of items of `write_item`: splits if there are few tokens, otherwise tokens at which a run may begin, in both cases for
        all groups of heads."""
        return dim_max(self.few_items, self.tokens * self.groups)

    def write_blocks(self, stored: Partial) -> None:
        """Write a launch with a block for each item."""
        arrived = self.counters()
        with self.k.grid("b", self.num_items) as b:
            self.write_item(b, stored, arrived)

    def counters(self) -> Array:
        """Allocate counters of the splits that have been computed. Each of up to FEW tokens has one counter per group of heads."""
        return self.k.counters("arrived", FEW, self.groups)

    def write_item(self, item: Dim, stored: Partial, arrived: Array) -> None:
        """Write what a block does for an item: a split of a token if there are few tokens, otherwise a run. The block does nothing if no
        run begins at its item, or if the token sees no key of the split. If there are few tokens, the softmax of a split is written to
        `stored`, and `arrived` counts the splits of each token that are computed."""
        k, splits = self.k, self.most_splits
        split, t, group = k.unravel(item, [("split", self.num_items), ("t", self.tokens), ("group", Dim.of(self.groups))])
        with k.when(select(self.is_few, less(split, splits), less(split, 1) & self.begins_run(t, group))):
            self.allocate()
            run = self.find_run(t, group)
            first = k.let("begin", select(self.is_few, index(split), index(run.first_split)), splits)
            count = k.let("num", select(self.is_few, const(1, I64), index(run.num_splits)), splits)
            with k.when(less(first, ceil_div(run.high, SPLIT)) & less_equal(run.first_split, first)):
                least, *more = self.row_counts
                with k.when(less_equal(run.count * self.block_heads, least)) if more else nullcontext():
                    self._attend(run, least, (first, count), stored, arrived)
                for rows in more:
                    with k.orelse():
                        self._attend(run, rows, (first, count), stored, arrived)

    def _attend(self, run: Run, rows: int, splits: tuple[Dim, Dim], stored: Partial, arrived: Array) -> None:
        """Compute some adjacent splits of a run; `splits` are the first one and their number. Write the result or, if there are few tokens,
        the softmax of the only split."""
        k, joined, (first, count) = self.k, self.joined, splits
        group = at_once(rows)
        with k.threads("i", SPLIT) as i:
            with self.own_elements(i, self.size) as j, k.serial("m", rows // group) as m:
                numbers = [m * group + u for u in range(group)]
                tokens = [dim_min(run.token + self.slot(r), self.tokens - 1) for r in numbers]
                queries = hold(k, [self.queries[token, self.head(run, r), j] for token, r in zip(tokens, numbers, strict=True)])
                for r, query in zip(numbers, queries, strict=True):
                    self.rows[r, j] = cast(query, self.rows.dtype)
            with self.own_elements(i) as j, k.serial("r", rows) as r:
                joined.means[r, j] = 0.0
        with k.threads("r", rows) as r:
            top, weights = self.begin(self.head(run, r))
            # With few tokens, the sink is added later, when the last block of a token joins the splits.
            joined.top[r] = select(self.is_few, const(LOWEST, F32), top)
            joined.weights[r] = select(self.is_few, ZERO, weights)
        with k.serial("n", count) as n:
            self.add_split(run, rows, first + n)
        with k.when(self.is_few):
            self._store_split(run, first, stored, arrived)
        with (
            k.orelse(),
            k.threads("i", SPLIT) as i,
            k.serial("r", rows) as r,
            k.when(less(self.slot(r), run.count)),
            self.own_elements(i) as j,
        ):
            self.out[run.token + self.slot(r), self.head(run, r), j] = cast(joined.means[r, j] / joined.weights[r], self.out.dtype)

    def _store_split(self, run: Run, split: Dim, stored: Partial, arrived: Array) -> None:
        """Write the softmax of one split to memory. The last block of the token and the group of heads then joins all splits."""
        k, t, joined = self.k, run.token, self.joined
        with k.threads("i", SPLIT) as i, k.serial("g", self.block_heads) as g:
            h = self.head(run, g)
            with k.when(less(i, 1)):
                stored.top[t, h, split] = joined.top[g]
                stored.weights[t, h, split] = joined.weights[g]
            with self.own_elements(i) as j:
                stored.means[t, h, split, j] = joined.means[g, j]
        is_last = k.shared("is_last", 1, dtype=I32)
        k.tile(Arrive(), is_last[0], arrived[t, run.group], dims=(run.num_splits,))
        with k.when(equal(is_last[0], 1)), k.threads("i", SPLIT) as i, k.serial("g", self.block_heads) as g, self.own_elements(i) as j:
            self._join_stored(run, self.head(run, g), j, stored)

    def _join_stored(self, run: Run, h: Dim, j: Dim, stored: Partial) -> None:
        """Join all splits of a token and a head, and write element `j` of the mean."""
        k, t = self.k, run.token
        own, after = k.local("own", 3), k.local("after", 3)
        own[0], own[1] = self.begin(h)
        own[2] = 0.0
        with k.serial("n", run.num_splits) as n:
            split = run.first_split + n
            found = stored.top[t, h, split], stored.weights[t, h, split], stored.means[t, h, split, j]
            after[0], after[1], after[2] = _join((own[0], own[1], own[2]), found)
            for i in range(3):
                own[i] = after[i]
        self.out[t, h, j] = cast(own[2] / own[1], self.out.dtype)

    def begin(self, h: Dim) -> tuple[Scalar, Scalar]:
        """Return top and the sum of weights before the first key. If the head has a sink, these are the sink's score, as a logarithm to
        base 2, and 1, because a sink is a key without a value."""
        if self.node.sinks is None:
            return const(LOWEST, F32), ZERO
        return cast(self.k.array(self.node.sinks)[h], F32) * LOG2_E, const(1.0, F32)

    # --- what units share ----------------------------------------------------------------------------------------------

    def slot(self, r: Dim) -> Dim:
        """Return the index of a row's token within the run."""
        return r // self.block_heads

    def head(self, run: Run, r: Dim) -> Dim:
        """Return the query head of a row."""
        return run.group * self.block_heads + r % self.block_heads

    def finished(self, dot: Scalar, head: Dim, distance: Dim) -> Scalar:
        """Return the score of a key, from the product of the query and the key. The score times `unit` is a logarithm to base 2. If
        `is_plain`, the score is the product itself. `distance` is the position of the key minus that of the query."""
        if self.is_plain:
            return dot
        score = capped(dot * self.node.scale, self.node.softcap)
        if self.node.bias is None:
            return score
        return score + cast(self.k.array(self.node.bias)[head, relative(self.node.bias, distance)], F32)

    def weigh(self, rows: int, finish: Callable[[Dim, Dim], Scalar] | None = None, round: Callable[[Scalar], Scalar] = lambda x: x) -> None:
        """Turn the scores of a split into weights, and compute the top and the sum of weights of each row in `found`. Each lane of a row
        reduces the keys that are LANES apart, in order; then the results of the lanes are reduced. `finish` returns the finished and masked
        score of a row and a key; without it, the stored scores are complete. `round` rounds a weight."""
        k, scores, found = self.k, self.scores, self.found

        @contextmanager
        def replaced(value: Callable[[Dim, Dim], Scalar], combine: Callable[[Scalar, Scalar], Scalar]) -> Generator[tuple[Dim, Scalar]]:
            """Replace the score of each row and key by `value`. Yield each row with the combination of its new scores."""
            with self._lanes_of(rows) as (some, lane):
                keys = [lane + distance for distance in range(0, SPLIT, LANES)]
                values = iter(hold(k, [value(r, key) for r in some for key in keys]))
                for r in some:
                    held = list(islice(values, len(keys)))
                    for key, element in zip(keys, held, strict=True):
                        scores[r, key] = element
                    self.lanes[r, lane] = reduce(combine, held)
            with k.threads("r", rows) as r:
                lanes = hold(k, [self.lanes[r, n] for n in range(LANES)])
                for half in halvings(LANES):
                    lanes = [combine(lanes[n], lanes[n + half]) for n in range(half)]
                yield r, lanes[0]

        with replaced(finish or (lambda r, key: scores[r, key]), maximum) as (r, largest):
            found.top[r] = largest * self.unit
        unit = const(self.unit, F32)
        with replaced(lambda r, key: round(exp2(fma(scores[r, key], unit, -found.top[r]))), lambda a, b: a + b) as (r, total):
            found.weights[r] = total

    def join(self, rows: int) -> None:
        """Join the current split with the splits before it, in rows that see a key of the split. Leave other rows as they are: their
        weights in this split are NaN."""
        k, joined, found, factors = self.k, self.joined, self.found, self.factors
        with k.threads("r", rows) as r, k.when(not_equal(found.top[r], LOWEST)):
            top = k.local("new_top", 1)
            top[0] = maximum(joined.top[r], found.top[r])
            factors[0, r] = exp2(joined.top[r] - top[0])
            factors[1, r] = exp2(found.top[r] - top[0])
            joined.weights[r] = fma(found.weights[r], factors[1, r], joined.weights[r] * factors[0, r])
            joined.top[r] = top[0]
        group = at_once(rows, MEANS_AT_ONCE)
        with k.threads("i", SPLIT) as i, self.own_elements(i) as j, k.serial("m", rows // group) as m:
            numbers = [m * group + u for u in range(group)]
            means = [fma(found.means[r, j], factors[1, r], joined.means[r, j] * factors[0, r]) for r in numbers]
            after = [select(equal(found.top[r], LOWEST), joined.means[r, j], mean) for r, mean in zip(numbers, means, strict=True)]
            for r, mean in zip(numbers, hold(k, after), strict=True):
                joined.means[r, j] = mean

    @contextmanager
    def own_elements(self, i: Dim, size: int | None = None) -> Generator[Dim]:
        """Loop over the elements of a value that a thread computes, or over its share of `size` elements."""
        size = self.value_size if size is None else size
        with self.k.serial("u", -(-size // SPLIT)) as u:
            j = i + u * SPLIT
            with self.k.when(less(j, size)):
                yield j

    @contextmanager
    def _lanes_of(self, rows: int) -> Generator[tuple[list[Dim], Dim]]:
        """Distribute the lanes of all rows among threads. Yield the rows whose scores a thread holds at once, and the number of the
        thread's lane in these rows."""
        k, distance = self.k, min(rows, SPLIT // LANES)
        assert not rows % distance
        group = at_once(rows // distance, ROWS_AT_ONCE)
        with k.threads("i", distance * LANES) as i, k.serial("m", rows // distance // group) as m:
            yield [(m * group + u) * distance + i // LANES for u in range(group)], i % LANES


def _join(earlier: State, later: State) -> State:
    """Join two online softmaxes over different keys into the softmax over all these keys."""
    top = maximum(earlier[0], later[0])
    a, b = exp2(earlier[0] - top), exp2(later[0] - top)
    return top, fma(later[1], b, earlier[1] * a), fma(later[2], b, earlier[2] * a)
