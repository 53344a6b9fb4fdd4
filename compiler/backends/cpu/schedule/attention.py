"""Paged attention: blocks of keys in order of position.

Row by row the meaning is this: positions are cut into blocks of BLOCK keys, and into splits of SPLIT blocks, at fixed places. Within a
split, blocks are taken in order, each rescaling what is there by the change of the maximum; splits are then joined in order. That depends
on the token's own position alone, so a row has the same bits in any batch, for any chunking of the prompt, with any number of threads.

Tokens are cut into tiles. Where a whole tile belongs to one sequence its tokens share keys and values: an item is a tile and a kv head, and
walks all splits. Other tokens are on their own. Where there are several splits, an item is a token and a split for the first FEW: what it
sums goes to workspace, and a second phase joins it, so that even one sequence keeps all threads busy. Of the rest an item is a token. Where
those are few items, each is cut into parts of the kv heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiler.backends.cpu.schedule.attention_form import SPLIT, Form, Heads, Token
from compiler.backends.cpu.schedule.attention_matrix import CHUNK
from compiler.backends.cpu.schedule.attention_matrix_walk import MatrixTileWalk, MatrixTokenWalk
from compiler.backends.cpu.schedule.attention_rows import F32, PAGE, PAGES, Rows, integer
from compiler.backends.cpu.schedule.attention_walk import STRETCH, TileWalk, TokenWalk
from compiler.backends.cpu.schedule.nests import below, halves, lanes, loop, parallel, seq, unravel, when
from compiler.backends.cpu.schedule.pieces import exp_of_difference, f32, larger, local, mul
from compiler.backends.cpu.schedule.spot import TileShape
from compiler.forms.nest import allocated
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min, product_of
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Cast, Const, Fn, Load, PrimFunc, ReduceFn, Scalar, ScalarParam, Stmt, Store

FEW = 16  # tokens
BUSY = 8  # items


def schedule_attention(prim: PrimFunc, tile: TileShape, *, unit: bool, pairs: bool) -> PrimFunc | None:
    """`unit`: whether there is one that multiplies matrices of bf16. `pairs`: whether vectors do so, faster than f32."""
    kept = prim.attrs.get("attention")
    if kept is None or "ragged" in prim.attrs:
        return None
    q, cache = prim.buffers[0], prim.buffers[1]
    if not (q.shape[1].is_const and cache.shape[3].is_const and q.shape[2].is_const):
        return None
    layer = next(p for p in prim.params if isinstance(p, ScalarParam))
    scale, window, softcap = kept
    fits = cache.dtype is DType.BF16 and q.shape[2].const % CHUNK == 0
    body = _Attention(Form(prim.buffers, layer, scale, window, softcap, tile, unit and fits, pairs and fits)).body()
    return PrimFunc(prim.params, prim.num_outputs, body, {**prim.attrs, "schedule": "attention"})


@dataclass(frozen=True, slots=True)
class _Sum:
    """What was summed of a row: the largest score, the weights, the weighted values by part and lane."""

    top: Scalar
    total: Scalar
    values: Callable[[Dim, Dim], Scalar]


@dataclass(frozen=True, slots=True)
class _Sums:
    """Places for sums: of splits in workspace, of rows in the thread's own memory."""

    top: Buffer
    total: Buffer
    values: Buffer  # two more dimensions: parts and lanes

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return self.top, self.total, self.values

    def at(self, place: tuple[Dim, ...]) -> _Sum:
        return _Sum(Load(self.top, place), Load(self.total, place), lambda c, lane: Load(self.values, (*place, c, lane)))

    def put(self, place: tuple[Dim, ...], found: _Sum) -> Stmt:
        values = self.each_part(lambda c, lane: Store(self.values, (*place, c, lane), found.values(c, lane)))
        return seq(Store(self.top, place, found.top), Store(self.total, place, found.total), values)

    def add(self, place: tuple[Dim, ...], found: _Sum) -> Stmt:
        """Join one more split."""
        own, old, new, zero = self.at(place), local("old", 1), local("new", 1), (Dim.of(0),)

        def joined(a: Scalar, b: Scalar) -> Scalar:
            return Apply(Fn.FMA, (b, Load(new, zero), mul(a, Load(old, zero))))

        return allocated(
            (old, new),
            seq(
                Store(old, zero, own.top),
                Store(self.top, place, larger(own.top, found.top)),
                Store(old, zero, exp_of_difference(Load(old, zero), own.top)),
                Store(new, zero, exp_of_difference(found.top, own.top)),
                Store(self.total, place, joined(own.total, found.total)),
                self.each_part(lambda c, lane: Store(self.values, (*place, c, lane), joined(own.values(c, lane), found.values(c, lane)))),
            ),
        )

    def each_part(self, body: Callable[[Dim, Dim], Stmt]) -> Stmt:
        parts, width = (d.const for d in self.values.shape[-2:])
        return loop("c", parts, lambda c: lanes(width, lambda lane: body(c, lane)))


