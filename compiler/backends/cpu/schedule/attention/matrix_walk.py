"""The two walks of vector_walk.py over the blocks of a split, on a matrix unit.

A single token reads the keys of STRETCH blocks for all its heads, and then their values. A tile computes each block for all its rows if at
least one of them sees the block. A row gives weight 0 to the keys that it does not see, so their values matter only if one is infinite or
NaN. If a block has such a value, the block's values are multiplied for each token separately.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.attention.matrix import MatrixUnit
from compiler.backends.cpu.schedule.attention.operands import SPLIT, Heads, PagedOperands, Token, TokenTile
from compiler.backends.cpu.schedule.attention.rows import BLOCK, PAGES, HeadPage, NextPage, VisibleRange
from compiler.backends.cpu.schedule.attention.vector_walk import stretches
from compiler.ir.dims import Dim, dim_max, dim_min
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Kernel, index, less, less_equal, select
from compiler.ops.attention.kv_cache import PAGE

Block = list[HeadPage]


@dataclass(frozen=True, slots=True)
class MatrixTokenWalk:
    """Writes the walk of some heads of a token over the blocks of a split. Row `h` is query head `h`."""

    operands: PagedOperands
    unit: MatrixUnit
    token: Token
    heads: Heads

    def write(self, k: Kernel) -> None:
        """Write the walk. While it reads a page of a block, it prefetches the same page of the block that it reads next. It reads all keys
        of a stretch, then the values of the stretch, then the keys of the next stretch."""
        with stretches(k, self.token) as (first, count):
            with k.serial("b", count) as b:
                last = dim_max(0, b + 2 - count) if self.operands.pages.has_values else Dim.of(0)
                block = self.block(k, first + b, last, first + b + 1 - last * count)
                with self.heads.each_kv(k) as kv:
                    self.unit.scores(k, of_head(block, kv), kv * self.operands.group, b)
            with k.serial("b", count) as b:
                last = dim_max(0, b + 2 - count)
                block = self.block(k, first + b, 1 - last, first + b + 1)
                with self.heads.each_kv(k) as kv:
                    self.values(k, block, kv, b)

    def block(self, k: Kernel, number: Dim, next_half: Dim, next_number: Dim) -> Block:
        """Return the pages of a block. Each page names the page to prefetch: the corresponding page of the block that is read next."""
        token = self.token
        block, after = (pages_of(k, self.operands, token.sequence, b, token.low, token.high) for b in (number, next_number))
        return [replace(page, next_page=NextPage(next_half, other.page)) for page, other in zip(block, after, strict=True)]

    def values(self, k: Kernel, block: Block, kv: Dim, slot: Dim) -> None:
        unit, group, first = self.unit, self.operands.group, kv * self.operands.group
        with k.serial("m", group) as m:
            update_softmax(k, unit, m, first + m, slot, block[0].start, self.operands.visible(self.token))
        unit.load_values(k, of_head(block, kv), self.token.low, self.token.high)
        unit.multiply_values(k)
        with k.serial("m", group) as m:
            unit.add(k, m, first + m)


@dataclass(frozen=True, slots=True)
class MatrixTileWalk:
    operands: PagedOperands
    unit: MatrixUnit
    tile: TokenTile

    def write(self, k: Kernel) -> None:
        operands, tile = self.operands, self.tile
        low = k.let("low", operands.low(tile.first_position))
        begin = k.let("begin", dim_max(low // BLOCK, tile.split * SPLIT))
        end = dim_min(tile.last_position // BLOCK + 1, tile.split * SPLIT + SPLIT)
        sequence = operands.sequence(k, tile.first)
        with k.serial("b", end - begin) as b:
            block = of_head(pages_of(k, operands, sequence, begin + b, low, tile.last_position), tile.kv_head)
            self.block(k, begin + b, low, block)

    def block(self, k: Kernel, b: Dim, low: Dim, block: Block) -> None:
        unit, tile = self.unit, self.tile
        unit.scores(k, block, Dim.of(0), Dim.of(0))
        unit.load_values(k, block, low, tile.last_position)  # the CPU loads values while the matrix unit still multiplies
        with tile.tokens(k) as (token, first), k.when(attends(token, b)), tile.rows(k, first) as row:
            update_softmax(k, unit, row, row, Dim.of(0), block[0].start, self.operands.visible(token))

        visible_in_part = less(tile.first_position, b * BLOCK + (BLOCK - 1)) | less(b * BLOCK, self.operands.low(tile.last_position))
        per_token = unit.not_finite(k, visible_in_part)  # whether values must be multiplied for each token separately
        every = self.operands.tile_tokens
        num_turns = k.let("turns", select(per_token, index(every), index(1)))
        num_tokens = k.let("tokens", select(per_token, index(1), index(every)))
        with k.serial("turn", num_turns) as turn:
            with k.when(less(1, num_turns)):
                token = tile.token(k, turn)
                unit.load_values(k, block, token.low, token.high)
            unit.multiply_values(k)
            with k.serial("i", num_tokens) as i:
                token = tile.token(k, turn + i)
                with k.when(attends(token, b)), tile.rows(k, (turn + i) * self.operands.group) as row:
                    unit.add(k, row, row)


# --- helpers -----------------------------------------------------------------------------------------------------------


def update_softmax(k: Kernel, unit: MatrixUnit, m: Dim, row: Dim, slot: Dim, start: Dim, visible: VisibleRange) -> None:
    """Update the softmax of a row. Skip the comparison of positions if the row sees the whole block."""
    whole = less_equal(start + (BLOCK - 1), visible.high)
    if visible.clipped_low:
        whole = whole & less_equal(visible.low, start)
    with k.when(whole):
        unit.update_softmax(k, m, row, slot, start, None)
    with k.orelse():
        unit.update_softmax(k, m, row, slot, start, visible)


def attends(token: Token, b: Dim) -> Scalar:
    return less_equal(token.begin, b) & less(b, token.end)


def of_head(block: Block, kv_head: Dim) -> Block:
    return [replace(page, kv_head=kv_head) for page in block]


def pages_of(k: Kernel, operands: PagedOperands, sequence: Dim, b: Dim, low: Dim, high: Dim) -> Block:
    pages: Block = []
    for v in range(PAGES):
        number = b * PAGES + v
        page = operands.page(k, sequence, operands.visible_page(number, low, high))
        pages.append(HeadPage(Dim.of(0), Dim.of(0), page, Dim.of(0), number * PAGE))
    return pages
