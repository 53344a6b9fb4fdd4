"""Attention on tensor cores, over pages of bf16. For each split of keys, a block computes in one array in shared memory, `scratch`,

    queries * keys -> scores -> weights of bf16 -> weights * values

A block computes a run: as many adjacent tokens of one sequence as its tile has rows for. A run that fits the lowest tile, such as the one
token of a decode step, uses that tile. The result of a split is joined only to rows that see a key of the split.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from compiler.backends.cuda.schedule.attention.walk import F32, FEW, I32, I64, LANE_PITCH, LOWEST, MEANS_AT_ONCE, SPLIT, Partial, Run, Walk
from compiler.backends.cuda.schedule.hold import at_once, hold
from compiler.backends.cuda.schedule.rows import fold_threads
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.attention import Attention, Paged
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, cast, const, equal, index, less, less_equal, maximum, minimum, not_equal, select
from compiler.machine.intrinsics.block_code import EIGHT
from compiler.machine.intrinsics.mma_pages import ENOUGH_BLOCKS, PageScores, PageValues, query_pitch, rows_for, scratch_pitch
from compiler.machine.target import Target
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES, bound_layer
from compiler.ops.attention.reach import first_position, last_position

BF16 = DType.BF16
PAGES = SPLIT // PAGE  # number of pages of a split


def schedule_tensor_attention(prim: PrimFunc, target: Target) -> PrimFunc | None:
    """Schedule attention to pages of bf16. Return None for any other nest, and if no tile supports the sizes of its heads on this
    target."""
    found = attention_on_pages(prim)
    if found is None:
        return None
    node, source = found
    most_rows = rows_for(node.queries.shape[2].const, node.out.shape[2].const, target)
    if not most_rows:
        return None
    return replace(prim, body=TensorWalk(node, source, most_rows).body(), attrs={**prim.attrs, "schedule": "tensor attention"})


def attention_on_pages(prim: PrimFunc) -> tuple[Attention, Paged] | None:
    """Return the attention of a function and its pages, if tensor cores may multiply them. Return None otherwise."""
    match prim.body:
        case Attention(keys=Paged(scales=None) as source, exact=False) as node if node.positions is not None:
            return (node, source) if source.cache.dtype is BF16 else None
        case _:
            return None


class TensorWalk(Walk):
    """The unit for pages of bf16, on tensor cores."""

    blocks = ENOUGH_BLOCKS  # number of blocks that must fit a multiprocessor at once
    pages: Array  # the pages of the split
    same: Array  # [tokens + 1]: whether the token can be in a run with the first token
    first: Array  # [tokens + 1]: the first position that a token sees
    end: Array  # [tokens + 1]: one past the last position that a token sees; 0 for tokens after the run, and for rows without a token
    bounds: Array  # five values of the run: number of tokens, least `first`, largest `end`, largest `first`, least `end`
    flags: Array  # for each thread, whether it found a mean that is not finite; in the end flags[0] says whether any thread did

    def __init__(self, node: Attention, source: Paged, most_rows: int) -> None:
        super().__init__(node)
        self.source, self.most_rows = source, most_rows
        self.row_counts = tuple(sorted({EIGHT, self.most_rows}))

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens of a run."""
        return self.most_rows // self.block_heads

    def allocate(self) -> None:
        """Allocate shared memory for the rows, scores and softmaxes of a run, and for data about its tokens. The scores of a split and its
        means share `scratch`."""
        k, rows, tokens = self.k, self.most_rows, self.most_tokens + 1
        self.rows = k.shared("queries", rows, query_pitch(self.size), dtype=BF16)
        self.scores = k.shared("scratch", rows, scratch_pitch(self.size))
        self.lanes, self.factors = k.shared("lanes", rows, LANE_PITCH), k.shared("factors", 2, rows)
        self.joined = Partial(k.shared("top", rows), k.shared("weights", rows), k.shared("means", rows, self.value_size))
        self.found = Partial(k.shared("found_top", rows), k.shared("found_weights", rows), self.scores)
        self.same, self.first, self.end = (k.shared(name, tokens, dtype=I32) for name in ("same", "first", "end"))
        sizes = {"pages": PAGES, "bounds": 5, "flags": SPLIT}
        self.pages, self.bounds, self.flags = (k.shared(name, size, dtype=I32) for name, size in sizes.items())

    # --- the run of a block --------------------------------------------------------------------------------------------

    def begins_run(self, t: Dim, group: Dim) -> Scalar:
        ids = self.k.array(self.node.sequences)
        return equal(index(t % self.most_tokens), 0) | not_equal(ids[t], ids[dim_max(t - 1, 0)])

    def find_run(self, t: Dim, group: Dim) -> Run:
        """Find the run that begins at token `t`, and write the positions that its tokens see. With at most FEW tokens, every token is a run
        of its own."""
        k, node, most = self.k, self.node, self.most_tokens
        assert node.positions is not None
        ids, positions = k.array(node.sequences), k.array(node.positions)
        with k.threads("i", most + 1) as i:
            near = dim_min(t + i, self.tokens - 1)
            last_seen = k.let("own", last_position(positions, near))
            is_next = less(t % most + i, most) & less(t + i, self.tokens) & less(FEW, self.tokens) & equal(ids[near], ids[t])
            self.same[i] = select(is_next | less(i, 1), const(1, I32), 0)
            self.first[i] = cast(index(first_position(k, node, positions, near, last_seen)), I32)
            self.end[i] = select(is_next | less(i, 1), cast(index(last_seen + 1), I32), 0)
        with k.threads("i", 1):
            bounds = self.bounds
            bounds[0] = 0
            bounds[1] = self.first[0]
            bounds[2] = 0
            bounds[3] = self.first[0]
            bounds[4] = self.end[0]
            last = k.let("last", select(self.is_few, const(1, I64), index(most + 1)), most + 1)
            with k.serial("u", last) as u:
                with k.when(equal(bounds[0], cast(index(u), I32)) & not_equal(self.same[u], 0)):
                    bounds[0] = bounds[0] + 1
                    bounds[1] = minimum(bounds[1], self.first[u])
                    bounds[2] = maximum(bounds[2], self.end[u])
                    bounds[3] = maximum(bounds[3], self.first[u])
                    bounds[4] = minimum(bounds[4], self.end[u])
                with k.orelse():
                    self.end[u] = 0
        sequence, most_keys = k.let("s", cast(ids[t], I64)), self.source.tables.shape[1] * PAGE
        count = k.let("count", cast(self.bounds[0], I64), self.most_tokens)
        low, high = (k.let(name, cast(self.bounds[i], I64), most_keys) for i, name in ((1, "low"), (2, "high")))
        return Run(t, group, count, sequence, low, high, Dim.of(0), bound_layer(k, self.source.layer, self.source.cache))

    # --- attention to a split ------------------------------------------------------------------------------------------

    def add_split(self, run: Run, rows: int, split: Dim) -> None:
        """Join a split with the splits before it. If tokens see different keys of the split and a mean is not finite, the mean may come
        from a value whose key the row does not see, because 0 * NaN is NaN. Then the split is computed again for each token alone, without
        the keys that the token does not see."""
        k, bounds = self.k, self.bounds
        if rows < 2 * self.block_heads:  # one token
            self._sum(run, rows, split, (index(run.low), index(run.high)), None)
            self.join(rows)
            return
        with k.serial("pass", self.most_tokens + 1) as number:
            together = less(number, 1)
            with k.when(together | not_equal(self.flags[0], 0)):
                own = dim_max(number - 1, 0)
                seen = [
                    select(together, index(of_run), cast(of_token[own], I64))
                    for of_run, of_token in ((run.low, self.first), (run.high, self.end))
                ]
                self._sum(run, rows, split, (seen[0], seen[1]), number)
                starts, ends = (cast(bounds[i], I64) for i in (3, 4))
                differ = (index(split * SPLIT) < starts) | (ends < minimum(index(run.high), index((split + 1) * SPLIT)))
                with k.when(together & differ):
                    self._flag_not_finite(rows)
                with k.orelse(), k.threads("i", 1):
                    self.flags[0] = select(together, const(0, I32), self.flags[0])
                with k.when(~together | equal(self.flags[0], 0)):
                    self.join(rows)

    def _flag_not_finite(self, rows: int) -> None:
        """Set flags[0] to 1 if a mean is not finite in a row that sees a key of the split, otherwise to 0. x - x is 0 only for finite x."""
        k, found, flags = self.k, self.found, self.flags
        group = at_once(rows, MEANS_AT_ONCE)
        with k.threads("i", SPLIT) as i:
            flags[i] = 0
            with self.own_elements(i) as j, k.serial("m", rows // group) as m:
                numbers = [m * group + u for u in range(group)]
                rests = [select(equal(found.top[r], LOWEST), const(0.0, F32), found.means[r, j] - found.means[r, j]) for r in numbers]
                flags[i] = select(equal(reduce(lambda a, b: a + b, hold(k, rests)), 0.0), flags[i], 1)
        fold_threads(k, flags, SPLIT, maximum)

    def _sum(self, run: Run, rows: int, split: Dim, seen: tuple[Scalar, Scalar], number: Dim | None) -> None:
        """Compute in `found` the softmax of a split over the positions `seen`. If `number` is given and above 0, compute it only for token
        `number` - 1 of the run, otherwise for all tokens."""
        k, source, scratch = self.k, self.source, self.scores
        bounds = (k.let(name, x, source.tables.shape[1] * PAGE) for name, x in zip(("seen_from", "seen_to"), seen, strict=True))
        low, high = (dim_min(dim_max(x - split * SPLIT, 0), SPLIT) for x in bounds)
        first, end = low // PAGE, ceil_div(high, PAGE)
        with k.threads("i", PAGES) as i, k.when(less_equal(first, i) & less(i, end)):
            self.pages[i] = cast(k.array(source.tables)[run.sequence, split * PAGES + i], I32)
        stride = source.cache.shape[3] * source.cache.shape[4]
        kv_head = run.group // (self.shared_heads // self.block_heads)
        keys, values = (k.array(source.cache)[run.layer, half, 0, kv_head, 0] for half in (KEYS, VALUES if source.has_values else KEYS))
        pages = self.pages[0]
        k.tile(PageScores(rows, self.size, self.blocks), scratch[0, 0], self.rows[0, 0], keys, pages, dims=(stride, first, end))
        self.weigh(
            rows,
            lambda r, key: self._finished(run, split * SPLIT + key, r, key, number),
            lambda weight: cast(cast(weight, BF16), F32),
        )
        k.tile(
            PageValues(rows, self.value_size, self.blocks, 0 if source.has_values else self.size),
            scratch[0, 0],
            scratch[0, 0],
            values,
            pages,
            dims=(stride, low, high),
        )

    def _finished(self, run: Run, position: Dim, r: Dim, key: Dim, number: Dim | None) -> Scalar:
        """Return the score of row `r` and a key, as `finished` computes it, or LOWEST if the row does not see the key."""
        k, slot = self.k, self.slot(r)
        at = index(position)
        sees = (cast(self.first[slot], I64) <= at) & (at < cast(self.end[slot], I64))
        if number is not None:
            sees = sees & (less(number, 1) | equal(index(slot + 1), index(number)))
        own = Dim.of(0) if self.node.bias is None else k.let("own", cast(self.end[slot], I64)) - 1
        return select(sees, self.finished(self.scores[r, key], self.head(run, r), position - own), LOWEST)