@dataclass(frozen=True, slots=True)
class _Attention:
    form: Form

    def body(self) -> Stmt:
        """Phases that have nothing to do cost next to nothing: a step of single tokens with one split is one phase."""
        form, num_tokens = self.form, self.form.num_tokens
        num_splits = ceil_div(form.buffers[2].shape[1], PAGES * SPLIT)
        few, several = dim_min(FEW, num_tokens), dim_min(1, dim_max(0, num_splits - 1))
        heads, kv_heads, tiles = Dim.of(form.heads), Dim.of(form.kv_heads), num_tokens // form.tile_tokens
        splits, shared = self.sums(workspace, "split", few, heads, num_splits), few * several
        split_parts, token_parts = self.parts(few * num_splits), self.parts(num_tokens)

        def phase(body: Callable[..., Stmt], **axes: Dim) -> Stmt:
            total = product_of(list(axes.values()))
            return parallel("p", total, lambda p: unravel(p, list(axes.items()), lambda place: body(*place)))

        def one_split(token: Dim, split: Dim, part: Dim) -> Stmt:
            return self.alone(token, lambda: form.some_heads(part, split_parts, lambda heads: self.keep_split(token, split, heads, splits)))

        def joined(token: Dim, head: Dim) -> Stmt:
            return self.alone(token, lambda: self.join(token, head, splits))

        def all_splits(i: Dim, part: Dim) -> Stmt:
            def whole(token: Dim) -> Stmt:
                return self.alone(token, lambda: form.some_heads(part, token_parts, lambda heads: self.whole_token(token, heads)))

            return integer("token", i + shared, whole)

        return allocated(
            splits.buffers,
            seq(
                phase(one_split, token=shared, split=num_splits, part=split_parts),
                phase(joined, token=shared, head=heads),
                phase(all_splits, token=num_tokens - shared, part=token_parts),
                phase(lambda tile, kv: when(form.together(tile), self.whole_tile(tile, kv)), tile=tiles, kv=kv_heads),
            ),
        )

    def parts(self, items: Dim) -> Dim:
        """How many items the heads of a token are cut into: no more than keep several threads busy, as whole pages are read faster."""
        return dim_min(self.form.kv_heads // self.form.abreast, ceil_div(BUSY, dim_max(1, items)))

    def alone(self, token: Dim, body: Callable[[], Stmt]) -> Stmt:
        return when(Apply(Fn.NOT, (self.form.together(token // self.form.tile_tokens),)), body())

    # --- tokens --------------------------------------------------------------------------------------------------------

    def walked(self, number: Dim, split: Dim, heads: Heads, rows: Rows, done: Callable[[Dim], Stmt]) -> Stmt:
        """`done(head)` for each of the heads of a token that sees some of the split."""
        form = self.form

        def walk(token: Token, layer: Dim) -> Stmt:
            if form.unit:
                run = MatrixTokenWalk(form, form.matrix_kernel(rows, layer, form.group), token, heads).run()
            else:
                run = TokenWalk(form, form.kernel(rows, layer), token, heads).run()
            return when(below(token.begin, token.end), seq(run, heads.each(done)))

        return form.layer(lambda layer: form.token(number, split, lambda token: walk(token, layer)))

    def keep_split(self, token: Dim, split: Dim, heads: Heads, splits: _Sums) -> Stmt:
        rows = self.rows_of_token()

        def keep(head: Dim) -> Stmt:
            return self.summed(rows, head, lambda found: splits.put((token, head, split), found))

        return allocated(rows.buffers, seq(self.fetched(token, heads, rows), self.walked(token, split, heads, rows, keep)))

    def whole_token(self, token: Dim, heads: Heads) -> Stmt:
        form, rows = self.form, self.rows_of_token()
        joined = self.sums(local, "joined", form.heads)

        def add(head: Dim) -> Stmt:
            return self.summed(rows, head, lambda found: joined.add((head,), found))

        return allocated(
            (*rows.buffers, *joined.buffers),
            seq(
                self.fetched(token, heads, rows),
                heads.each(lambda h: joined.put((h,), self.nothing(h))),
                form.position(token, lambda p: form.splits(p, p, lambda split: self.walked(token, split, heads, rows, add))),
                heads.each(lambda h: self.result(token, h, joined.at((h,)))),
            ),
        )

    def fetched(self, token: Dim, heads: Heads, rows: Rows) -> Stmt:
        first = heads.first * self.form.group
        return self.form.fetch(rows, first, token, first, heads.count * self.form.group)

    def rows_of_token(self) -> Rows:
        return self.form.rows(self.form.heads, STRETCH)

    def join(self, token: Dim, head: Dim, splits: _Sums) -> Stmt:
        """The splits of a row, from workspace."""
        joined, row = self.sums(local, "joined", 1), (Dim.of(0),)

        def add(split: Dim) -> Stmt:
            return joined.add(row, splits.at((token, head, split)))

        return allocated(
            joined.buffers,
            seq(
                joined.put(row, self.nothing(head)),
                self.form.position(token, lambda p: self.form.splits(p, p, add)),
                self.result(token, head, joined.at(row)),
            ),
        )

    # --- tiles ---------------------------------------------------------------------------------------------------------

    def whole_tile(self, tile: Dim, kv_head: Dim) -> Stmt:
        form, group, first = self.form, self.form.group, tile * self.form.tile_tokens
        num_rows = form.tile_tokens * group
        rows, joined = form.rows(num_rows, 1), self.sums(local, "joined", num_rows)

        def each(body: Callable[[Dim, Dim, Dim], Stmt]) -> Stmt:
            """`body(token, row, head)`"""

            def row(i: Dim, g: Dim) -> Stmt:
                return body(first + i, i * group + g, kv_head * group + g)

            return loop("i", form.tile_tokens, lambda i: loop("g", group, lambda g: row(i, g)))

        def add(_: Token, row: Dim) -> Stmt:
            return self.summed(rows, row, lambda found: joined.add((row,), found))

        def walks(layer: Dim, least: Dim, most: Dim) -> Stmt:
            def split(split: Dim) -> Stmt:
                if form.unit:
                    return MatrixTileWalk(form, form.matrix_kernel(rows, layer, num_rows), kv_head, first, least, most, split).run(add)
                return TileWalk(form, form.kernel(rows, layer), kv_head, first, least, most, split).run(add)

            return form.splits(least, most, split)

        least, most = (form.extreme_position(tile, fn) for fn in (ReduceFn.MIN, ReduceFn.MAX))
        walk = form.layer(lambda layer: integer("least", least, lambda low: integer("most", most, lambda high: walks(layer, low, high))))
        return allocated(
            (*rows.buffers, *joined.buffers),
            seq(
                loop("i", form.tile_tokens, lambda i: form.fetch(rows, i * group, first + i, kv_head * group, group)),
                each(lambda _, row, head: joined.put((row,), self.nothing(head))),
                walk,
                each(lambda token, row, head: self.result(token, head, joined.at((row,)))),
            ),
        )

    # --- sums ----------------------------------------------------------------------------------------------------------

    def sums(self, make: Callable[..., Buffer], name: str, *shape: Dim | int) -> _Sums:
        part = self.form.parts, self.form.width
        return _Sums(make(f"{name}_top", *shape), make(f"{name}_total", *shape), make(f"{name}_values", *shape, *part))

    def summed(self, rows: Rows, row: Dim, body: Callable[[_Sum], Stmt]) -> Stmt:
        """What a walk has summed of a row."""
        fold = local("fold", PAGE)
        copied = lanes(PAGE, lambda lane: Store(fold, (lane,), Load(rows.sums, (row, lane))))
        found = _Sum(Load(rows.top, (row, Dim.of(0))), Load(fold, (Dim.of(0),)), lambda c, lane: Load(rows.values, (row, c, lane)))
        return allocated((fold,), seq(copied, *halves(fold, Fn.ADD), body(found)))

    def nothing(self, head: Dim) -> _Sum:
        """Before the first split. A sink takes part in the sum with no value of its own."""
        sinks, zero = self.form.sinks, Const(0.0, F32)
        if sinks is None:
            return _Sum(Const(float("-inf"), F32), zero, lambda c, lane: zero)
        return _Sum(f32(Load(sinks, (head,))), Const(1.0, F32), lambda c, lane: zero)

    def result(self, token: Dim, head: Dim, found: _Sum) -> Stmt:
        out, width = self.form.buffers[-1], self.form.width

        def put(c: Dim, lane: Dim) -> Stmt:
            value = Apply(Fn.DIV, (found.values(c, lane), found.total))
            return Store(out, (token, head, c * width + lane), value if out.dtype is F32 else Cast(value, out.dtype))

        return loop("c", self.form.parts, lambda c: lanes(width, lambda lane: put(c, lane)))


def workspace(name: str, *shape: Dim | int) -> Buffer:
    return Buffer(name, tuple(Dim.of(n) for n in shape), F32)
