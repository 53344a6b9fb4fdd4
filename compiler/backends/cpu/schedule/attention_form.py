"""What the parts of a paged attention kernel agree on: its operands, and where blocks and splits begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm

from compiler.backends.cpu.schedule.attention_block import Kernel
from compiler.backends.cpu.schedule.attention_matrix import HEIGHT, MatrixKernel, blank_queries, rows_of_unit
from compiler.backends.cpu.schedule.attention_products import Pairs, Singles
from compiler.backends.cpu.schedule.attention_rows import BLOCK, F32, PAGE, PAGES, Rows, Seen, integer
from compiler.backends.cpu.schedule.nests import lanes, loop, seq
from compiler.backends.cpu.schedule.pieces import f32, le, mul
from compiler.backends.cpu.schedule.spot import TileShape
from compiler.ir.dims import Dim, DimVar, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Cast, Const, Fn, Load, Reduce, ReduceFn, Scalar, ScalarParam, Stmt, Store

SPLIT = 8  # blocks
ROWS = 32  # of a tile, about
BF16, I64 = DType.BF16, DType.I64


@dataclass(frozen=True, slots=True)
class Token:
    """What it sees, and its part of a split, in blocks."""

    number: Dim
    sequence: Dim
    low: Dim
    high: Dim
    begin: Dim
    end: Dim


@dataclass(frozen=True, slots=True)
class Heads:
    """Neighbours among the kv heads, and the query heads that belong to them."""

    first: Dim
    count: Dim
    group: int  # query heads per kv head

    def each_kv(self, body: Callable[[Dim], Stmt], step: int = 1) -> Stmt:
        return loop("kv", self.count // step, lambda kv: body(self.first + kv * step))

    def each(self, body: Callable[[Dim], Stmt]) -> Stmt:
        return loop("h", self.count * self.group, lambda h: body(self.first * self.group + h))


@dataclass(frozen=True, slots=True)
class Form:
    buffers: tuple[Buffer, ...]  # q, cache, page tables, sequence ids, positions, scales of an 8-bit cache, sinks if any, out
    layer_param: ScalarParam
    scale: float
    window: int
    softcap: float
    tile: TileShape
    unit: bool  # whether a matrix unit multiplies
    pairs: bool  # whether pairs of bf16 are multiplied

    @property
    def num_tokens(self) -> Dim:
        return self.buffers[0].shape[0]

    @property
    def heads(self) -> int:
        return self.buffers[0].shape[1].const

    @property
    def kv_heads(self) -> int:
        return self.buffers[1].shape[3].const

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.heads // self.kv_heads

    @property
    def size(self) -> int:
        return self.buffers[0].shape[2].const

    @property
    def width(self) -> int:
        """Lanes of a part of a value."""
        width = self.tile.lanes
        while self.size % width:
            width //= 2
        return width

    @property
    def parts(self) -> int:
        return self.size // self.width

    @property
    def tile_tokens(self) -> int:
        """Neighbours that share keys and values: their rows fill register tiles, and what is summed stays in the first-level cache. On a
        matrix unit they fill its tiles. At least two: a token by itself is none of several, and is cut into splits."""
        if self.unit:
            return max(2, HEIGHT // self.group)
        rows = lcm(self.group, self.tile.rows)
        return rows * max(1, min(ROWS, 4096 // self.size) // rows) // self.group

    @property
    def abreast(self) -> int:
        """Kv heads whose scores a token sums at a time, to hide how long an addition takes."""
        abreast, most = 1, self.tile.rows * self.tile.vectors
        while self.kv_heads % (2 * abreast) == 0 and 2 * abreast * self.group <= most // 2:
            abreast *= 2
        return abreast

    def some_heads(self, part: Dim, parts: Dim, body: Callable[[Heads], Stmt]) -> Stmt:
        """A part of them all."""
        runs = self.kv_heads // self.abreast
        begin, end = (n * runs // parts * self.abreast for n in (part, part + 1))
        return integer(
            "kv_first", begin, lambda first: integer("kv_count", end - first, lambda count: body(Heads(first, count, self.group)))
        )

    @property
    def sinks(self) -> Buffer | None:
        first = 6 if self.buffers[1].dtype is DType.I8 else 5
        return self.buffers[first] if len(self.buffers) > first + 1 else None

    def rows(self, count: int, blocks: int) -> Rows:
        if self.unit:
            return rows_of_unit(count, blocks, self.size)
        return Rows.of(count, blocks * PAGES, self.size, self.width, BF16 if self.pairs else F32)

    def kernel(self, rows: Rows, layer: Dim) -> Kernel:
        cache = self.buffers[1]
        scales = self.buffers[5] if cache.dtype is DType.I8 else None
        products = (Pairs if self.pairs else Singles)(rows, cache, layer, self.size)
        return Kernel(rows, cache, scales, layer, self.size, self.width, self.softcap, self.tile, products)

    def matrix_kernel(self, rows: Rows, layer: Dim, count: int) -> MatrixKernel:
        return MatrixKernel.of(rows, self.buffers[1], layer, self.size, self.softcap, count)

    # --- operands ------------------------------------------------------------------------------------------------------

    def layer(self, body: Callable[[Dim], Stmt]) -> Stmt:
        return integer("layer", self.layer_param, body)

    def fetch(self, rows: Rows, row: Dim, token: Dim, head: Dim, count: Dim | int) -> Stmt:
        """The queries of `count` heads of a token."""

        def element(g: Dim, c: Dim, lane: Dim) -> Stmt:
            at, dtype = c * self.width + lane, rows.queries.dtype
            value = mul(f32(Load(self.buffers[0], (token, head + g, at))), Const(self.scale, F32))
            return Store(rows.queries, (row + g, at), value if dtype is F32 else Cast(value, dtype))

        def query(g: Dim) -> Stmt:
            given = loop("c", self.parts, lambda c: lanes(self.width, lambda lane: element(g, c, lane)))
            return seq(given, *(blank_queries(rows, row + g, self.size) if self.unit else []))

        return loop("g", count, query)

    def page(self, sequence: Dim, index: Dim, body: Callable[[Dim], Stmt]) -> Stmt:
        return integer("page", Load(self.buffers[2], (sequence, index)), body)

    def sequence(self, token: Dim, body: Callable[[Dim], Stmt]) -> Stmt:
        return integer("s", Load(self.buffers[3], (token,)), body)

    def position(self, token: Dim, body: Callable[[Dim], Stmt]) -> Stmt:
        return integer("position", Load(self.buffers[4], (token,)), body)

    def low(self, position: Dim) -> Dim:
        """The first position that is seen from there."""
        return dim_max(0, position - (self.window - 1)) if self.window else Dim.of(0)

    def seen(self, token: Token) -> Seen:
        return Seen(token.low, token.high, bool(self.window))

    def seen_page(self, index: Dim, low: Dim, high: Dim) -> Dim:
        """Blocks may begin before the first and end behind the last page that is seen."""
        last = dim_min(index, high // PAGE)
        return dim_max(last, low // PAGE) if self.window else last

    def token(self, number: Dim, split: Dim, body: Callable[[Token], Stmt]) -> Stmt:
        def known(sequence: Dim, high: Dim) -> Stmt:
            low = self.low(high)
            begin, end = dim_max(low // BLOCK, split * SPLIT), dim_min(high // BLOCK + 1, split * SPLIT + SPLIT)

            def within(begin: Dim, end: Dim) -> Stmt:
                return body(Token(number, sequence, low, high, begin, end))

            return integer("begin", begin, lambda begin: integer("end", end, lambda end: within(begin, end)))

        return self.sequence(number, lambda sequence: self.position(number, lambda high: known(sequence, high)))

    def splits(self, least: Dim, most: Dim, body: Callable[[Dim], Stmt]) -> Stmt:
        """Those that are seen from positions `least` to `most`, in order."""
        first, last = self.low(least) // (BLOCK * SPLIT), most // (BLOCK * SPLIT)
        return loop("split", last + 1 - first, lambda split: body(first + split))

    # --- tiles of tokens -----------------------------------------------------------------------------------------------

    def together(self, tile: Dim) -> Scalar:
        """Whether the tile is full and its tokens belong to one sequence."""
        seq_ids, first, count = self.buffers[3], tile * self.tile_tokens, self.tokens_in(tile)
        alike = self.over(tile, ReduceFn.ALL, lambda t: Apply(Fn.EQ, (Load(seq_ids, (t,)), Load(seq_ids, (first,)))))
        return Apply(Fn.AND, (alike, le(Dim.of(self.tile_tokens), count)))

    def extreme_position(self, tile: Dim, fn: ReduceFn) -> Scalar:
        return self.over(tile, fn, lambda t: Cast(Load(self.buffers[4], (t,)), I64))

    def tokens_in(self, tile: Dim) -> Dim:
        return dim_min(self.tile_tokens, self.num_tokens - tile * self.tile_tokens)

    def over(self, tile: Dim, fn: ReduceFn, value: Callable[[Dim], Scalar]) -> Scalar:
        count = self.tokens_in(tile)
        i = DimVar("i", 0, count - 1)
        return Reduce(fn, ((i, count),), value(tile * self.tile_tokens + i))
