"""The kernel of paged attention: its phases, and the work items that threads claim in each phase.

The kernel cuts the batch's tokens into tiles. If all tokens of a tile belong to one sequence, and the tile is at least half full and has at
least two tokens, a work item is the tile with one kv head, for all splits of the sequence's keys. Other tokens are computed one by one. If
sequences have several splits, each of these other tokens among the last FEW_TOKENS tokens of the batch has one item per split: the item
writes the softmax of the split to workspace, and a second phase merges the splits. Any remaining token is one item. If there are few items,
the kernel also cuts the items of tokens into parts by kv heads. Tiles with the same kv head follow each other, because their keys and
values then stay in a cache. Some units compute several adjacent tiles of a sequence in one item.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

from compiler.backends.cpu.schedule.attention.floats import Floats
from compiler.backends.cpu.schedule.attention.integers import Integers
from compiler.backends.cpu.schedule.attention.items import Item
from compiler.backends.cpu.schedule.attention.matrix import matrix_unit
from compiler.backends.cpu.schedule.attention.operands import I64, PagedOperands
from compiler.backends.cpu.schedule.attention.walk import Unit, Walk
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min, product_of
from compiler.ir.loops.attention import Attention, Paged
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.functions import ReduceFn
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Kernel, equal, fold, index, less_equal
from compiler.machine.products import ProductTiles
from compiler.ops.attention.kv_cache import PAGE

FEW_TOKENS = 16  # number of tokens at the end of a batch whose splits are work items, if sequences have several splits
BUSY = 8  # number of work items that keep all threads busy
BUSY_TILES = 32  # number of items of tiles that keep all threads busy: more, because tiles of later tokens see more keys and take longer


def schedule_paged(prim: PrimFunc, tiles: ProductTiles, *, unit: bool) -> PrimFunc | None:
    """Schedule paged attention without a bias, if the heads and their sizes are constants. Return None for any other kernel. `unit` says
    whether the target has a matrix unit that multiplies bf16."""
    match prim.body:
        case Attention(keys=Paged() as pages, positions=Buffer() as positions, bias=None) as node:
            pass
        case _:
            return None
    heads, size = node.queries.shape[1:]
    if not (heads.is_const and size.is_const and node.out.shape[2].is_const and pages.cache.shape[3].is_const):
        return None
    k = Kernel()
    operands = PagedOperands.of(k, node, pages, positions)
    _PagedAttention(operands, _unit_for(operands, tiles, has_matrix_unit=unit)).write(k)
    return PrimFunc(prim.params, prim.num_outputs, k.body(), {**prim.attrs, "schedule": "attention"})


def _unit_for(operands: PagedOperands, tiles: ProductTiles, *, has_matrix_unit: bool) -> Unit:
    """Return the fastest unit for these pages that the target has: that of integers for pages of bytes, or a matrix unit for pages of bf16.
    If the target has neither, or if the operands do not fit it, return the unit of vectors, which multiplies pairs of bf16 or f32."""
    if (integers := Integers.find(operands, tiles)) is not None:
        return integers.unit
    if has_matrix_unit and operands.fits_pairs:
        return matrix_unit(operands)
    return Floats.of(operands, tiles).unit


class _PagedAttention(Walk):
    """The phases of the kernel. `Walk` has the loops of each work item."""

    def write(self, k: Kernel) -> None:
        """Write the phases. A phase without work items costs almost nothing, so a step of single tokens with one split each costs one
        phase."""
        operands, num_tokens = self.operands, self.operands.num_tokens
        num_splits = ceil_div(operands.tables.shape[1], self.unit.split // PAGE)
        few, several = dim_min(FEW_TOKENS, num_tokens), dim_min(1, dim_max(0, num_splits - 1))
        split_tokens = few * several  # number of tokens whose splits are work items; the engine places single tokens last
        others = num_tokens - split_tokens
        splits = self.softmaxes(k.workspace, "split", few, Dim.of(operands.heads), num_splits)

        parts = self.parts(few * num_splits)
        with phase(k, i=split_tokens, split=num_splits, part=parts) as (i, split, part):
            token = k.let("token", others + i)
            with self.when_not_in_tile(k, token):
                self.store_split(k, self.token(k, token, part, parts), i, split, splits)
        with phase(k, i=split_tokens, head=Dim.of(operands.heads)) as (i, head):
            token = k.let("token", others + i)
            with self.when_not_in_tile(k, token):
                self.merge_splits(k, token, i, head, splits)
        parts = self.parts(num_tokens)
        with phase(k, token=others, part=parts) as (token, part), self.when_not_in_tile(k, token):
            self.attend(k, self.token(k, token, part, parts))
        self.write_tiles(k)

    def write_tiles(self, k: Kernel) -> None:
        """Write the phase that computes tiles. If the unit lets an item join tiles, an item takes as many adjacent tiles as leave
        BUSY_TILES items, and computes tiles of one sequence together. If items can join tiles, items with the last tokens come first."""
        most, tiles, kv_heads = self.unit.most_tiles, ceil_div(self.operands.num_tokens, self.unit.tile_tokens), self.operands.kv_heads
        at_once = dim_max(1, dim_min(most, tiles * kv_heads // BUSY_TILES)) if most > 1 else Dim.of(1)
        items = ceil_div(tiles, at_once)
        with phase(k, kv=Dim.of(kv_heads), item=items) as (kv, item):
            if most == 1:
                with k.when(self.shares_sequence(item)):
                    self.attend(k, self.tile(k, item, Dim.of(1), kv))
                return
            first = (items - 1 - item) * at_once  # the last tokens of a prompt see the most keys, so their items take longest
            with self.runs(k, first, dim_min(first + at_once, tiles)) as (tile, count):
                self.attend(k, self.tile(k, tile, count, kv))

    # --- work items ----------------------------------------------------------------------------------------------------

    def token(self, k: Kernel, number: Dim, part: Dim, parts: Dim) -> Item:
        """Return the item of a token with part `part` of its kv heads, which are divided into `parts` parts of nearly equal size."""
        at_once = self.unit.token.heads
        runs = self.operands.kv_heads // at_once
        begin, end = (n * runs // parts * at_once for n in (part, part + 1))
        first = k.let("kv_first", begin)
        return Item.token(k, self.operands, number, first, k.let("kv_count", end - first))

    def parts(self, items: Dim) -> Dim:
        """Return the number of work items into which the kv heads of a token are divided, if there would be `items` items without the
        division. The number is the smallest that keeps the threads busy, because items with more kv heads read longer parts of pages, which
        is faster. An item has at least as many kv heads as are computed at once."""
        return dim_min(self.operands.kv_heads // self.unit.token.heads, ceil_div(BUSY, dim_max(1, items)))

    def tile(self, k: Kernel, number: Dim, count: Dim, kv_head: Dim) -> Item:
        """Return the item of `count` adjacent tiles from tile `number` on, for one kv head."""
        tokens = self.unit.tile_tokens
        return Item.tile(k, self.operands, number * tokens, count * tokens, kv_head, self.unit.most_tiles * tokens)

    @contextmanager
    def runs(self, k: Kernel, first: Dim, end: Dim) -> Generator[tuple[Dim, Dim]]:
        """Loop over the tiles `first` to `end` - 1, cut into runs of adjacent tiles of one sequence. Yield the first tile of each run, and
        the number of its tiles. Leave out tiles for which `shares_sequence` does not hold."""
        extent = end - first
        with k.serial("i", extent) as i:
            tile = k.let("tile", first + i)
            begins = equal(index(i), 0) | ~self.continues(tile)
            with k.when(self.shares_sequence(tile) & begins):
                count = k.local("count", 1, dtype=I64)
                count[0] = index(1)
                with k.serial("j", extent - i - 1) as j, k.when(equal(count[0], index(j + 1)) & self.continues(tile + j + 1)):
                    count[0] = index(j + 2)
                yield tile, k.let("num_tiles", count[0], self.unit.most_tiles, lower=1)

    def shares_sequence(self, tile: Dim) -> Scalar:
        """Return whether the tile is at least half full and has at least two tokens, and all of them belong to one sequence."""
        tokens, sequences = self.unit.tile_tokens, self.operands.sequences
        first, count = tile * tokens, self.operands.tokens_from(tile * tokens, Dim.of(tokens))
        alike = fold(ReduceFn.ALL, (count,), lambda i: equal(sequences[first + i], sequences[first]))
        return alike & less_equal(max(2, tokens // 2), count)

    def continues(self, tile: Dim) -> Scalar:
        """Return whether the tile and the one before it have enough tokens, and all of them belong to one sequence. Tile 0 has no tile
        before it; the result for tile 0 does not matter, because tile 0 always begins a run."""
        before = dim_max(0, tile - 1)
        first, sequences = (self.unit.tile_tokens * n for n in (tile, before)), self.operands.sequences
        own, other = (sequences[at] for at in first)
        return equal(own, other) & self.shares_sequence(tile) & self.shares_sequence(before)

    def when_not_in_tile(self, k: Kernel, token: Dim) -> AbstractContextManager[None]:
        """Run the code inside the `with` only if no item of a tile computes the token: `shares_sequence` does not hold for its tile."""
        return k.when(~self.shares_sequence(token // self.unit.tile_tokens))


@contextmanager
def phase(k: Kernel, **axes: Dim) -> Generator[tuple[Dim, ...]]:
    """Write a parallel loop over all tuples of indices below the extents `axes`. Threads claim tuples; the phase ends when all are
    computed."""
    with k.parallel("p", product_of(list(axes.values()))) as p:
        yield k.unravel(p, tuple(axes.items()))
