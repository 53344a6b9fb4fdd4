"""The two ways to walk the blocks of a split: one token with all its heads, and a tile of tokens with the heads that share a kv head.

A token alone is bound by memory: it reads whole pages, all heads of them, the keys of STRETCH blocks and then their values, so that its
reads are two long streams where a sequence has neighbouring pages. A tile is bound by arithmetic: its rows share what a register holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.attention_block import Kernel
from compiler.backends.cpu.schedule.attention_form import SPLIT, Form, Heads, Token
from compiler.backends.cpu.schedule.attention_rows import BLOCK, PAGE, PAGES, Again, Ahead, Column, Seen, in_tiles, integer
from compiler.backends.cpu.schedule.nests import below, loop, seq, when
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.loops import Stmt

STRETCH = 4  # blocks


@dataclass(frozen=True, slots=True)
class TokenWalk:
    """Some of a token's heads. Row `h` belongs to query head `h`."""

    form: Form
    kernel: Kernel
    token: Token
    heads: Heads

    def run(self) -> Stmt:
        return seq(self.heads.each(self.kernel.rows.clear), in_stretches(self.token, self.stretch))

    def stretch(self, first: Dim, count: Dim) -> Stmt:
        """Each page asks for the one that is read after it: behind the last keys that is the first of the values, and behind those the
        first keys of the next stretch."""

        def keys(v: Dim, body: Callable[[Column], Stmt]) -> Stmt:
            last = is_last(v)
            return self.column(first, v, Ahead(last, first * PAGES + v + 1 - last * (count * PAGES)), body)

        def values(v: Dim, body: Callable[[Column], Stmt]) -> Stmt:
            return self.column(first, v, Ahead(1 - is_last(v), first * PAGES + v + 1), body)

        def is_last(v: Dim) -> Dim:
            return dim_max(0, v + 2 - count * PAGES)

        return seq(loop("v", count * PAGES, lambda v: keys(v, self.scores)), loop("b", count, lambda b: self.block(b, values)))

    def column(self, first: Dim, v: Dim, ahead: Ahead, body: Callable[[Column], Stmt]) -> Stmt:
        """The page at place `v` behind block `first`."""
        index, sequence = first * PAGES + v, self.token.sequence

        def known(page: Dim, ahead: Ahead) -> Stmt:
            return body(Column(Dim.of(0), Dim.of(0), page, v, index * PAGE, ahead))

        def asked(page: Dim) -> Stmt:
            return self.form.page(sequence, self.seen_page(ahead.page), lambda a: known(page, replace(ahead, page=a)))

        return self.form.page(sequence, self.seen_page(index), asked)

    def seen_page(self, index: Dim) -> Dim:
        return self.form.seen_page(index, self.token.low, self.token.high)

    def scores(self, page: Column) -> Stmt:
        abreast = self.form.abreast

        def heads(kv: Dim) -> Stmt:
            def tile(row: Dim, n: int) -> Stmt:
                columns = [self.of_head(page, kv + i, row) for i in range(abreast)]
                return self.kernel.scores(columns, n, self.seen)

            return in_tiles(self.form.group, self.kernel.most, tile)

        return self.heads.each_kv(heads, abreast)

    def block(self, b: Dim, column: Callable[[Dim, Callable[[Column], Stmt]], Stmt]) -> Stmt:
        form, kernel = self.form, self.kernel

        def weights(columns: list[Column], kv: Dim) -> Stmt:
            block = [self.of_head(c, kv, Dim.of(0)) for c in columns]
            return loop("m", form.group, lambda m: kernel.weigh(block[0].row + m, block))

        def values(column: Column) -> Stmt:
            def tile(kv: Dim, row: Dim, n: int) -> Stmt:
                return kernel.values([self.of_head(column, kv, row)], n, self.seen)

            return self.heads.each_kv(lambda kv: in_tiles(form.group, kernel.tile.rows, lambda row, n: tile(kv, row, n)))

        def known(columns: list[Column]) -> Stmt:
            if len(columns) < PAGES:
                return column(b * PAGES + len(columns), lambda found: known([*columns, found]))
            return seq(self.heads.each_kv(lambda kv: weights(columns, kv)), *map(values, columns))

        return known([])

    @property
    def seen(self) -> Seen:
        return self.form.seen(self.token)

    def of_head(self, page: Column, kv_head: Dim, row: Dim) -> Column:
        return replace(page, row=kv_head * self.form.group + row, kv_head=kv_head, again=self.again(kv_head))

    def again(self, kv_head: Dim) -> Again | None:
        """Pairs are multiplied faster than pages come from memory, so more is asked for at a time than can be on its way, and the rest is
        lost: asked for again, half of the heads before it is read."""
        if not self.form.pairs:
            return None
        first, count = self.heads.first, self.heads.count
        later = kv_head + count // 2
        turned = dim_min(1, dim_max(0, later + 1 - (first + count)))
        return Again(later - turned * count, turned)


