"""Paged attention: blocks of keys in order of position.

Row by row the meaning is this: positions are cut into blocks of BLOCK keys, and into splits of SPLIT blocks, at fixed places. Within a
split, blocks are taken in order, each rescaling the sums so far by the change of the maximum; splits are then joined in order. That depends
on the token's own position alone, so a row has the same bits in any batch, for any chunking of the prompt, with any number of threads.

Tokens are cut into tiles. Where a whole tile belongs to one sequence its tokens share keys and values: an item is a tile and a kv head, and
walks all splits. Other tokens are on their own. Where there are several splits, an item is a token and a split for the first FEW tokens:
its sums go to workspace, and a second phase joins them, so that even one sequence keeps all threads busy. For the other tokens an item is a
token. Where those are few items, each is cut into parts of the kv heads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from compiler.backends.cpu.schedule.attention_matrix import CHUNK
from compiler.backends.cpu.schedule.attention_matrix_walk import MatrixTileWalk, MatrixTokenWalk
from compiler.backends.cpu.schedule.attention_rows import F32, PAGES, Rows
from compiler.backends.cpu.schedule.attention_spec import SPLIT, AttentionSpec, Heads, TokenTile
from compiler.backends.cpu.schedule.attention_walk import STRETCH, TileWalk, TokenWalk
from compiler.backends.cpu.schedule.folds import fold_halves, larger
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min, product_of
from compiler.ir.dtypes import DType
from compiler.ir.loops import Attention, Buffer, Paged, PrimFunc, ReduceFn, Scalar
from compiler.ir.write import Array, Kernel, cast, const, exp, fma, less
from compiler.machine.products import TileShape
from compiler.ops.kv_cache import PAGE

FEW = 16  # tokens
BUSY = 8  # items


def schedule_attention(prim: PrimFunc, tile: TileShape, *, unit: bool, pairs: bool) -> PrimFunc | None:
    """`unit`: whether there is one that multiplies matrices of bf16. `pairs`: whether vectors multiply pairs of bf16 faster than f32."""
    match prim.body:
        case Attention(keys=Paged() as source, positions=Buffer() as positions_buffer, bias=None) as node:
            pass
        case _:
            return None
    k = Kernel()
    queries, cache, tables, sequences, positions, out = k.arrays(
        node.queries, source.cache, source.tables, node.sequences, positions_buffer, node.out
    )
    if not (queries.shape[1].is_const and cache.shape[3].is_const and queries.shape[2].is_const):
        return None
    scales = None if source.scales is None else k.array(source.scales)
    sinks = None if node.sinks is None else k.array(node.sinks)
    fits = cache.dtype is DType.BF16 and queries.shape[2].const % CHUNK == 0
    spec = AttentionSpec(
        *(queries, cache, tables, sequences, positions, scales, sinks, out),
        layer_param=source.layer,
        scale=node.scale,
        window=node.window,
        softcap=node.softcap,
        tile=tile,
        on_matrix_unit=unit and fits,
        in_pairs=pairs and fits,
    )
    _Attention(spec).write(k)
    return PrimFunc(prim.params, prim.num_outputs, k.body(), {**prim.attrs, "schedule": "attention"})


@dataclass(frozen=True, slots=True)
class _Sum:
    """The softmax of a row so far: the largest score, the sum of the weights, the weighted values by part and lane."""

    top: Scalar
    total: Scalar
    values: Callable[[Dim, Dim], Scalar]


@dataclass(frozen=True, slots=True)
class _Sums:
    """Places for sums: of splits in workspace, of rows in the thread's own memory."""

    top: Array
    total: Array
    values: Array  # two more dimensions: parts and lanes

    def at(self, *place: Dim) -> _Sum:
        return _Sum(self.top[place], self.total[place], lambda c, lane: self.values[*place, c, lane])

    def put(self, k: Kernel, place: tuple[Dim, ...], found: _Sum) -> None:
        self.top[place] = found.top
        self.total[place] = found.total
        with self.lanes(k) as (c, lane):
            self.values[*place, c, lane] = found.values(c, lane)

    def add(self, k: Kernel, place: tuple[Dim, ...], found: _Sum) -> None:
        """Join one more split."""
        top, total, values = self.top, self.total, self.values
        with k.scope():
            old, new = k.local("old", 1), k.local("new", 1)
            old[0] = top[place]
            top[place] = larger(top[place], found.top)
            old[0] = exp(old[0] - top[place])
            new[0] = exp(found.top - top[place])
            total[place] = fma(found.total, new[0], total[place] * old[0])
            with self.lanes(k) as (c, lane):
                values[*place, c, lane] = fma(found.values(c, lane), new[0], values[*place, c, lane] * old[0])

    @contextmanager
    def lanes(self, k: Kernel) -> Generator[tuple[Dim, Dim]]:
        """The parts of a value, and their lanes."""
        parts, width = (d.const for d in self.values.shape[-2:])
        with k.serial("c", parts) as c, k.vector(width) as lane:
            yield c, lane


