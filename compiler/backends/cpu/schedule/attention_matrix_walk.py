"""The two ways to walk the blocks of a split (attention_walk.py), on a matrix unit.

A token alone takes the keys of STRETCH blocks, all heads of them, and then their values. The rows of a tile take every block together that
one of them sees. What a row does not see gets no weight, so only values that are no numbers could reach it: where there are such, the
block's values are multiplied for each token apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from compiler.backends.cpu.schedule.attention_form import SPLIT, Form, Heads, Token
from compiler.backends.cpu.schedule.attention_matrix import MatrixKernel
from compiler.backends.cpu.schedule.attention_rows import BLOCK, PAGE, PAGES, Ahead, Column, Seen, integer
from compiler.backends.cpu.schedule.attention_walk import in_stretches
from compiler.backends.cpu.schedule.nests import below, loop, seq, when
from compiler.backends.cpu.schedule.pieces import le
from compiler.ir.dims import Dim, dim_max, dim_min
from compiler.ir.loops import Apply, DimScalar, Fn, Scalar, Stmt

Block = list[Column]  # its pages


@dataclass(frozen=True, slots=True)
class MatrixTokenWalk:
    """Some of a token's heads. Row `h` belongs to query head `h`."""

    form: Form
    kernel: MatrixKernel
    token: Token
    heads: Heads

    def run(self) -> Stmt:
        return seq(self.heads.each(self.kernel.rows.clear), self.kernel.around(in_stretches(self.token, self.stretch)))

    def stretch(self, first: Dim, count: Dim) -> Stmt:
        """Each page asks for the one at its place in the block that is read next: behind the last keys come values, and behind those the
        keys of the next stretch."""

        def is_last(b: Dim) -> Dim:
            return dim_max(0, b + 2 - count)

        def keys(b: Dim) -> Stmt:
            last = is_last(b)
            return self.block(first + b, Ahead(last, first + b + 1 - last * count), lambda block: self.scores(block, b))

        def values(b: Dim) -> Stmt:
            return self.block(first + b, Ahead(1 - is_last(b), first + b + 1), lambda block: self.values(block, b))

        return seq(loop("b", count, keys), loop("b", count, values))

    def block(self, number: Dim, ahead: Ahead, body: Callable[[Block], Stmt]) -> Stmt:
        sequence, (low, high) = self.token.sequence, (self.token.low, self.token.high)

        def asked(block: Block, pages: Block) -> Block:
            return [replace(c, ahead=replace(ahead, page=p.page)) for c, p in zip(block, pages, strict=True)]

        def known(block: Block) -> Stmt:
            return pages_of(self.form, sequence, ahead.page, low, high, lambda pages: body(asked(block, pages)))

        return pages_of(self.form, sequence, number, low, high, known)

    def scores(self, block: Block, place: Dim) -> Stmt:
        return self.heads.each_kv(lambda kv: self.kernel.scores(of_head(block, kv), kv * self.form.group, place))

    def values(self, block: Block, place: Dim) -> Stmt:
        kernel, token, group = self.kernel, self.token, self.form.group

        def of(kv: Dim) -> Stmt:
            first = kv * group
            return seq(
                loop("m", group, lambda m: weigh(kernel, m, first + m, place, block[0].start, self.form.seen(token))),
                kernel.take_values(of_head(block, kv), token.low, token.high),
                kernel.multiply(),
                loop("m", group, lambda m: kernel.add(m, first + m)),
            )

        return self.heads.each_kv(of)