@dataclass(frozen=True, slots=True)
class TileWalk:
    """Row `i * group + g` belongs to token `i` of the tile and query head `g` of those that share the kv head."""

    form: Form
    kernel: Kernel
    kv_head: Dim
    first: Dim  # token
    least: Dim  # of its positions
    most: Dim
    split: Dim

    def run(self, done: Callable[[Token, Dim], Stmt]) -> Stmt:
        """Then `done(token, row)` for the rows that see some of the split."""
        form, group = self.form, self.form.group
        begin = dim_min(dim_max(ceil_div(form.low(self.most), BLOCK), self.split * SPLIT), self.split * SPLIT + SPLIT)
        end = dim_min((self.least + 1) // BLOCK, self.split * SPLIT + SPLIT)

        def finished(token: Token, row: Dim) -> Stmt:
            return when(below(token.begin, token.end), loop("g", group, lambda g: done(token, row + g)))

        def parts(begin: Dim, end: Dim) -> Stmt:
            """Blocks that some tokens see in part or not at all each token walks for itself."""
            before = [self.tokens(lambda token, row: self.edge(token, row, token.begin, dim_min(token.end, begin)))] if form.window else []
            behind = self.tokens(lambda token, row: self.edge(token, row, dim_max(token.begin, end), token.end))
            common = form.sequence(self.first, lambda s: loop("b", end - begin, lambda b: self.common(s, begin + b)))
            return seq(*before, common, behind, self.tokens(finished))

        return seq(
            loop("m", form.tile_tokens * group, self.kernel.rows.clear),
            integer("begin", begin, lambda begin: integer("end", dim_max(begin, end), lambda end: parts(begin, end))),
        )

    def tokens(self, body: Callable[[Token, Dim], Stmt]) -> Stmt:
        form = self.form
        return loop("i", form.tile_tokens, lambda i: form.token(self.first + i, self.split, lambda token: body(token, i * form.group)))

    def common(self, sequence: Dim, b: Dim) -> Stmt:
        """A block that all tokens see whole."""
        rows = self.form.tile_tokens * self.form.group
        return self.columns(sequence, b, lambda index: index, lambda block: self.step(Dim.of(0), rows, block, None))

    def edge(self, token: Token, row: Dim, begin: Dim, end: Dim) -> Stmt:
        """Blocks that a token may see in part."""
        form, seen = self.form, self.form.seen(token)

        def page(index: Dim) -> Dim:
            return form.seen_page(index, token.low, token.high)

        def block(b: Dim) -> Stmt:
            return self.columns(token.sequence, b, page, lambda block: self.step(row, form.group, block, seen))

        return integer("begin", begin, lambda begin: loop("b", end - begin, lambda b: block(begin + b)))

    def columns(self, sequence: Dim, b: Dim, place: Callable[[Dim], Dim], body: Callable[[list[Column]], Stmt]) -> Stmt:
        def known(found: list[Column]) -> Stmt:
            if len(found) == PAGES:
                return body(found)
            v = len(found)
            index = b * PAGES + v

            def column(page: Dim) -> Column:
                return Column(Dim.of(0), self.kv_head, page, Dim.of(v), index * PAGE)

            return self.form.page(sequence, place(index), lambda page: known([*found, column(page)]))

        return known([])

    def step(self, first: Dim, count: int, block: list[Column], seen: Seen | None) -> Stmt:
        kernel, tile = self.kernel, self.kernel.tile

        def at(row: Dim) -> list[Column]:
            return [replace(column, row=first + row) for column in block]

        def scores(row: Dim, n: int) -> Stmt:
            groups = [at(row)[v : v + tile.vectors] for v in range(0, PAGES, tile.vectors)]
            return seq(*(kernel.scores(columns, n, seen) for columns in groups))

        def values(row: Dim, n: int) -> Stmt:
            return kernel.values(at(row), n, seen)

        weights = loop("m", count, lambda m: kernel.weigh(first + m, block))
        return seq(in_tiles(count, tile.rows, scores), weights, in_tiles(count, tile.rows, values))


def in_stretches(token: Token, body: Callable[[Dim, Dim], Stmt]) -> Stmt:
    """`body(first, count)`: the blocks of a token's split, STRETCH at a time."""

    def stretch(x: Dim) -> Stmt:
        first = token.begin + x * STRETCH
        return integer("count", dim_min(STRETCH, token.end - first), lambda count: body(first, count))

    return loop("x", ceil_div(token.end - token.begin, STRETCH), stretch)
