"""The two walks of vector_walk.py over the blocks of a split of an 8-bit cache, on tiles of integers.

A block is read in panels of a few pages: first all panels of keys, then all panels of values. For a single token, the products of keys
prefetch the values of the block, and the products of values prefetch the keys of the next block, one cache line after another: the CPU
drops prefetches that come in bursts. A tile computes each block for all its rows if at least one of them sees the block.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.backends.cpu.schedule.attention.integer import BLOCK, PAGES, IntegerUnit
from compiler.backends.cpu.schedule.attention.operands import Heads, PagedOperands, Token, TokenTile
from compiler.backends.cpu.schedule.attention.rows import HeadPage, Span
from compiler.ir.dims import Dim, dim_max, dim_min
from compiler.ir.loops.scalars import Load
from compiler.ir.loops.write import Kernel, less, less_equal
from compiler.machine.formats import FOUR
from compiler.machine.target import LINE_BYTES
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of a sequence, of which some rows see positions `low` to `high`."""

    operands: PagedOperands
    unit: IntegerUnit
    sequence: Dim
    number: Dim
    low: Dim
    high: Dim
    span: Span

    @staticmethod
    def make(k: Kernel, operands: PagedOperands, unit: IntegerUnit, sequence: Dim, number: Dim, low: Dim, high: Dim) -> _Block:
        columns, has_window = unit.tiles.columns, bool(operands.node.window)
        span = Span.seen(k, number * BLOCK, low, high, columns, BLOCK // columns, has_window=has_window)
        return _Block(operands, unit, sequence, number, low, high, span)

    def panel(self, k: Kernel, number: Dim, kv_head: Dim) -> list[HeadPage]:
        """Return the pages of a panel."""
        pages = self.unit.tiles.pages
        return [HeadPage(Dim.of(0), kv_head, self.page(k, number * pages + v), Dim.of(0), Dim.of(0)) for v in range(pages)]

    def page(self, k: Kernel, index: Dim) -> Dim:
        operands = self.operands
        return operands.page(k, self.sequence, operands.visible_page(self.number * PAGES + index, self.low, self.high))


@dataclass(frozen=True, slots=True)
class IntegerTokenWalk:
    """Writes the walk of some heads of a token over the blocks of a split. Row `h` is query head `h`."""

    operands: PagedOperands
    unit: IntegerUnit
    token: Token
    heads: Heads

    def write(self, k: Kernel) -> None:
        unit, token, group = self.unit, self.token, self.operands.group
        with k.serial("b", token.end - token.begin) as b:
            block = _Block.make(k, self.operands, unit, token.sequence, token.begin + b, token.low, token.high)
            span, visible = block.span, self.operands.visible(token)
            with span.panels(k) as number, self.heads.each_kv(k) as kv:
                panel = block.panel(k, number, kv)
                unit.scores(k, panel, number, kv * group, group, [unit.element(page, VALUES, Dim.of(0)) for page in panel])
            with self.heads.each_kv(k) as kv:
                with span.panels(k) as number:
                    unit.load_values(k, block.panel(k, number, kv), number)
                with k.serial("m", group) as m:
                    unit.update_softmax(k, kv * group + m, block.number * BLOCK, span, visible)
                unit.add_values(k, span, kv * group, group, lambda p, kv=kv, block=block: self.next_keys(k, block, kv, p))

    def next_keys(self, k: Kernel, block: _Block, kv: Dim, p: Dim) -> list[Load]:
        """Return the places of the next block's keys that the product of panel `p` of a head's values prefetches. All products prefetch
        equal parts."""
        unit, size = self.unit, self.operands.size
        streams = unit.tiles.pages
        found: list[Load] = []
        for i in range(streams):
            at = (((kv - self.heads.first) * (size // unit.tiles.columns) + p) * streams + i) * (BLOCK // FOUR * LINE_BYTES)
            length = self.heads.count * (size * PAGE)
            page = block.page(k, PAGES + at // length)
            found.append(unit.cache[unit.layer, KEYS, page, self.heads.first, at % length])
        return found


@dataclass(frozen=True, slots=True)
class IntegerTileWalk:
    operands: PagedOperands
    unit: IntegerUnit
    tile: TokenTile

    def write(self, k: Kernel) -> None:
        operands, unit, tile = self.operands, self.unit, self.tile
        low, size = k.let("low", operands.low(tile.first_position)), operands.split_blocks
        begin = k.let("begin", dim_max(low // BLOCK, tile.split * size))
        end = dim_min(tile.last_position // BLOCK + 1, tile.split * size + size)
        sequence, count = operands.sequence(k, tile.first), operands.tile_tokens * operands.group
        with k.serial("b", end - begin) as b:
            block = _Block.make(k, operands, unit, sequence, begin + b, low, tile.last_position)
            span = block.span
            with span.panels(k) as number:
                unit.scores(k, block.panel(k, number, tile.kv_head), number, Dim.of(0), count)
            with span.panels(k) as number:
                unit.load_values(k, block.panel(k, number, tile.kv_head), number)
            with tile.tokens(k) as (token, first):
                attends = less_equal(token.begin, block.number) & less(block.number, token.end)
                with k.when(attends), tile.rows(k, first) as row:
                    unit.update_softmax(k, row, block.number * BLOCK, span, operands.visible(token))
                with k.orelse(), tile.rows(k, first) as row:
                    unit.skip_block(row)
            unit.add_values(k, span, Dim.of(0), count, lambda _: [])
