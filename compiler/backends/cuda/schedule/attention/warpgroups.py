"""Attention on GPUs with `wgmma`, over pages of bf16, in two launches.

The first launch computes long runs. A block has a tile of adjacent tokens, with a group of heads, and computes the tile's long runs one
after another, each by one `WgmmaAttend`. A run consists of adjacent tokens of one sequence, as many as the tile contains. Tiles with later
tokens begin first, because these tend to see more keys. The first launch notes which tokens are left to the second launch:

    tokens of short runs, such as those of decode steps
    tokens of runs in which tokens see different keys and a mean is not finite: it may come from a value that the token does not see

The second launch computes these tokens as `TensorWalk` does. In a prefill, few tokens are left or none. So a block of the second launch
looks at several tokens at once, which are far apart, because tokens of short runs tend to be adjacent. If there are few tokens, the first
launch has no blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from compiler.backends.cuda.schedule.attention.tensors import BF16, TensorWalk, attention_on_pages
from compiler.backends.cuda.schedule.attention.walk import I32, I64, Partial
from compiler.backends.cuda.schedule.hold import at_once, hold
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.attention import Attention, Paged
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.write import Array, cast, const, equal, index, less, minimum, not_equal, select
from compiler.machine.intrinsics.block_code import EIGHT
from compiler.machine.intrinsics.mma_pages import ENOUGH_BLOCKS
from compiler.machine.intrinsics.wgmma_attend import LARGEST_WHOLE, WgmmaAttend, attends
from compiler.machine.target import Target
from compiler.ops.attention.kv_cache import KEYS, VALUES, bound_layer
from compiler.ops.attention.reach import first_position, last_position

ITEMS = 16  # maximum number of items of a block of the second launch
ENOUGH = 1024  # number of blocks of the second launch that keep a GPU busy: with at most so many items, a block has one
SCANNED = 32  # maximum number of tokens that a thread looks at in one iteration of a loop
LEFT, BEGINS = 1, 2  # elements of `left`; with BEGINS, a run of the second launch also begins at the token


def schedule_warpgroup_attention(prim: PrimFunc, target: Target) -> PrimFunc | None:
    """Schedule attention to pages of bf16. Return None for any other nest, if scores are biased or, without a cap, have a scale that is not
    positive, if queries are not f32 or results neither f32 nor bf16, and if the tile does not support the sizes of heads on this target."""
    found = attention_on_pages(prim)
    if found is None:
        return None
    node, source = found
    walk = WarpgroupWalk(node, source)
    scores = walk.is_plain or (node.softcap > 0 and node.bias is None)
    known = scores and node.queries.dtype is DType.F32 and node.out.dtype in (DType.F32, BF16)
    if not known or not attends(walk.size, target, 0 if source.has_values else walk.value_size):
        return None
    return replace(prim, body=walk.body(), attrs={**prim.attrs, "schedule": "warpgroup attention"})


class WarpgroupWalk(TensorWalk):
    """Writes the two launches. This class is also the unit (walk.py) of the second launch."""

    left: Array  # [tokens * groups]: LEFT or BEGINS if the second launch computes the token with this group of heads, otherwise 0

    def __init__(self, node: Attention, source: Paged) -> None:
        super().__init__(node, source, EIGHT)
        # Many blocks of the second launch find no token that is left, so many blocks should run at once. Large heads need more registers.
        self.blocks = 3 if self.size <= LARGEST_WHOLE else ENOUGH_BLOCKS

    def body(self) -> Stmt:
        """Write both launches."""
        k, stored = self.k, self.stored()
        self.left = k.workspace("left", self.tokens * self.groups, dtype=I32)
        with k.scope():
            _LongRuns(self).write()
        with k.scope():
            self.write_blocks(stored)
        return k.body()

    def begins_run(self, t: Dim, group: Dim) -> Scalar:
        """Return whether a run of the second launch begins at token `t`, which the first launch has left."""
        return equal(self.left[t * self.groups + group], BEGINS)

    def write_blocks(self, stored: Partial) -> None:
        """Write the second launch. A block has up to ITEMS items. If there are many tokens, a block first tests whether a run begins at any
        of its items, and otherwise does nothing."""
        k, arrived, items, last = self.k, self.counters(), self.num_items, self.tokens * self.groups - 1
        blocks = dim_min(items, dim_max(dim_max(self.few_items, ENOUGH), ceil_div(items, ITEMS)))
        with k.grid("b", blocks) as b:
            begins = (equal(self.left[dim_min(b + i * blocks, last)], BEGINS) for i in range(ITEMS))  # these loads are in flight together
            with (
                k.when(self.is_few | reduce(lambda x, y: x | y, begins)),
                k.serial("n", dim_min(ceil_div(items - b, dim_max(blocks, 1)), ITEMS)) as n,
            ):
                self.write_item(b + n * blocks, stored, arrived)


@dataclass(frozen=True, slots=True)
class _Tile:
    """The shared memory of a block, and its tokens."""

    start: Dim  # the first token
    group: Dim
    begins: Array  # [tokens + few]: 1 where a run begins, and where there is no token; otherwise 0
    first: Array  # [tokens]: the first position that the token sees
    end: Array  # [tokens]: one past the last position that the token sees
    starts: Array  # [runs]: the tokens at which long runs begin
    counts: Array  # [runs]: the numbers of their tokens
    num_runs: Array  # number of long runs
    broken: Array  # 1 if the run must be computed again
    top: Array  # [rows]: top of each row before the first key
    weights: Array  # [rows]: the sum of weights of each row before the first key
    memory: Array  # stages of pages


class _LongRuns:
    """Writes the first launch, with one `WgmmaAttend` for each long run."""

    def __init__(self, walk: WarpgroupWalk) -> None:
        """Choose the tile for the sizes of the heads, and the number of tokens of a block: as many as fit the tile, rounded down so that
        each run of the second launch is in one block."""
        self.walk, self.k, self.node = walk, walk.k, walk.node
        self.op = WgmmaAttend(
            walk.size,
            walk.block_heads,
            walk.out.dtype is BF16,
            walk.unit,
            value_size=0 if walk.source.has_values else walk.value_size,
            scale=float(np.float32(walk.node.scale)) if walk.node.softcap else 1.0,
            softcap=float(np.float32(walk.node.softcap)),
        )
        most = self.op.block_rows // walk.block_heads
        self.tile_tokens = most - most % walk.most_tokens  # a run of the second launch is in one tile

    def write(self) -> None:
        """Write the launch. A block finds its tokens and runs, computes each long run, and marks its tokens as not left unless the run must
        be computed again (`broken`)."""
        k, walk, tokens = self.k, self.walk, self.walk.tokens
        tiles = ceil_div(tokens, self.tile_tokens)
        with k.grid("b", tiles * walk.groups * walk.is_many) as b:
            tile = self._allocate(*self._place(b, tiles))
            self._find_tokens(tile)
            self._find_runs(tile)
            with k.serial("n", k.let("runs", cast(tile.num_runs[0], I64), self.tile_tokens)) as n:
                # Each use computes the values that depend on the block's number again: threads have no registers to keep them.
                start, group = self._place(b, tiles)
                self._attend(replace(tile, start=start, group=group), *self._run(tile, n))
                (start, group), (u, count) = self._place(b, tiles), self._run(tile, n)
                with k.threads("i", self.tile_tokens) as i, k.when(less(i, count) & equal(tile.broken[0], 0)):
                    walk.left[(start + u + i) * walk.groups + group] = const(0, I32)

    def _place(self, block: Dim, tiles: Dim) -> tuple[Dim, Dim]:
        """Return the first token of a block's tile, and the group of its heads."""
        number, group = self.k.unravel(block, [("number", tiles), ("group", Dim.of(self.walk.groups))])
        return (tiles - 1 - number) * self.tile_tokens, group

    def _run(self, tile: _Tile, n: Dim) -> tuple[Dim, Dim]:
        """Read the first token and the number of tokens of a long run."""
        u, count = (self.k.let(name, cast(x[n], I64), self.tile_tokens) for name, x in (("u", tile.starts), ("count", tile.counts)))
        return u, count

    @property
    def few(self) -> int:
        """The maximum number of tokens of a short run, which is left to the second launch. The rows of a short run, one per token and head
        of the block, fit that launch's tile of 8 rows. Runs with more tokens are long."""
        return EIGHT // self.walk.block_heads

    def _allocate(self, start: Dim, group: Dim) -> _Tile:
        """Allocate the shared memory of a tile, which begins at token `start`, for a group of heads."""
        k, tokens, rows = self.k, self.tile_tokens, self.op.block_rows
        begins = k.shared("begins", tokens + self.few, dtype=I32)
        first, end, starts, counts = (k.shared(name, tokens, dtype=I32) for name in ("first", "end", "starts", "counts"))
        num_runs, broken = (k.shared(name, 1, dtype=I32) for name in ("num_runs", "broken"))
        memory, top, weights = k.shared("memory", self.op.shared_bytes // 4), k.shared("top", rows), k.shared("weights", rows)
        return _Tile(start, group, begins, first, end, starts, counts, num_runs, broken, top, weights, memory)

    def _find_tokens(self, tile: _Tile) -> None:
        """Find the positions that tokens see, and where runs begin. Mark all tokens as left."""
        k, walk, node, tokens = self.k, self.walk, self.node, self.walk.tokens
        assert node.positions is not None
        ids, positions = k.array(node.sequences), k.array(node.positions)
        with k.threads("i", self.tile_tokens) as i:
            near, exists = dim_min(tile.start + i, tokens - 1), less(tile.start + i, tokens)
            last_seen = k.let("own", last_position(positions, near))
            is_new = equal(index(i), 0) | not_equal(ids[near], ids[dim_max(near - 1, 0)])
            tile.begins[i] = cast(is_new | ~exists, I32)
            tile.first[i] = cast(index(first_position(k, node, positions, near, last_seen)), I32)
            tile.end[i] = cast(index(last_seen + 1), I32)
            begins = is_new | equal(index((tile.start + i) % walk.most_tokens), 0)
            with k.when(exists):
                walk.left[(tile.start + i) * walk.groups + tile.group] = select(begins, const(BEGINS, I32), LEFT)
            with k.when(less(i, self.few)):
                tile.begins[self.tile_tokens + i] = const(1, I32)

    def _find_runs(self, tile: _Tile) -> None:
        """List the long runs. For each token, a thread looks at all tokens of the tile: it counts the long runs that begin earlier, and
        finds the token where the next run begins."""
        k, most, few = self.k, self.tile_tokens, self.few
        group = at_once(most, SCANNED)
        with k.threads("i", most) as i:
            following, runs, earlier = (k.local(name, 1, dtype=I32) for name in ("following", "long_runs", "earlier"))
            following[0], runs[0], earlier[0] = const(most, I32), const(0, I32), const(0, I32)
            with k.serial("m", most // group) as m:
                begins = [equal(x, 1) for x in hold(k, [tile.begins[m * group + n] for n in range(group + few)])]
                for n in range(group):
                    j = m * group + n
                    here = select(begins[n] & less(i, j), cast(index(j), I32), most)
                    following[0] = minimum(following[0], here)
                    is_long = reduce(lambda x, y: x & ~y, begins[n + 1 : n + few + 1], begins[n])
                    runs[0] = runs[0] + cast(is_long, I32)
                    earlier[0] = earlier[0] + cast(is_long & less(j, i), I32)
            with k.when(less(i, 1)):
                tile.num_runs[0] = runs[0]
            count = following[0] - cast(index(i), I32)
            with k.when(equal(tile.begins[i], 1) & (const(few, I32) < count)):
                rank = k.let("rank", cast(earlier[0], I64), most - 1)
                tile.starts[rank] = cast(index(i), I32)
                tile.counts[rank] = count

    def _attend(self, tile: _Tile, u: Dim, count: Dim) -> None:
        """Compute the long run of `count` tokens that begins at token `u` of the tile."""
        k, walk, node, source = self.k, self.walk, self.node, self.walk.source
        token, first_head = tile.start + u, tile.group * walk.block_heads
        with k.threads("r", self.op.block_rows) as r:
            tile.top[r], tile.weights[r] = walk.begin(first_head + r % walk.block_heads)
            with k.when(less(r, 1)):
                tile.broken[0] = const(0, I32)
        sequence, layer = k.let("s", cast(k.array(node.sequences)[token], I64)), bound_layer(k, source.layer, source.cache)
        cache, kv_head = k.array(source.cache), tile.group // (walk.shared_heads // walk.block_heads)
        keys, values = (cache[layer, half, 0, kv_head, 0] for half in (KEYS, VALUES if source.has_values else KEYS))
        own = token, first_head, 0  # indices of the first row, in queries and in the result
        rows = tile.memory[0], tile.top[0], tile.weights[0], tile.broken[0], walk.queries[own]
        places = keys, values, k.array(source.tables)[sequence, 0], tile.first[u], tile.end[u]
        sizes = source.cache.shape[3] * source.cache.shape[4], Dim.of(walk.heads), count * walk.block_heads
        k.tile(self.op, walk.out[own], *rows, *places, dims=sizes)
