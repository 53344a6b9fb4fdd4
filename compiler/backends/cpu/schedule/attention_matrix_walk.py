"""The two ways to walk the blocks of a split (attention_walk.py), on a matrix unit.

A token alone takes the keys of STRETCH blocks, all heads of them, and then their values. The rows of a tile take every block together that
one of them sees. A key that a row does not see gets no weight, so only values that are infinite or NaN could reach the row: where there
are such, the block's values are multiplied for each token apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.attention_matrix import MatrixUnit
from compiler.backends.cpu.schedule.attention_rows import BLOCK, PAGES, HeadPage, NextPage, Seen
from compiler.backends.cpu.schedule.attention_spec import SPLIT, AttentionSpec, Heads, Token, TokenTile
from compiler.backends.cpu.schedule.attention_walk import stretches
from compiler.ir.dims import Dim, dim_max, dim_min
from compiler.ir.loops import Scalar
from compiler.ir.write import Kernel, index, less, less_equal, select
from compiler.ops.kv_cache import PAGE

Block = list[HeadPage]


@dataclass(frozen=True, slots=True)
class MatrixTokenWalk:
    """Some of a token's heads. Row `h` belongs to query head `h`."""

    spec: AttentionSpec
    unit: MatrixUnit
    token: Token
    heads: Heads

    def write(self, k: Kernel) -> None:
        """Each page prefetches the one at its place in the block that is read next: behind the last keys come values, and behind those the
        keys of the next stretch."""
        with stretches(k, self.token) as (first, count):
            with k.serial("b", count) as b:
                last = dim_max(0, b + 2 - count)
                block = self.block(k, first + b, last, first + b + 1 - last * count)
                with self.heads.each_kv(k) as kv:
                    self.unit.scores(k, of_head(block, kv), kv * self.spec.group, b)
            with k.serial("b", count) as b:
                last = dim_max(0, b + 2 - count)
                block = self.block(k, first + b, 1 - last, first + b + 1)
                with self.heads.each_kv(k) as kv:
                    self.values(k, block, kv, b)

    def block(self, k: Kernel, number: Dim, next_half: Dim, next_number: Dim) -> Block:
        """The pages of a block, each with its page of the block that is read next."""
        token = self.token
        block, after = (pages_of(k, self.spec, token.sequence, b, token.low, token.high) for b in (number, next_number))
        return [replace(page, next_page=NextPage(next_half, other.page)) for page, other in zip(block, after, strict=True)]

    def values(self, k: Kernel, block: Block, kv: Dim, place: Dim) -> None:
        unit, group, first = self.unit, self.spec.group, kv * self.spec.group
        with k.serial("m", group) as m:
            weigh(k, unit, m, first + m, place, block[0].start, self.spec.seen(self.token))
        unit.load_values(k, of_head(block, kv), self.token.low, self.token.high)
        unit.multiply_values(k)
        with k.serial("m", group) as m:
            unit.add(k, m, first + m)


@dataclass(frozen=True, slots=True)
class MatrixTileWalk:
    spec: AttentionSpec
    unit: MatrixUnit
    tile: TokenTile

    def write(self, k: Kernel) -> None:
        spec, tile = self.spec, self.tile
        low = k.let("low", spec.low(tile.least))
        begin = k.let("begin", dim_max(low // BLOCK, tile.split * SPLIT))
        end = dim_min(tile.most // BLOCK + 1, tile.split * SPLIT + SPLIT)
        sequence = spec.sequence(k, tile.first)
        with k.serial("b", end - begin) as b:
            block = of_head(pages_of(k, spec, sequence, begin + b, low, tile.most), tile.kv_head)
            self.block(k, begin + b, low, block)

    def block(self, k: Kernel, b: Dim, low: Dim, block: Block) -> None:
        unit, tile = self.unit, self.tile
        unit.scores(k, block, Dim.of(0), Dim.of(0))
        unit.load_values(k, block, low, tile.most)  # while the unit multiplies
        with tile.tokens(k) as (token, first), k.when(sees(token, b)), tile.rows(k, first) as row:
            weigh(k, unit, row, row, Dim.of(0), block[0].start, self.spec.seen(token))

        seen_in_part = less(tile.least, b * BLOCK + (BLOCK - 1)) | less(b * BLOCK, self.spec.low(tile.most))
        apart = unit.not_finite(k, seen_in_part)  # whether values are multiplied for each token, or once for all
        every = self.spec.tile_tokens
        num_turns = k.let("turns", select(apart, index(every), index(1)))
        num_tokens = k.let("tokens", select(apart, index(1), index(every)))
        with k.serial("turn", num_turns) as turn:
            with k.when(less(1, num_turns)):
                token = tile.token(k, turn)
                unit.load_values(k, block, token.low, token.high)
            unit.multiply_values(k)
            with k.serial("i", num_tokens) as i:
                token = tile.token(k, turn + i)
                with k.when(sees(token, b)), tile.rows(k, (turn + i) * self.spec.group) as row:
                    unit.add(k, row, row)


# --- pieces ------------------------------------------------------------------------------------------------------------


def weigh(k: Kernel, unit: MatrixUnit, m: Dim, row: Dim, place: Dim, start: Dim, seen: Seen) -> None:
    """Nothing is compared where the whole block is seen."""
    whole = less_equal(start + (BLOCK - 1), seen.high)
    if seen.from_low:
        whole = whole & less_equal(seen.low, start)
    with k.when(whole):
        unit.weigh(k, m, row, place, start, None)
    with k.orelse():
        unit.weigh(k, m, row, place, start, seen)


def sees(token: Token, b: Dim) -> Scalar:
    return less_equal(token.begin, b) & less(b, token.end)


def of_head(block: Block, kv_head: Dim) -> Block:
    return [replace(page, kv_head=kv_head) for page in block]


def pages_of(k: Kernel, spec: AttentionSpec, sequence: Dim, b: Dim, low: Dim, high: Dim) -> Block:
    pages: Block = []
    for v in range(PAGES):
        number = b * PAGES + v
        page = spec.page(k, sequence, spec.seen_page(number, low, high))
        pages.append(HeadPage(Dim.of(0), Dim.of(0), page, Dim.of(0), number * PAGE))
    return pages
