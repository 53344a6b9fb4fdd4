"""The kernel of paged attention: its phases, and the work items that threads claim in each phase.

The kernel cuts the batch's tokens into tiles. If all tokens of a tile belong to one sequence, and the tile is at least half full, a work
item is the tile with one kv head, for all splits. Other tokens are computed one by one. If sequences have several splits, each of the last
FEW_TOKENS tokens has one item per split: it writes the split's softmax state to workspace, and a second phase merges the splits. Each
token before them is one item. If there are few items, the kernel also cuts each item into parts by kv heads. Tiles with the same kv head
follow each other, because their keys and values then stay in a cache. On a matrix unit, one work item computes several adjacent tiles of a
sequence together.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from compiler.backends.cpu.schedule.attention import matrix
from compiler.backends.cpu.schedule.attention.integer_walk import IntegerTileWalk, IntegerTokenWalk
from compiler.backends.cpu.schedule.attention.matrix_walk import MatrixTileWalk, MatrixTokenWalk
from compiler.backends.cpu.schedule.attention.operands import I64, Heads, PagedOperands, TokenTile
from compiler.backends.cpu.schedule.attention.partial_softmax import PartialSoftmax, PartialSoftmaxes
from compiler.backends.cpu.schedule.attention.rows import F32, Rows
from compiler.backends.cpu.schedule.attention.vector_walk import STRETCH, TileWalk, TokenWalk
from compiler.backends.cpu.schedule.folds import fold_halves
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min, product_of
from compiler.ir.loops.attention import Attention, Paged
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import ReduceFn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.write import Array, Kernel, cast, const, equal, index, less
from compiler.machine.products import ProductTiles
from compiler.ops.attention.kv_cache import PAGE

FEW_TOKENS = 16
BUSY = 8  # number of work items that keep all threads busy
BUSY_TILES = 32  # the same for tiles, which take different times because later tokens see more keys


def schedule_paged(prim: PrimFunc, tiles: ProductTiles, *, unit: bool) -> PrimFunc | None:
    """Schedule paged attention. Return None for any other kernel. `unit` says whether a matrix unit multiplies bf16."""
    match prim.body:
        case Attention(keys=Paged() as pages, positions=Buffer() as positions, bias=None) as node:
            pass
        case _:
            return None
    heads, size = node.queries.shape[1:]
    if not (heads.is_const and size.is_const and node.out.shape[2].is_const and pages.cache.shape[3].is_const):
        return None
    k = Kernel()
    # Vectors multiply pairs of bf16 where that is faster than f32.
    pairs = tiles.pairs is not None and not tiles.pairs.on_matrix_unit
    integers = next((t for t in tiles.integers if t.format.bits == 8 and not t.on_matrix_unit), None)
    tile = tiles.attention
    operands = PagedOperands(k, node, pages, k.array(positions), tile.shape, tile.steps, unit, pairs, integers)
    _PagedAttention(operands).write(k)
    return PrimFunc(prim.params, prim.num_outputs, k.body(), {**prim.attrs, "schedule": "attention"})


@dataclass(frozen=True, slots=True)
class _PagedAttention:
    operands: PagedOperands

    def write(self, k: Kernel) -> None:
        """Write the phases. A phase without work items costs almost nothing, so a step of single tokens with one split each costs one
        phase."""
        operands, num_tokens = self.operands, self.operands.num_tokens
        num_splits = ceil_div(operands.tables.shape[1], operands.split_pages)
        few, several = dim_min(FEW_TOKENS, num_tokens), dim_min(1, dim_max(0, num_splits - 1))
        heads, kv_heads, tiles = Dim.of(operands.heads), Dim.of(operands.kv_heads), ceil_div(num_tokens, operands.tile_tokens)
        split_tokens = few * several  # number of tokens whose splits are work items; the engine places single tokens last
        others = num_tokens - split_tokens
        splits = self.softmaxes(k.workspace, "split", few, heads, num_splits)

        parts = self.parts(few * num_splits)
        with phase(k, i=split_tokens, split=num_splits, part=parts) as (i, split, part):
            token = k.let("token", others + i)
            with self.when_not_in_tile(k, token):
                self.store_split(k, token, i, split, operands.part_of_heads(k, part, parts), splits)
        with phase(k, i=split_tokens, head=heads) as (i, head):
            token = k.let("token", others + i)
            with self.when_not_in_tile(k, token):
                self.merge_splits(k, token, i, head, splits)
        parts = self.parts(num_tokens)
        with phase(k, token=others, part=parts) as (token, part), self.when_not_in_tile(k, token):
            self.attend_token(k, token, operands.part_of_heads(k, part, parts))
        if operands.most_tiles == 1:
            with phase(k, kv=kv_heads, tile=tiles) as (kv, tile), k.when(operands.shares_sequence(tile)):
                self.attend_tiles(k, tile, Dim.of(1), kv)
            return
        at_once = dim_max(1, dim_min(operands.most_tiles, tiles * kv_heads // BUSY_TILES))
        items = ceil_div(tiles, at_once)
        with phase(k, kv=kv_heads, item=items) as (kv, item):
            first = (items - 1 - item) * at_once  # the last tokens of a prompt see most keys
            with self.runs(k, first, dim_min(first + at_once, tiles)) as (tile, count):
                self.attend_tiles(k, tile, count, kv)

    @contextmanager
    def runs(self, k: Kernel, first: Dim, end: Dim) -> Generator[tuple[Dim, Dim]]:
        """Loop over the runs of tiles of one sequence. Yield the first tile of each run, and the number of its tiles."""
        operands, extent = self.operands, end - first
        with k.serial("i", extent) as i:
            tile = k.let("tile", first + i)
            begins = equal(index(i), 0) | ~operands.continues(tile)
            with k.when(operands.shares_sequence(tile) & begins):
                count = k.local("count", 1, dtype=I64)
                count[0] = index(1)
                with k.serial("j", extent - i - 1) as j, k.when(equal(count[0], index(j + 1)) & operands.continues(tile + j + 1)):
                    count[0] = index(j + 2)
                yield tile, k.let("num_tiles", count[0], operands.most_tiles, lower=1)

    def parts(self, items: Dim) -> Dim:
        """Return the number of work items into which the heads of a token are divided. It is the smallest number that keeps the threads
        busy, because reading whole pages is faster."""
        return dim_min(self.operands.kv_heads // self.operands.kv_heads_at_once, ceil_div(BUSY, dim_max(1, items)))

    def when_not_in_tile(self, k: Kernel, token: Dim) -> AbstractContextManager[None]:
        return k.when(~self.operands.shares_sequence(token // self.operands.tile_tokens))

    # --- single tokens -------------------------------------------------------------------------------------------------

    @contextmanager
    def walked_heads(self, k: Kernel, number: Dim, split: Dim, heads: Heads, rows: Rows) -> Generator[Dim]:
        """Compute a split for some heads of a token. If the token attends to keys of the split, yield each query head."""
        operands = self.operands
        layer = operands.layer(k)
        token = operands.token(k, number, split)
        with k.when(less(token.begin, token.end)):
            with heads.each(k) as head:
                rows.clear(k, head)
            if operands.integers is not None:
                IntegerTokenWalk(operands, operands.integer_unit(k, rows, layer), token, heads).write(k)
            elif operands.on_matrix_unit:
                with operands.matrix_unit(k, rows, layer, operands.group, 1) as unit:
                    MatrixTokenWalk(operands, unit, token, heads).write(k)
            else:
                TokenWalk(operands, operands.vector_unit(k, rows, layer), token, heads).write(k)
            with heads.each(k) as head:
                yield head

    def store_split(self, k: Kernel, token: Dim, place: Dim, split: Dim, heads: Heads, splits: PartialSoftmaxes) -> None:
        rows = self.rows_of_token(k)
        self.load_queries(k, token, heads, rows)
        with self.walked_heads(k, token, split, heads, rows) as head:
            splits.store(k, (place, head, split), self.of_row(k, rows, head))

    def attend_token(self, k: Kernel, token: Dim, heads: Heads) -> None:
        operands, rows = self.operands, self.rows_of_token(k)
        joined = self.softmaxes(k.local, "joined", operands.heads)
        self.load_queries(k, token, heads, rows)
        with heads.each(k) as head:
            joined.store(k, (head,), self.initial(head))
        with k.scope():
            position = operands.position(k, token)
            with operands.splits(k, position, position) as split, self.walked_heads(k, token, split, heads, rows) as head:
                joined.merge(k, (head,), self.of_row(k, rows, head))
        with heads.each(k) as head:
            self.store_result(k, token, head, joined.at(head))

    def load_queries(self, k: Kernel, token: Dim, heads: Heads, rows: Rows) -> None:
        first = heads.first * self.operands.group
        self.operands.load_queries(k, rows, first, token, first, heads.count * self.operands.group)

    def rows_of_token(self, k: Kernel) -> Rows:
        return self.operands.allocate_rows(k, self.operands.heads, STRETCH, in_tile=False)

    def merge_splits(self, k: Kernel, token: Dim, place: Dim, head: Dim, splits: PartialSoftmaxes) -> None:
        """Merge the splits of a row, which the first phase wrote to workspace at `place`."""
        joined, row = self.softmaxes(k.local, "joined", 1), Dim.of(0)
        joined.store(k, (row,), self.initial(head))
        with k.scope():
            position = self.operands.position(k, token)
            with self.operands.splits(k, position, position) as split:
                joined.merge(k, (row,), splits.at(place, head, split))
        self.store_result(k, token, head, joined.at(row))

    # --- tiles of tokens -----------------------------------------------------------------------------------------------

    def attend_tiles(self, k: Kernel, tile: Dim, count: Dim, kv_head: Dim) -> None:
        """Compute adjacent tiles of one sequence together: `count` tiles, of which `tile` is the first."""
        operands, group, first = self.operands, self.operands.group, tile * self.operands.tile_tokens
        num_tokens, num_rows = count * operands.tile_tokens, operands.most_tiles * operands.tile_tokens * group
        rows, joined = operands.allocate_rows(k, num_rows, 1, in_tile=True), self.softmaxes(k.local, "joined", num_rows)
        with k.serial("i", num_tokens) as i:
            operands.load_queries(k, rows, i * group, operands.token_of(first, i), kv_head * group, group)
        with k.serial("i", num_tokens) as i, k.serial("g", group) as g:
            joined.store(k, (i * group + g,), self.initial(kv_head * group + g))
        with k.scope():
            layer = operands.layer(k)
            first_position = k.let("first_position", operands.extreme_position(first, num_tokens, ReduceFn.MIN))
            last_position = k.let("last_position", operands.extreme_position(first, num_tokens, ReduceFn.MAX))
            with operands.splits(k, first_position, last_position) as split:
                self.walk_tile(
                    k, TokenTile(operands, kv_head, first, num_tokens, first_position, last_position, split), rows, layer, joined
                )
        with k.serial("i", operands.tokens_from(first, num_tokens)) as i, k.serial("g", group) as g:
            self.store_result(k, first + i, kv_head * group + g, joined.at(i * group + g))

    def walk_tile(self, k: Kernel, tile: TokenTile, rows: Rows, layer: Dim, joined: PartialSoftmaxes) -> None:
        """Compute a split for a tile, and merge the result into those rows that attend to keys of the split."""
        operands, num_rows = self.operands, tile.num_tokens * self.operands.group
        with k.serial("m", num_rows) as m:
            rows.clear(k, m)
        if operands.integers is not None:
            IntegerTileWalk(operands, operands.integer_unit(k, rows, layer), tile).write(k)
        elif operands.on_matrix_unit:
            with operands.matrix_unit(k, rows, layer, operands.tile_tokens * operands.group, matrix.PANELS) as unit:
                MatrixTileWalk.make(k, operands, unit, tile).write(k)
        else:
            TileWalk(operands, operands.vector_unit(k, rows, layer), tile).write(k)
        with tile.tokens(k) as (token, first), k.when(less(token.begin, token.end)), tile.rows(k, first) as row:
            joined.merge(k, (row,), self.of_row(k, rows, row))

    # --- softmax states -------------------------------------------------------------------------------------------------

    def softmaxes(self, allocate: Callable[..., Array], name: str, *shape: Dim | int) -> PartialSoftmaxes:
        return PartialSoftmaxes.allocate(allocate, name, *shape, parts=self.operands.parts, width=self.operands.width)

    def of_row(self, k: Kernel, rows: Rows, row: Dim) -> PartialSoftmax:
        """Return the softmax state of a row after all blocks of a split: its maximum, sum and weighted values."""
        total = k.local("fold", PAGE)
        with k.vector(PAGE) as lane:
            total[lane] = rows.sums[row, lane]
        fold_halves(k, total, operator.add)
        return PartialSoftmax(rows.largest(row), total[0], lambda c, lane: rows.values[row, c, lane])

    def initial(self, head: Dim) -> PartialSoftmax:
        """Return the softmax state before the first split. It contains no key, or only the head's sink: the score of a key without a
        value."""
        sinks, zero = self.operands.sinks, const(0.0, F32)
        if sinks is None:
            return PartialSoftmax(const(float("-inf"), F32), zero, lambda c, lane: zero)
        return PartialSoftmax(cast(sinks[head], F32), const(1.0, F32), lambda c, lane: zero)

    def store_result(self, k: Kernel, token: Dim, head: Dim, softmax: PartialSoftmax) -> None:
        out, width = self.operands.out, self.operands.width
        if self.operands.on_matrix_unit:  # where products are fast, divisions take a large share of the time
            with k.scope():
                factor = k.local("factor", 1)
                factor[0] = const(1.0, F32) / softmax.total
                with k.serial("c", self.operands.parts) as c, k.vector(width) as lane:
                    out[token, head, c * width + lane] = cast(softmax.values(c, lane) * factor[0], out.dtype)
            return
        with k.serial("c", self.operands.parts) as c, k.vector(width) as lane:
            out[token, head, c * width + lane] = cast(softmax.values(c, lane) / softmax.total, out.dtype)


@contextmanager
def phase(k: Kernel, **axes: Dim) -> Generator[tuple[Dim, ...]]:
    """Write a parallel loop over all points of a box, which threads claim. The phase ends when all points are computed."""
    with k.parallel("p", product_of(list(axes.values()))) as p:
        yield k.unravel(p, tuple(axes.items()))