@dataclass(frozen=True, slots=True)
class _Attention:
    spec: AttentionSpec

    def write(self, k: Kernel) -> None:
        """Phases that have nothing to do cost next to nothing: a step of single tokens with one split is one phase."""
        spec, num_tokens = self.spec, self.spec.num_tokens
        num_splits = ceil_div(spec.tables.shape[1], PAGES * SPLIT)
        few, several = dim_min(FEW, num_tokens), dim_min(1, dim_max(0, num_splits - 1))
        heads, kv_heads, tiles = Dim.of(spec.heads), Dim.of(spec.kv_heads), num_tokens // spec.tile_tokens
        split_tokens = few * several  # tokens whose splits are items of their own
        splits = self.sums(k.workspace, "split", few, heads, num_splits)

        parts = self.parts(few * num_splits)
        with phase(k, token=split_tokens, split=num_splits, part=parts) as (token, split, part), self.when_alone(k, token):
            self.keep_split(k, token, split, spec.part_of_heads(k, part, parts), splits)
        with phase(k, token=split_tokens, head=heads) as (token, head), self.when_alone(k, token):
            self.join(k, token, head, splits)
        parts = self.parts(num_tokens)
        with phase(k, token=num_tokens - split_tokens, part=parts) as (i, part):
            token = k.let("token", i + split_tokens)
            with self.when_alone(k, token):
                self.whole_token(k, token, spec.part_of_heads(k, part, parts))
        with phase(k, tile=tiles, kv=kv_heads) as (tile, kv), k.when(spec.together(tile)):
            self.whole_tile(k, tile, kv)

    def parts(self, items: Dim) -> Dim:
        """How many items the heads of a token are cut into: no more than keep several threads busy, as whole pages are read faster."""
        return dim_min(self.spec.kv_heads // self.spec.kv_heads_at_once, ceil_div(BUSY, dim_max(1, items)))

    def when_alone(self, k: Kernel, token: Dim) -> AbstractContextManager[None]:
        return k.when(~self.spec.together(token // self.spec.tile_tokens))

    # --- tokens --------------------------------------------------------------------------------------------------------

    @contextmanager
    def walked_heads(self, k: Kernel, number: Dim, split: Dim, heads: Heads, rows: Rows) -> Generator[Dim]:
        """Walk a split with the heads of a token. Each of them, where the token sees some of the split."""
        spec = self.spec
        layer = spec.layer(k)
        token = spec.token(k, number, split)
        with k.when(less(token.begin, token.end)):
            with heads.each(k) as head:
                rows.clear(k, head)
            if spec.on_matrix_unit:
                with spec.matrix_unit(k, rows, layer, spec.group) as unit:
                    MatrixTokenWalk(spec, unit, token, heads).write(k)
            else:
                TokenWalk(spec, spec.vector_unit(rows, layer), token, heads).write(k)
            with heads.each(k) as head:
                yield head

    def keep_split(self, k: Kernel, token: Dim, split: Dim, heads: Heads, splits: _Sums) -> None:
        rows = self.rows_of_token(k)
        self.load_queries(k, token, heads, rows)
        with self.walked_heads(k, token, split, heads, rows) as head:
            splits.put(k, (token, head, split), self.summed(k, rows, head))

    def whole_token(self, k: Kernel, token: Dim, heads: Heads) -> None:
        spec, rows = self.spec, self.rows_of_token(k)
        joined = self.sums(k.local, "joined", spec.heads)
        self.load_queries(k, token, heads, rows)
        with heads.each(k) as head:
            joined.put(k, (head,), self.nothing(head))
        with k.scope():
            position = spec.position(k, token)
            with spec.splits(k, position, position) as split, self.walked_heads(k, token, split, heads, rows) as head:
                joined.add(k, (head,), self.summed(k, rows, head))
        with heads.each(k) as head:
            self.put_result(k, token, head, joined.at(head))

    def load_queries(self, k: Kernel, token: Dim, heads: Heads, rows: Rows) -> None:
        first = heads.first * self.spec.group
        self.spec.load_queries(k, rows, first, token, first, heads.count * self.spec.group)

    def rows_of_token(self, k: Kernel) -> Rows:
        return self.spec.allocate_rows(k, self.spec.heads, STRETCH)

    def join(self, k: Kernel, token: Dim, head: Dim, splits: _Sums) -> None:
        """The splits of a row, from workspace."""
        joined, row = self.sums(k.local, "joined", 1), Dim.of(0)
        joined.put(k, (row,), self.nothing(head))
        with k.scope():
            position = self.spec.position(k, token)
            with self.spec.splits(k, position, position) as split:
                joined.add(k, (row,), splits.at(token, head, split))
        self.put_result(k, token, head, joined.at(row))

    # --- tiles ---------------------------------------------------------------------------------------------------------

    def whole_tile(self, k: Kernel, tile: Dim, kv_head: Dim) -> None:
        spec, group, first = self.spec, self.spec.group, tile * self.spec.tile_tokens
        num_rows = spec.tile_tokens * group
        rows, joined = spec.allocate_rows(k, num_rows, 1), self.sums(k.local, "joined", num_rows)
        with k.serial("i", spec.tile_tokens) as i:
            spec.load_queries(k, rows, i * group, first + i, kv_head * group, group)
        with k.serial("i", spec.tile_tokens) as i, k.serial("g", group) as g:
            joined.put(k, (i * group + g,), self.nothing(kv_head * group + g))
        with k.scope():
            layer = spec.layer(k)
            least = k.let("least", spec.extreme_position(tile, ReduceFn.MIN))
            most = k.let("most", spec.extreme_position(tile, ReduceFn.MAX))
            with spec.splits(k, least, most) as split:
                self.walk_tile(k, TokenTile(spec, kv_head, first, least, most, split), rows, layer, joined)
        with k.serial("i", spec.tile_tokens) as i, k.serial("g", group) as g:
            self.put_result(k, first + i, kv_head * group + g, joined.at(i * group + g))

    def walk_tile(self, k: Kernel, tile: TokenTile, rows: Rows, layer: Dim, joined: _Sums) -> None:
        """Walk a split, and join the sums of the rows that see some of it."""
        spec, num_rows = self.spec, self.spec.tile_tokens * self.spec.group
        with k.serial("m", num_rows) as m:
            rows.clear(k, m)
        if spec.on_matrix_unit:
            with spec.matrix_unit(k, rows, layer, num_rows) as unit:
                MatrixTileWalk(spec, unit, tile).write(k)
        else:
            TileWalk(spec, spec.vector_unit(rows, layer), tile).write(k)
        with tile.tokens(k) as (token, first), k.when(less(token.begin, token.end)), tile.rows(k, first) as row:
            joined.add(k, (row,), self.summed(k, rows, row))

    # --- sums ----------------------------------------------------------------------------------------------------------

    def sums(self, allocate: Callable[..., Array], name: str, *shape: Dim | int) -> _Sums:
        part = self.spec.parts, self.spec.width
        return _Sums(allocate(f"{name}_top", *shape), allocate(f"{name}_total", *shape), allocate(f"{name}_values", *shape, *part))

    def summed(self, k: Kernel, rows: Rows, row: Dim) -> _Sum:
        """The sums of a row after a walk."""
        total = k.local("fold", PAGE)
        with k.vector(PAGE) as lane:
            total[lane] = rows.sums[row, lane]
        fold_halves(k, total, operator.add)
        return _Sum(rows.top[row, 0], total[0], lambda c, lane: rows.values[row, c, lane])

    def nothing(self, head: Dim) -> _Sum:
        """The sums before the first split. A sink takes part in the sum with no value of its own."""
        sinks, zero = self.spec.sinks, const(0.0, F32)
        if sinks is None:
            return _Sum(const(float("-inf"), F32), zero, lambda c, lane: zero)
        return _Sum(cast(sinks[head], F32), const(1.0, F32), lambda c, lane: zero)

    def put_result(self, k: Kernel, token: Dim, head: Dim, found: _Sum) -> None:
        out, width = self.spec.out, self.spec.width
        with k.serial("c", self.spec.parts) as c, k.vector(width) as lane:
            out[token, head, c * width + lane] = cast(found.values(c, lane) / found.total, out.dtype)


@contextmanager
def phase(k: Kernel, **axes: Dim) -> Generator[tuple[Dim, ...]]:
    """Threads claim the points of a box; the phase ends when all are done."""
    with k.parallel("p", product_of(list(axes.values()))) as p:
        yield k.unravel(p, axes)