@dataclass(frozen=True, slots=True)
class MatrixTileWalk:
    """Row `i * group + g` belongs to token `i` of the tile and query head `g` of those that share the kv head."""

    form: Form
    kernel: MatrixKernel
    kv_head: Dim
    first: Dim  # token
    least: Dim  # of its positions
    most: Dim
    split: Dim

    def run(self, done: Callable[[Token, Dim], Stmt]) -> Stmt:
        """Then `done(token, row)` for the rows that see some of the split."""
        form, split = self.form, self.split
        low, end = form.low(self.least), dim_min(self.most // BLOCK + 1, split * SPLIT + SPLIT)

        def walk(low: Dim, begin: Dim, sequence: Dim) -> Stmt:
            def block(b: Dim) -> Stmt:
                return pages_of(form, sequence, b, low, self.most, lambda block: self.block(b, low, of_head(block, self.kv_head)))

            return loop("b", end - begin, lambda b: block(begin + b))

        def walks(low: Dim) -> Stmt:
            begin = dim_max(low // BLOCK, split * SPLIT)
            return integer("begin", begin, lambda begin: form.sequence(self.first, lambda s: walk(low, begin, s)))

        return seq(
            loop("m", self.kernel.count, self.kernel.rows.clear),
            self.kernel.around(integer("low", low, walks)),
            self.tokens(lambda token, row: when(below(token.begin, token.end), self.rows(row, lambda m: done(token, m)))),
        )

    def block(self, b: Dim, low: Dim, block: Block) -> Stmt:
        kernel = self.kernel

        def weights(token: Token, m: Dim) -> Stmt:
            return weigh(kernel, m, m, Dim.of(0), block[0].start, self.form.seen(token))

        return seq(
            kernel.scores(block, Dim.of(0), Dim.of(0)),
            kernel.take_values(block, low, self.most),  # while the unit multiplies
            self.tokens(lambda token, row: when(sees(token, b), self.rows(row, lambda m: weights(token, m)))),
            self.turns(b, lambda turn, num_turns, num_tokens: self.values(b, block, turn, num_turns, num_tokens)),
        )

    def values(self, b: Dim, block: Block, turn: Dim, num_turns: Dim, num_tokens: Dim) -> Stmt:
        kernel = self.kernel

        def add(i: Dim) -> Stmt:
            return self.token(turn + i, lambda token, row: when(sees(token, b), self.rows(row, lambda m: kernel.add(m, m))))

        again = self.token(turn, lambda token, _: kernel.take_values(block, token.low, token.high))
        return seq(when(below(1, num_turns), again), kernel.multiply(), loop("i", num_tokens, add))

    def turns(self, b: Dim, body: Callable[[Dim, Dim, Dim], Stmt]) -> Stmt:
        """One for all tokens, or one for each: `body(turn, turns, tokens of each)`."""
        form, every = self.form, Dim.of(self.form.tile_tokens)

        def known(apart: Scalar) -> Stmt:
            def chosen(yes: Dim, no: Dim) -> Scalar:
                return Apply(Fn.SELECT, (apart, DimScalar(yes), DimScalar(no)))

            def counted(turns: Dim) -> Stmt:
                return integer("tokens", chosen(Dim.of(1), every), lambda n: loop("turn", turns, lambda turn: body(turn, turns, n)))

            return integer("turns", chosen(every, Dim.of(1)), counted)

        in_part = Apply(Fn.OR, (below(self.least, b * BLOCK + (BLOCK - 1)), below(b * BLOCK, form.low(self.most))))
        return self.kernel.spoiled(in_part, known)

    # --- tokens and their rows -----------------------------------------------------------------------------------------

    def tokens(self, body: Callable[[Token, Dim], Stmt]) -> Stmt:
        return loop("i", self.form.tile_tokens, lambda i: self.token(i, body))

    def token(self, i: Dim, body: Callable[[Token, Dim], Stmt]) -> Stmt:
        return self.form.token(self.first + i, self.split, lambda token: body(token, i * self.form.group))

    def rows(self, first: Dim, body: Callable[[Dim], Stmt]) -> Stmt:
        return loop("g", self.form.group, lambda g: body(first + g))


# --- pieces ------------------------------------------------------------------------------------------------------------


def weigh(kernel: MatrixKernel, m: Dim, row: Dim, place: Dim, start: Dim, seen: Seen) -> Stmt:
    """Nothing is compared where the whole block is seen."""
    whole = le(start + (BLOCK - 1), seen.high)
    if seen.from_low:
        whole = Apply(Fn.AND, (whole, le(seen.low, start)))
    return when(whole, kernel.weigh(m, row, place, start, None), kernel.weigh(m, row, place, start, seen))


def sees(token: Token, b: Dim) -> Scalar:
    return Apply(Fn.AND, (le(token.begin, b), below(b, token.end)))


def of_head(block: Block, kv_head: Dim) -> Block:
    return [replace(column, kv_head=kv_head) for column in block]


def pages_of(form: Form, sequence: Dim, b: Dim, low: Dim, high: Dim, body: Callable[[Block], Stmt]) -> Stmt:
    def known(found: Block) -> Stmt:
        if len(found) == PAGES:
            return body(found)
        index = b * PAGES + len(found)

        def column(page: Dim) -> Column:
            return Column(Dim.of(0), Dim.of(0), page, Dim.of(0), index * PAGE)

        return form.page(sequence, form.seen_page(index, low, high), lambda page: known([*found, column(page)]))

    return known([])
