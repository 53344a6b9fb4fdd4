"""Attention on GPUs with `wgmma`, over pages of bf16, in two launches.

The first launch computes long runs. A block takes a tile of adjacent tokens, with a group of heads, and computes its long runs one after
another, each by one `WgmmaAttend`. A run consists of as many adjacent tokens of one sequence as the tile has. Tiles with later tokens begin
first, because these tend to see more keys. The first launch notes which tokens are left:

    tokens of short runs, such as those of decode steps
    tokens of runs in which a mean is not finite where tokens see different keys. It may come from a value that the token does not see

The second launch computes these tokens as `TensorWalk` does. In a prefill, few tokens are left or none. So a block looks at several tokens
at once, which are far apart, because tokens of short runs tend to be adjacent. If there are few tokens, the first launch has no blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

from compiler.backends.cuda.schedule.attention.tensors import BF16, TensorWalk, attention_on_pages
from compiler.backends.cuda.schedule.attention.walk import FEW, I32, I64, Partial, Run
from compiler.backends.cuda.schedule.hold import hold
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.attention import Attention, Paged
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.write import Array, cast, const, equal, index, less, less_equal, maximum, minimum, not_equal, select
from compiler.machine.intrinsics.block_code import EIGHT
from compiler.machine.intrinsics.wgmma_attend import ROWS, WgmmaAttend, attends
from compiler.machine.target import Target
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES, bound_layer
from compiler.ops.attention.reach import first_position, last_position

ITEMS = 16  # maximum number of items of a block of the second launch
ENOUGH = 1024  # number of blocks of the second launch that keep a GPU busy: with at most so many items, a block has one
LEFT, BEGINS = 1, 2  # whether a token is left, and whether a run of the second launch then begins there


def schedule_warpgroup_attention(prim: PrimFunc, target: Target) -> PrimFunc | None:
    found = attention_on_pages(prim)
    if found is None:
        return None
    node, source = found
    walk = WarpgroupWalk(node, source)
    known = walk.is_plain and source.has_values and node.queries.dtype is DType.F32 and node.out.dtype in (DType.F32, BF16)
    if not known or not attends(walk.size, target):
        return None
    return replace(prim, body=walk.body(), attrs={**prim.attrs, "schedule": "warpgroup attention"})


class WarpgroupWalk(TensorWalk):
    blocks = 3  # many blocks find no token that is left, so they should not wait for each other
    left: Array  # [tokens * groups]: LEFT or BEGINS if the second launch computes the token with this group of heads, otherwise 0

    def __init__(self, node: Attention, source: Paged) -> None:
        super().__init__(node, source, EIGHT)

    def body(self) -> Stmt:
        k, stored = self.k, self.stored()
        self.left = k.workspace("left", self.tokens * self.groups, dtype=I32)
        with k.scope():
            _LongRuns(self).write()
        with k.scope():
            self.write_blocks(stored)
        return k.body()

    def begins_run(self, t: Dim, group: Dim) -> Scalar:
        return equal(self.left[t * self.groups + group], BEGINS)

    def write_blocks(self, stored: Partial) -> None:
        """Write the second launch."""
        k, arrived, items, last = self.k, self.counters(), self.num_items, self.tokens * self.groups - 1
        blocks = dim_min(items, dim_max(dim_max(self.few_items, ENOUGH), ceil_div(items, ITEMS)))
        with k.grid("b", blocks) as b:
            begins = (equal(self.left[dim_min(b + i * blocks, last)], BEGINS) for i in range(ITEMS))  # all in flight together
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
    begins: Array  # [tokens]: 1 where a run begins, and where there is no token; otherwise 0
    is_long: Array  # [tokens]: whether a long run begins
    first: Array  # [tokens]: the first position that the token sees
    end: Array  # [tokens]: one past the last position that the token sees
    bounds: Array  # five values of a run: number of tokens, least `first`, largest `end`, largest `first`, least `end`
    broken: Array  # whether the run must be computed again
    top: Array
    weights: Array
    memory: Array  # stages of pages


class _LongRuns:
    """Writes the first launch."""

    def __init__(self, walk: WarpgroupWalk) -> None:
        self.walk, self.k, self.node = walk, walk.k, walk.node
        self.op = WgmmaAttend(walk.size, walk.block_heads, walk.out.dtype is BF16, walk.unit)
        self.tile_tokens = ROWS // walk.block_heads

    def write(self) -> None:
        k, walk, tokens = self.k, self.walk, self.walk.tokens
        tiles = ceil_div(tokens, self.tile_tokens)
        with k.grid("b", tiles * walk.groups * dim_min(1, tokens // (FEW + 1))) as b:
            number, group = k.unravel(b, [("number", tiles), ("group", Dim.of(walk.groups))])
            start = (tiles - 1 - number) * self.tile_tokens
            tile = self._allocate(start, group)
            self._find_runs(tile)
            with k.serial("u", dim_min(self.tile_tokens, tokens - start)) as u, k.when(not_equal(tile.is_long[u], 0)):
                self._attend(tile, u)

    def _allocate(self, start: Dim, group: Dim) -> _Tile:
        k, tokens = self.k, self.tile_tokens
        begins, is_long, first, end = (k.shared(name, tokens, dtype=I32) for name in ("begins", "is_long", "first", "end"))
        bounds, broken = k.shared("bounds", 5, dtype=I32), k.shared("broken", 1, dtype=I32)
        memory, top, weights = k.shared("memory", self.op.shared_bytes // 4), k.shared("top", ROWS), k.shared("weights", ROWS)
        return _Tile(start, group, begins, is_long, first, end, bounds, broken, top, weights, memory)

    def _find_runs(self, tile: _Tile) -> None:
        """Find where long runs begin, and the positions that tokens see. Note that all tokens are left."""
        k, walk, node, tokens = self.k, self.walk, self.node, self.walk.tokens
        assert node.positions is not None
        ids, positions = k.array(node.sequences), k.array(node.positions)
        with k.threads("i", self.tile_tokens) as i:
            near = dim_min(tile.start + i, tokens - 1)
            last_seen = k.let("own", last_position(positions, near))
            is_new = equal(index(i), 0) | not_equal(ids[near], ids[dim_max(near - 1, 0)])
            tile.begins[i] = cast(is_new | less_equal(tokens, tile.start + i), I32)
            tile.first[i] = cast(index(first_position(k, node, positions, near, last_seen)), I32)
            tile.end[i] = cast(index(last_seen + 1), I32)
        few = EIGHT // walk.block_heads  # the number of tokens whose rows fit the lowest tile of the second launch
        with k.threads("i", self.tile_tokens) as i:
            is_long = equal(tile.begins[i], 1) & less(tile.start + i, tokens) & less(i + few, self.tile_tokens)
            for distance in range(1, few + 1):
                is_long &= equal(tile.begins[dim_min(i + distance, self.tile_tokens - 1)], 0)
            tile.is_long[i] = cast(is_long, I32)
            begins = equal(tile.begins[i], 1) | equal(index((tile.start + i) % walk.most_tokens), 0)
            with k.when(less(tile.start + i, tokens)):
                walk.left[(tile.start + i) * walk.groups + tile.group] = select(begins, const(BEGINS, I32), LEFT)

    def _run(self, tile: _Tile, u: Dim) -> tuple[Run, Dim, Dim]:
        """Return the long run that begins at token `u` of the tile, the largest first position that its tokens see, and the least end."""
        k, node, source = self.k, self.node, self.walk.source
        with k.threads("i", 1):
            own = k.local("own", 5, dtype=I32)
            own[0], own[1], own[2], own[3], own[4] = (const(0, I32), tile.first[u], tile.end[u], tile.first[u], tile.end[u])
            going = k.local("going", 1, dtype=I32)
            going[0] = const(1, I32)
            with k.serial("v", self.tile_tokens - u) as v:
                first, end, begins = hold(k, [tile.first[u + v], tile.end[u + v], tile.begins[u + v]])
                going[0] = select(less(0, v) & not_equal(begins, 0), const(0, I32), going[0])
                with k.when(equal(going[0], 1)):
                    own[0] = own[0] + 1
                    own[1], own[3] = minimum(own[1], first), maximum(own[3], first)
                    own[2], own[4] = maximum(own[2], end), minimum(own[4], end)
            for i in range(5):
                tile.bounds[i] = own[i]
            tile.broken[0] = const(0, I32)
        most_keys = source.tables.shape[1] * PAGE
        count = k.let("count", cast(tile.bounds[0], I64), self.tile_tokens)
        low, high, starts, ends = (
            k.let(n, cast(tile.bounds[i], I64), most_keys) for i, n in enumerate(("low", "high", "starts", "ends"), 1)
        )
        sequence = k.let("s", cast(k.array(node.sequences)[tile.start + u], I64))
        layer = bound_layer(k, source.layer, source.cache)
        return Run(tile.start + u, tile.group, count, sequence, low, high, Dim.of(0), layer), starts, ends

    def _attend(self, tile: _Tile, u: Dim) -> None:
        run, starts, ends = self._run(tile, u)
        with self.k.threads("r", ROWS) as r:
            tile.top[r], tile.weights[r] = self.walk.begin(self.walk.head(run, r))
        self._join_pages(tile, run, u, (starts, ends))
        with self.k.threads("i", self.tile_tokens) as i, self.k.when(less(i, run.count) & equal(tile.broken[0], 0)):
            self.walk.left[(run.token + i) * self.walk.groups + run.group] = const(0, I32)

    def _join_pages(self, tile: _Tile, run: Run, u: Dim, bounds: tuple[Dim, Dim]) -> None:
        k, walk, source = self.k, self.walk, self.walk.source
        cache, kv_head = k.array(source.cache), run.group // (walk.shared_heads // walk.block_heads)
        keys, values = (cache[run.layer, half, 0, kv_head, 0] for half in (KEYS, VALUES))
        stride = source.cache.shape[3] * source.cache.shape[4]
        own = run.token, walk.head(run, Dim.of(0)), 0  # the first row, of queries and of the result
        rows = tile.memory[0], tile.top[0], tile.weights[0], tile.broken[0], walk.queries[own]
        places = keys, values, k.array(source.tables)[run.sequence, 0], tile.first[u], tile.end[u]
        sizes = stride, Dim.of(walk.heads * walk.size), run.count * walk.block_heads, run.low, run.high, *bounds
        k.tile(self.op, walk.out[own], *rows, *places, dims=sizes)
