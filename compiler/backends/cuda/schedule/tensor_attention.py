"""Attention over pages of bf16 on the tensor cores of a GPU.

    for block b {
      shared queries, scratch, joined
      for each split of the keys that a row sees {
        queries * keys -> scores in scratch
        scores -> top of each row, weights of bf16 in scratch, sum of the weights
        weights * values -> means in scratch
        joined <- join(joined, means)
      }
      joined -> out, or, if splits run in parallel, memory that the last block of the token reads
    }

A row of a block is a token with one query head; all heads of a block share a kv head. A block computes a run: as many adjacent tokens of
one sequence as fit. A run that fits the lowest tile, such as the token of a decode step, uses that tile. A row joins only splits in which
it sees a key, and each row has its own scores, weights and sums, so other rows do not change the bits of a row.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

from compiler.backends.cuda.schedule.rows import fold_threads
from compiler.backends.cuda.schedule.splits import F32, FEW, I64, LANES, LOWEST, SPLIT, ZERO, Partial, SplitAttention
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.attention import Attention, Paged
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.write import (
    Array,
    cast,
    const,
    equal,
    exp,
    fma,
    index,
    less,
    less_equal,
    maximum,
    minimum,
    not_equal,
    select,
)
from compiler.machine.intrinsics.arrive import Arrive
from compiler.machine.intrinsics.block_code import EIGHT
from compiler.machine.intrinsics.mma_pages import PageScores, PageValues, query_pitch, rows_for, scratch_pitch
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES, bound_layer
from compiler.ops.attention.plain import capped, relative

I32, BF16 = DType.I32, DType.BF16
PAGES = SPLIT // PAGE  # number of pages of a split


def schedule_tensor_attention(prim: PrimFunc) -> PrimFunc | None:
    match prim.body:
        case Attention(keys=Paged(scales=None) as source) as node if node.positions is not None:
            pass
        case _:
            return None
    if source.cache.dtype is not BF16 or not rows_for(node.queries.shape[2].const, node.out.shape[2].const):
        return None
    return replace(prim, body=_TensorAttention(node, source).body(), attrs={**prim.attrs, "schedule": "tensor attention"})


@dataclass(frozen=True, slots=True)
class _Memory:
    """The arrays in shared memory of a block. Arrays with an element per row have as many elements as the highest tile has rows."""

    queries: Array
    scratch: Array  # first scores of a split, then its weights, then its means
    lanes: Array
    joined: Partial  # the softmax over all splits so far
    found: Partial  # the softmax over the current split, whose means are in `scratch`
    factors: Array  # the factors of each row of `joined` and of `found` when they are joined
    pages: Array  # the pages of the split
    same: Array  # [tokens + 1]: whether the token can be in a run with the first token
    first: Array  # [tokens + 1]: the first position that a token sees; the last element is for rows without a token
    end: Array  # [tokens + 1]: one past the last position that a token sees
    bounds: Array  # five values of the run: number of tokens, least `first`, largest `end`, largest `first`, least `end`
    flags: Array  # for each thread, whether it found a mean that is not finite; in the end flags[0] says whether any thread did


@dataclass(frozen=True, slots=True)
class _Run:
    """A run: adjacent tokens of one sequence, with a group of heads."""

    token: Dim  # index of the first token
    group: Dim  # index of the group of heads
    sequence: Dim
    layer: Dim
    count: Dim
    low: Dim  # the first position that a token of the run sees
    high: Dim  # one past the last position that a token of the run sees
    split: Dim  # the first split that this block computes
    num_splits: Dim


class _TensorAttention(SplitAttention):
    def __init__(self, node: Attention, source: Paged) -> None:
        super().__init__(node)
        self.source, self.most_rows = source, rows_for(self.size, self.value_size)
        self.is_few = less(self.tokens, FEW + 1)

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens of a run."""
        return self.most_rows // self.block_heads

    def body(self) -> Stmt:
        k, few, splits, groups = self.k, dim_min(self.tokens, FEW), self.most_splits, self.groups
        stored, arrived = self.allocate_stored(few, splits), k.counters("arrived", FEW, groups)
        num_blocks = dim_max(few * groups * splits, self.tokens * groups)
        with k.grid("b", num_blocks) as b:
            split, t, group = k.unravel(b, [("split", num_blocks), ("t", self.tokens), ("group", Dim.of(groups))])
            with k.when(select(self.is_few, less(split, splits), less(split, 1) & self._begins_run(t))):
                memory = self._allocate()
                self._find_run(t, memory)
                run = self._run(t, group, split, memory)
                with k.when(less(run.split, ceil_div(run.high, SPLIT)) & less_equal(run.low // SPLIT, run.split)):
                    fits = less_equal(run.count * self.block_heads, EIGHT)
                    with k.when(fits) if self.most_rows > EIGHT else nullcontext():
                        self._attend(run, EIGHT, memory, stored, arrived)
                    if self.most_rows > EIGHT:
                        with k.orelse():
                            self._attend(run, self.most_rows, memory, stored, arrived)
        return k.body()

    def _allocate(self) -> _Memory:
        k, rows, tokens = self.k, self.most_rows, self.most_tokens + 1
        scratch = k.shared("scratch", rows, scratch_pitch(self.size))
        joined = Partial(k.shared("top", rows), k.shared("weights", rows), k.shared("means", rows, self.value_size))
        return _Memory(
            k.shared("queries", rows, query_pitch(self.size), dtype=BF16),
            scratch,
            k.shared("lanes", rows, LANES),
            joined,
            Partial(k.shared("found_top", rows), k.shared("found_weights", rows), scratch),
            k.shared("factors", 2, rows),
            k.shared("pages", PAGES, dtype=I32),
            k.shared("same", tokens, dtype=I32),
            k.shared("first", tokens, dtype=I32),
            k.shared("end", tokens, dtype=I32),
            k.shared("bounds", 5, dtype=I32),
            k.shared("flags", SPLIT, dtype=I32),
        )

    # --- the run of a block --------------------------------------------------------------------------------------------

    def _begins_run(self, t: Dim) -> Scalar:
        ids = self.k.array(self.node.sequences)
        return equal(index(t % self.most_tokens), 0) | not_equal(ids[t], ids[dim_max(t - 1, 0)])

    def _find_run(self, t: Dim, memory: _Memory) -> None:
        """Find the run that begins at token `t`, and write the positions that its tokens see. With at most FEW tokens, every token is a run
        of its own."""
        k, node, most = self.k, self.node, self.most_tokens
        assert node.positions is not None
        ids, positions = k.array(node.sequences), k.array(node.positions)
        with k.threads("i", most + 1) as i:
            near = dim_min(t + i, self.tokens - 1)
            own = k.let("own", cast(positions[near], I64))
            is_next = less(t % most + i, most) & less(t + i, self.tokens) & less(FEW, self.tokens) & equal(ids[near], ids[t])
            memory.same[i] = select(is_next | less(i, 1), const(1, I32), 0)
            memory.first[i] = cast(index(dim_max(0, own - (node.window - 1)) if node.window else Dim.of(0)), I32)
            memory.end[i] = select(is_next | less(i, 1), cast(index(own + 1), I32), 0)
        with k.threads("i", 1):
            bounds = memory.bounds
            bounds[0] = 0
            bounds[1] = memory.first[0]
            bounds[2] = 0
            bounds[3] = memory.first[0]
            bounds[4] = memory.end[0]
            last = k.let("last", select(self.is_few, const(1, I64), index(most + 1)), most + 1)
            with k.serial("u", last) as u:
                with k.when(equal(bounds[0], cast(index(u), I32)) & not_equal(memory.same[u], 0)):
                    bounds[0] = bounds[0] + 1
                    bounds[1] = minimum(bounds[1], memory.first[u])
                    bounds[2] = maximum(bounds[2], memory.end[u])
                    bounds[3] = maximum(bounds[3], memory.first[u])
                    bounds[4] = minimum(bounds[4], memory.end[u])
                with k.orelse():
                    memory.end[u] = 0

    def _run(self, t: Dim, group: Dim, split: Dim, memory: _Memory) -> _Run:
        k, most = self.k, self.source.tables.shape[1] * PAGE
        sequence = k.let("s", cast(k.array(self.node.sequences)[t], I64))
        count = k.let("count", cast(memory.bounds[0], I64), self.most_tokens)
        low, high = (k.let(name, cast(memory.bounds[i], I64), most) for i, name in ((1, "low"), (2, "high")))
        first = low // SPLIT
        begin = k.let("begin", select(self.is_few, index(split), index(first)), self.most_splits)
        num = k.let("num", select(self.is_few, const(1, I64), index(ceil_div(high, SPLIT) - first)), self.most_splits)
        return _Run(t, group, sequence, bound_layer(k, self.source.layer, self.source.cache), count, low, high, begin, num)

    # --- rows ----------------------------------------------------------------------------------------------------------

    def _attend(self, run: _Run, rows: int, memory: _Memory, stored: Partial, arrived: Array) -> None:
        k, joined = self.k, memory.joined
        with k.threads("i", SPLIT) as i, k.serial("r", rows) as r:
            with self.own_elements(i, self.size) as j:
                token = dim_min(run.token + self._slot(r), self.tokens - 1)
                memory.queries[r, j] = cast(self.queries[token, self._head(run, r), j], BF16)
            with self.own_elements(i) as j:
                joined.means[r, j] = 0.0
        with k.threads("r", rows) as r:
            top, weights = self.begin(self._head(run, r))
            # With few tokens, the sink is added later, when the last block of a token joins the splits.
            joined.top[r] = select(self.is_few, const(LOWEST, F32), top)
            joined.weights[r] = select(self.is_few, ZERO, weights)
        with k.serial("n", run.num_splits) as n:
            self._split(run, rows, run.split + n, memory)
        with k.when(self.is_few):
            self._store_split(run, memory, stored, arrived)
        with (
            k.orelse(),
            k.threads("i", SPLIT) as i,
            k.serial("r", rows) as r,
            k.when(less(self._slot(r), run.count)),
            self.own_elements(i) as j,
        ):
            self.out[run.token + self._slot(r), self._head(run, r), j] = cast(joined.means[r, j] / joined.weights[r], self.out.dtype)

    def _slot(self, r: Dim) -> Dim:
        """Return the index of a row's token within the run."""
        return r // self.block_heads

    def _head(self, run: _Run, r: Dim) -> Dim:
        return run.group * self.block_heads + r % self.block_heads

    def _store_split(self, run: _Run, memory: _Memory, stored: Partial, arrived: Array) -> None:
        """Write the softmax of one split to memory. The last block of the token then joins all splits."""
        k, t, split, joined = self.k, run.token, run.split, memory.joined
        with k.threads("i", SPLIT) as i, k.serial("g", self.block_heads) as g:
            h = self._head(run, g)
            with k.when(less(i, 1)):
                stored.top[t, h, split] = joined.top[g]
                stored.weights[t, h, split] = joined.weights[g]
            with self.own_elements(i) as j:
                stored.means[t, h, split, j] = joined.means[g, j]
        is_last = k.shared("is_last", 1, dtype=I32)
        splits = run.low // SPLIT, ceil_div(run.high, SPLIT) - run.low // SPLIT
        k.tile(Arrive(), is_last[0], arrived[t, run.group], dims=(splits[1],))
        with k.when(equal(is_last[0], 1)), k.threads("i", SPLIT) as i, k.serial("g", self.block_heads) as g, self.own_elements(i) as j:
            self.join_stored(t, self._head(run, g), j, splits, stored)

    # --- attention to a split ------------------------------------------------------------------------------------------

    def _split(self, run: _Run, rows: int, split: Dim, memory: _Memory) -> None:
        """Join a split with the splits before it. If tokens see different keys of the split, and a mean is not finite, a value may have
        reached a row that does not see its key, because 0 * NaN is NaN. Then each token is computed alone, without the keys that the token
        does not see."""
        k, bounds = self.k, memory.bounds
        if rows < 2 * self.block_heads:  # one token
            self._sum(run, rows, split, memory, (index(run.low), index(run.high)), None)
            self._join(rows, memory)
            return
        with k.serial("pass", self.most_tokens + 1) as number:
            together = less(number, 1)
            with k.when(together | not_equal(memory.flags[0], 0)):
                own = dim_max(number - 1, 0)
                seen = [
                    select(together, index(of_run), cast(of_token[own], I64))
                    for of_run, of_token in ((run.low, memory.first), (run.high, memory.end))
                ]
                self._sum(run, rows, split, memory, (seen[0], seen[1]), number)
                with k.when(together):
                    starts, ends = (cast(bounds[i], I64) for i in (3, 4))
                    differ = (index(split * SPLIT) < starts) | (ends < minimum(index(run.high), index((split + 1) * SPLIT)))
                    self._flag_not_finite(rows, memory, differ)
                with k.when(~together | equal(memory.flags[0], 0)):
                    self._join(rows, memory)

    def _flag_not_finite(self, rows: int, memory: _Memory, differ: Scalar) -> None:
        """Set flags[0] if a mean is not finite in a row that sees a key of the split. x - x is 0 only for finite numbers."""
        k, found, flags = self.k, memory.found, memory.flags
        with k.threads("i", SPLIT) as i:
            flags[i] = 0
            with k.when(differ), k.serial("r", rows) as r, k.when(not_equal(found.top[r], LOWEST)), self.own_elements(i) as j:
                flags[i] = select(equal(found.means[r, j] - found.means[r, j], 0.0), flags[i], 1)
        fold_threads(k, flags, SPLIT, maximum)

    def _sum(self, run: _Run, rows: int, split: Dim, memory: _Memory, seen: tuple[Scalar, Scalar], number: Dim | None) -> None:
        """Compute the softmax of a split: its top, its sum of weights and its means. If `number` is above 0, compute only token `number` -
        1 of the run."""
        k, source, scratch, found = self.k, self.source, memory.scratch, memory.found
        bounds = (k.let(name, x, source.tables.shape[1] * PAGE) for name, x in zip(("seen_from", "seen_to"), seen, strict=True))
        low, high = (dim_min(dim_max(x - split * SPLIT, 0), SPLIT) for x in bounds)
        first, end = low // PAGE, ceil_div(high, PAGE)
        with k.threads("i", PAGES) as i, k.when(less_equal(first, i) & less(i, end)):
            memory.pages[i] = cast(k.array(source.tables)[run.sequence, split * PAGES + i], I32)
        stride = source.cache.shape[3] * source.cache.shape[4]
        kv_head = run.group // (self.shared_heads // self.block_heads)
        keys, values = (k.array(source.cache)[run.layer, half, 0, kv_head, 0] for half in (KEYS, VALUES if source.has_values else KEYS))
        pages = memory.pages[0]
        k.tile(PageScores(rows, self.size), scratch[0, 0], memory.queries[0, 0], keys, pages, dims=(stride, first, end))
        with k.threads("i", SPLIT) as i, k.serial("r", rows) as r:
            self._mask(run, split * SPLIT + i, r, i, memory, number)
        self.fold(scratch, memory.lanes, found.top, rows, maximum)
        with k.threads("i", SPLIT) as i, k.serial("r", rows) as r:
            scratch[r, i] = cast(cast(exp(scratch[r, i] - found.top[r]), BF16), F32)
        self.fold(scratch, memory.lanes, found.weights, rows, lambda a, b: a + b)
        k.tile(
            PageValues(rows, self.value_size, 0 if source.has_values else self.size),
            scratch[0, 0],
            scratch[0, 0],
            values,
            pages,
            dims=(stride, low, high),
        )

    def _mask(self, run: _Run, position: Dim, r: Dim, i: Dim, memory: _Memory, number: Dim | None) -> None:
        """Finish the score of a key. If the row sees the key, scale, cap and bias the score; otherwise set it to LOWEST."""
        k, node, slot, scratch = self.k, self.node, self._slot(r), memory.scratch
        at = index(position)
        sees = (cast(memory.first[slot], I64) <= at) & (at < cast(memory.end[slot], I64))
        if number is not None:
            sees = sees & (less(number, 1) | equal(index(slot + 1), index(number)))
        with k.when(sees):
            score = capped(scratch[r, i] * node.scale, node.softcap)
            if node.bias is not None:
                own = k.let("own", cast(memory.end[slot], I64)) - 1
                score = score + cast(k.array(node.bias)[self._head(run, r), relative(node.bias, position - own)], F32)
            scratch[r, i] = score
        with k.orelse():
            scratch[r, i] = LOWEST

    def _join(self, rows: int, memory: _Memory) -> None:
        """Join the current split with the splits before it, in rows that see a key of the split. In other rows, the weights are NaN."""
        k, joined, found, factors = self.k, memory.joined, memory.found, memory.factors
        with k.threads("r", rows) as r, k.when(not_equal(found.top[r], LOWEST)):
            top = k.local("new_top", 1)
            top[0] = maximum(joined.top[r], found.top[r])
            factors[0, r] = exp(joined.top[r] - top[0])
            factors[1, r] = exp(found.top[r] - top[0])
            joined.weights[r] = fma(found.weights[r], factors[1, r], joined.weights[r] * factors[0, r])
            joined.top[r] = top[0]
        with k.threads("i", SPLIT) as i, k.serial("r", rows) as r, k.when(not_equal(found.top[r], LOWEST)), self.own_elements(i) as j:
            joined.means[r, j] = fma(found.means[r, j], factors[1, r], joined.means[r, j] * factors[0, r])
