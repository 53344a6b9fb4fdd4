"""The operands of a paged attention kernel, the parameters that follow from them, and where blocks, splits and tiles of tokens begin."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import lcm

from compiler.backends.cpu.schedule.attention import integer, matrix
from compiler.backends.cpu.schedule.attention.integer import IntegerRows, IntegerTiles, IntegerUnit
from compiler.backends.cpu.schedule.attention.matrix import CHUNK, HEIGHT, MatrixRows, MatrixUnit, height_of, load_query
from compiler.backends.cpu.schedule.attention.rows import BLOCK, F32, PAGES, Rows, VisibleRange
from compiler.backends.cpu.schedule.attention.turned import TurnedValues
from compiler.backends.cpu.schedule.attention.vector import VectorUnit
from compiler.backends.cpu.schedule.attention.vector_products import F32Products, PairProducts
from compiler.ir.dims import Dim, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.attention import Attention, Paged
from compiler.ir.loops.functions import ReduceFn
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, cast, equal, fold, less_equal
from compiler.machine.products import ProductTile, TileShape
from compiler.ops.attention.kv_cache import PAGE

SPLIT = 8  # number of blocks of a split, in products of floats
ROWS = 32  # number of rows of a tile, approximately
PRODUCTS = 2  # number of products of a matrix unit that cover the rows of a tile
MOST_TOKENS = 32  # maximum number of tokens of a tile on a matrix unit: a part of a prompt with fewer than half as many gets no tile
MOST_TILES = 8  # maximum number of tiles of a matrix unit that share keys and values
TILES_BYTES = 256 << 10  # maximum size of the queries and sums of these tiles: a part of the second-level cache
BF16, I64 = DType.BF16, DType.I64


@dataclass(frozen=True, slots=True)
class Token:
    """A token with one split of its keys. The token attends to positions `low` to `high`. Those in the split are in blocks `begin` to
    `end` - 1."""

    number: Dim
    sequence: Dim
    low: Dim
    high: Dim
    begin: Dim
    end: Dim


@dataclass(frozen=True, slots=True)
class Heads:
    """Adjacent kv heads, and the query heads that share them."""

    first: Dim
    count: Dim
    group: int  # number of query heads per kv head

    @contextmanager
    def each_kv(self, k: Kernel, step: int = 1) -> Generator[Dim]:
        with k.serial("kv", self.count // step) as kv:
            yield self.first + kv * step

    @contextmanager
    def each(self, k: Kernel) -> Generator[Dim]:
        """Loop over the query heads."""
        with k.serial("h", self.count * self.group) as h:
            yield self.first * self.group + h


@dataclass(frozen=True, slots=True)
class PagedOperands:
    """The operands of the attention node, as arrays of the kernel, and the parameters that follow from the node and the target."""

    kernel: Kernel
    node: Attention
    pages: Paged
    positions: Array  # [tokens]
    tile: TileShape
    steps: int  # maximum number of unrolled steps of a product
    has_matrix_unit: bool
    has_pairs: bool
    integer_tile: ProductTile | None  # the tile in registers that multiplies integers by bytes

    @property
    def queries(self) -> Array:
        return self.kernel.array(self.node.queries)

    @property
    def sequences(self) -> Array:
        return self.kernel.array(self.node.sequences)

    @property
    def cache(self) -> Array:
        return self.kernel.array(self.pages.cache)

    @property
    def tables(self) -> Array:
        return self.kernel.array(self.pages.tables)

    @property
    def scales(self) -> Array | None:
        return None if self.pages.scales is None else self.kernel.array(self.pages.scales)

    @property
    def sinks(self) -> Array | None:
        return None if self.node.sinks is None else self.kernel.array(self.node.sinks)

    @property
    def out(self) -> Array:
        return self.kernel.array(self.node.out)

    @property
    def on_matrix_unit(self) -> bool:
        return self.has_matrix_unit and self._fits_bf16

    @property
    def in_pairs(self) -> bool:
        """Whether products multiply pairs of bf16 in vectors."""
        return self.has_pairs and self._fits_bf16

    @property
    def integers(self) -> IntegerTiles | None:
        """The tiles of products of integers. None if products multiply floats, as they do where a page stores its values in its keys."""
        fits = self.cache.dtype is DType.I8 and self.size % PAGE == 0 and self.size <= integer.LONGEST and self.pages.has_values
        return IntegerTiles(self.integer_tile, self.size) if fits and self.integer_tile is not None else None

    @property
    def block(self) -> int:
        """The number of keys of a block."""
        if self.integers is not None:
            return integer.BLOCK
        return matrix.BLOCK if self.on_matrix_unit else BLOCK

    @property
    def split_blocks(self) -> int:
        """The number of blocks of a split."""
        if self.integers is not None:
            return integer.SPLIT
        return matrix.SPLIT if self.on_matrix_unit else SPLIT

    @property
    def split_pages(self) -> int:
        """The number of pages of a split."""
        return self.split_blocks * self.block // PAGE

    @property
    def _fits_bf16(self) -> bool:
        return self.cache.dtype is DType.BF16 and self.size % CHUNK == self.value_size % CHUNK == 0

    @property
    def num_tokens(self) -> Dim:
        return self.queries.shape[0]

    @property
    def heads(self) -> int:
        return self.queries.shape[1].const

    @property
    def kv_heads(self) -> int:
        return self.cache.shape[3].const

    @property
    def group(self) -> int:
        """The number of query heads per kv head."""
        return self.heads // self.kv_heads

    @property
    def size(self) -> int:
        return self.queries.shape[2].const

    @property
    def value_size(self) -> int:
        return self.out.shape[2].const

    @property
    def width(self) -> int:
        """The number of lanes of a vector of values: the largest number that divides the sizes of keys and values."""
        width = self.tile.lanes
        while self.size % width or self.value_size % width:
            width //= 2
        return width

    @property
    def parts(self) -> int:
        """The number of vectors of a value."""
        return self.value_size // self.width

    @property
    def tile_tokens(self) -> int:
        """The number of tokens of a tile, which share keys and values. Their rows fill tiles of registers or of a matrix unit, and their
        sums stay in the first-level cache. A tile has at least two tokens, because a tile computes all splits on one thread, which is too
        slow for a single token."""
        if self.on_matrix_unit:
            return max(2, min(MOST_TOKENS, PRODUCTS * (HEIGHT // self.group)))
        rows = lcm(self.group, self.tile.rows)
        return rows * max(1, min(ROWS, 4096 // self.size) // rows) // self.group

    @property
    def most_tiles(self) -> int:
        """The maximum number of adjacent tiles that a thread computes together. On a matrix unit they share keys and values, which take
        longer to load than to multiply."""
        if not self.on_matrix_unit:
            return 1
        row_bytes = 2 * self.size + 4 * 2 * self.value_size
        return max(1, min(MOST_TILES, TILES_BYTES // (row_bytes * self.tile_tokens * self.group)))

    @property
    def kv_heads_at_once(self) -> int:
        """The number of kv heads whose scores a token computes at once. Several heads hide the latency of additions of floats."""
        if self.integers is not None or self.on_matrix_unit:
            return 1
        count, most = 1, self.tile.rows * self.tile.vectors
        while self.kv_heads % (2 * count) == 0 and 2 * count * self.group <= most // 2:
            count *= 2
        return count

    def part_of_heads(self, k: Kernel, part: Dim, parts: Dim) -> Heads:
        runs = self.kv_heads // self.kv_heads_at_once
        begin, end = (n * runs // parts * self.kv_heads_at_once for n in (part, part + 1))
        first = k.let("kv_first", begin)
        return Heads(first, k.let("kv_count", end - first), self.group)

    # --- the state of rows, and the units that compute them ------------------------------------------------------------

    def allocate_rows(self, k: Kernel, count: int, blocks: int, *, in_tile: bool) -> Rows:
        """Allocate the state of `count` rows, and of their scores in some blocks. `in_tile` says whether the rows are those of a tile."""
        if (tiles := self.integers) is not None:
            return tiles.allocate_rows(k, count)
        if self.on_matrix_unit:
            return MatrixRows.allocate_for(
                k, count, height_of(self.tile_tokens * self.group) if in_tile else count, self.size, self.value_size
            )
        return Rows.allocate(k, count, blocks * PAGES, self.size, self.value_size, self.width, BF16 if self.in_pairs else F32)

    def vector_unit(self, k: Kernel, rows: Rows, layer: Dim) -> VectorUnit:
        products = (PairProducts if self.in_pairs else F32Products)(rows, self.cache, layer, self.size, self.turned(k, layer))
        sizes, softcap = (self.size, self.value_size, self.width), self.node.softcap
        return VectorUnit(rows, self.cache, self.scales, layer, *sizes, softcap, self.tile, self.steps, products)

    def integer_unit(self, k: Kernel, rows: Rows, layer: Dim) -> IntegerUnit:
        assert isinstance(rows, IntegerRows), rows
        assert self.scales is not None, self.cache
        assert self.integers is not None, self.cache
        return IntegerUnit.allocate(k, rows, self.cache, self.scales, layer, self.node.softcap, self.integers)

    def matrix_unit(self, k: Kernel, rows: Rows, layer: Dim, count: int, panels: int) -> AbstractContextManager[MatrixUnit]:
        """Configure the matrix unit for `count` rows that share a kv head, with room for `panels` panels of keys and values."""
        assert isinstance(rows, MatrixRows), rows
        sizes, softcap = (self.size, self.value_size), self.node.softcap
        return MatrixUnit.configured(k, rows, self.cache, layer, sizes, softcap, height_of(count), panels, self.turned(k, layer))

    def turned(self, k: Kernel, layer: Dim) -> TurnedValues | None:
        return None if self.pages.has_values else TurnedValues.allocate(k, self.cache, layer, self.value_size)

    def load_queries(self, k: Kernel, rows: Rows, row: Dim, token: Dim, head: Dim, count: Dim | int) -> None:
        """Load and scale the queries of `count` heads of a token."""
        if isinstance(rows, IntegerRows) and self.integers is not None:
            query = k.local("query", self.size // PAGE, PAGE)
            with k.serial("g", count) as g:
                with k.serial("c", self.size // PAGE) as c, k.vector(PAGE) as lane:
                    query[c, lane] = cast(self.queries[token, head + g, c * PAGE + lane], F32) * self.node.scale
                self.integers.round_query(k, rows, row + g, query)
            return
        if isinstance(rows, MatrixRows):
            with k.serial("g", count) as g:
                load_query(k, rows, row + g, self.queries[token, head + g, 0], self.node.scale, self.node.softcap)
            return
        with k.serial("g", count) as g, k.serial("c", self.size // self.width) as c, k.vector(self.width) as lane:
            at = c * self.width + lane
            query = cast(self.queries[token, head + g, at], F32) * self.node.scale
            rows.queries[row + g, at] = cast(query, rows.queries.dtype)

    # --- reading the operands ------------------------------------------------------------------------------------------

    def layer(self, k: Kernel) -> Dim:
        return k.let("layer", cast(self.pages.layer, I64))

    def page(self, k: Kernel, sequence: Dim, index: Dim) -> Dim:
        return k.let("page", cast(self.tables[sequence, index], I64))

    def sequence(self, k: Kernel, token: Dim) -> Dim:
        return k.let("s", cast(self.sequences[token], I64))

    def position(self, k: Kernel, token: Dim) -> Dim:
        return k.let("position", cast(self.positions[token], I64))

    def low(self, position: Dim) -> Dim:
        """Return the first position to which the token at `position` attends."""
        return dim_max(0, position - (self.node.window - 1)) if self.node.window else Dim.of(0)

    def visible(self, token: Token) -> VisibleRange:
        return VisibleRange(token.low, token.high, bool(self.node.window))

    def visible_page(self, index: Dim, low: Dim, high: Dim) -> Dim:
        """Clamp an index of the page table to the pages with visible keys. The first and the last block can contain other pages."""
        last = dim_min(index, high // PAGE)
        return dim_max(last, low // PAGE) if self.node.window else last

    def token(self, k: Kernel, number: Dim, split: Dim) -> Token:
        sequence, high = self.sequence(k, number), self.position(k, number)
        low = self.low(high)
        block, count = self.block, self.split_blocks
        begin = k.let("begin", dim_max(low // block, split * count))
        end = k.let("end", dim_min(high // block + 1, split * count + count))
        return Token(number, sequence, low, high, begin, end)

    @contextmanager
    def splits(self, k: Kernel, first_position: Dim, last_position: Dim) -> Generator[Dim]:
        """Loop, in order, over the splits with keys that tokens at these positions see."""
        first, last = (at // (self.split_blocks * self.block) for at in (self.low(first_position), last_position))
        with k.serial("split", last + 1 - first) as split:
            yield first + split

    # --- tiles of tokens -----------------------------------------------------------------------------------------------

    def shares_sequence(self, tile: Dim) -> Scalar:
        """Return whether the tile has enough tokens, and all of them belong to one sequence."""
        first, count = tile * self.tile_tokens, self.tokens_from(tile * self.tile_tokens, Dim.of(self.tile_tokens))
        alike = fold(ReduceFn.ALL, (count,), lambda i: equal(self.sequences[first + i], self.sequences[first]))
        return alike & less_equal(max(2, self.tile_tokens // 2), count)

    def continues(self, tile: Dim) -> Scalar:
        """Return whether the tile and the one before it have tokens of the same sequence only."""
        before = dim_max(0, tile - 1)  # the first tile has none before it, and the result does not matter
        alike = equal(self.sequences[tile * self.tile_tokens], self.sequences[before * self.tile_tokens])
        return alike & self.shares_sequence(tile) & self.shares_sequence(before)

    def extreme_position(self, first: Dim, count: Dim, fn: ReduceFn) -> Scalar:
        """Return the smallest or largest position of `count` tokens, or of those that exist."""
        return fold(fn, (self.tokens_from(first, count),), lambda i: cast(self.positions[first + i], I64))

    def token_of(self, tile_first: Dim, i: Dim) -> Dim:
        """Return the number of token `i` of the tile that begins with token `tile_first`. If the tile is not full, its last token takes the
        places of those that are missing."""
        return dim_min(tile_first + i, self.num_tokens - 1)

    def tokens_from(self, first: Dim, count: Dim) -> Dim:
        """Return how many of `count` tokens from token `first` on exist."""
        return dim_min(count, self.num_tokens - first)


@dataclass(frozen=True, slots=True)
class TokenTile:
    """Adjacent tokens of one sequence, in a split, with the query heads that share a kv head. Row `i * group + g` is token `i` of the tile
    and query head `g`. The last tile of a batch may not be full."""

    operands: PagedOperands
    kv_head: Dim
    first: Dim  # index of the first token in the batch
    num_tokens: Dim
    first_position: Dim  # the smallest position of the tile's tokens
    last_position: Dim  # the largest position of the tile's tokens
    split: Dim

    @contextmanager
    def tokens(self, k: Kernel) -> Generator[tuple[Token, Dim]]:
        """Loop over the tokens of the tile. Yield each token and its first row."""
        with k.serial("i", self.num_tokens) as i:
            yield self.token(k, i), i * self.operands.group

    def token(self, k: Kernel, i: Dim) -> Token:
        return self.operands.token(k, self.operands.token_of(self.first, i), self.split)

    @contextmanager
    def rows(self, k: Kernel, first: Dim) -> Generator[Dim]:
        """Loop over the rows of the token whose first row is `first`."""
        with k.serial("g", self.operands.group) as g:
            yield first + g
