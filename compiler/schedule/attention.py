"""Paged attention in one walk over the pages of a sequence.

A thread takes one token and one kv head, with all query heads that share it. It visits the pages in order of position; for each it
computes PAGE scores at once (a lane per key), rescales what it has by the change of the maximum, and adds the page's values. Pages lie at
fixed positions, and the walk depends on the token's own position alone: so a row has the same bits in any batch and for any chunking of
the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiler.ir.dims import Dim, DimVar, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops import (
    Apply,
    Buffer,
    Cast,
    Const,
    DimScalar,
    Fn,
    Let,
    Load,
    PrimFunc,
    Scalar,
    ScalarParam,
    Scope,
    Stmt,
    Store,
)
from compiler.schedule.nests import allocated, lanes, loop, parallel, seq, unroll

PAGE = 16
F32 = DType.F32


def schedule_attention(prim: PrimFunc, width: int) -> PrimFunc | None:
    kept = prim.attrs.get("attention")
    if kept is None or "ragged" in prim.attrs:
        return None
    q, cache = prim.buffers[0], prim.buffers[1]
    heads, kv_heads, size = q.shape[1], cache.shape[3], q.shape[2]
    if not (heads.is_const and kv_heads.is_const and size.is_const):
        return None
    scale, window, softcap = kept
    layer = next(p for p in prim.params if isinstance(p, ScalarParam))
    body = _Attention(
        prim.buffers, layer, scale, window, softcap, heads.const // kv_heads.const, size.const, _divisor(size.const, width)
    ).body()
    return PrimFunc(prim.params, prim.num_outputs, body, {**prim.attrs, "schedule": "attention"})


def _divisor(size: int, width: int) -> int:
    while size % width:
        width //= 2
    return width


@dataclass(frozen=True, slots=True)
class _Attention:
    buffers: tuple[Buffer, ...]  # q, cache, page tables, sequence ids, positions, scales of an 8-bit cache, sinks if any, out
    layer: ScalarParam
    scale: float
    window: int
    softcap: float
    group: int  # query heads per kv head
    size: int
    width: int  # lanes of a value

    @property
    def scales(self) -> Buffer | None:
        return self.buffers[5] if self.buffers[1].dtype is DType.I8 else None

    def body(self) -> Stmt:
        q, cache = self.buffers[0], self.buffers[1]
        kv_heads = cache.shape[3]
        return parallel("p", q.shape[0] * kv_heads, lambda p: self.token(p // kv_heads, p % kv_heads))

    def token(self, t: Dim, kv_head: Dim) -> Stmt:
        seq_ids, positions = self.buffers[3], self.buffers[4]
        position, sequence, layer = DimVar("position"), DimVar("s"), DimVar("layer")
        walk = self.walk(t, kv_head, Dim.of(position), Dim.of(sequence), Dim.of(layer))
        walk = Let(layer, Cast(self.layer, DType.I64) if self.layer.dtype is not DType.I64 else self.layer, walk)
        known = Let(sequence, Cast(Load(seq_ids, (t,)), DType.I64), walk)
        return Let(position, Cast(Load(positions, (t,)), DType.I64), known)

    def walk(self, t: Dim, kv_head: Dim, position: Dim, sequence: Dim, layer: Dim) -> Stmt:
        group, parts = self.group, self.size // self.width
        acc = _local("acc", group, parts, self.width)
        top, total = _local("top", group), _local("total", group)
        window = self.window
        low = dim_max(0, position - (window - 1)) if window else Dim.of(0)
        first = 5 if self.scales is None else 6
        sinks = self.buffers[first] if len(self.buffers) > first + 1 else None
        out = self.buffers[len(self.buffers) - 1]

        def head(g: Dim) -> Dim:
            return kv_head * group + g

        def clear(g: Dim) -> Stmt:
            # A sink takes part in the sum with no value of its own.
            start = Const(float("-inf"), F32) if sinks is None else _f32(Load(sinks, (head(g),)))
            zero = Const(0.0, F32)
            return seq(
                Store(top, (g,), start),
                Store(total, (g,), zero if sinks is None else Const(1.0, F32)),
                unroll("c", parts, lambda c: lanes(self.width, lambda lane: Store(acc, (g, c, lane), zero))),
            )

        def page(b: Dim) -> Stmt:
            var = DimVar("page")
            place = Cast(Load(self.buffers[2], (sequence, b + low // PAGE)), DType.I64)
            return Let(
                var, place, self.page(t, kv_head, head, layer, Dim.of(var), (b + low // PAGE) * PAGE, low, position, acc, top, total)
            )

        def finish(g: Dim) -> Stmt:
            def part(c: Dim, lane: Dim) -> Stmt:
                value = Apply(Fn.DIV, (Load(acc, (g, c, lane)), Load(total, (g,))))
                result = value if out.dtype is F32 else Cast(value, out.dtype)
                return Store(out, (t, head(g), c * self.width + lane), result)

            return unroll("c", parts, lambda c: lanes(self.width, lambda lane: part(c, lane)))

        body = seq(
            unroll("g", group, clear),
            loop("b", position // PAGE + 1 - low // PAGE, page),
            unroll("g", group, finish),
        )
        return allocated((acc, top, total), body)

    def page(
        self,
        t: Dim,
        kv_head: Dim,
        head: Callable[[Dim], Dim],
        layer: Dim,
        page: Dim,
        start: Dim,
        low: Dim,
        position: Dim,
        acc: Buffer,
        top: Buffer,
        total: Buffer,
    ) -> Stmt:
        q, cache = self.buffers[:2]
        group, parts, width = self.group, self.size // self.width, self.width
        score, fold, change = _local("score", group, PAGE), _local("fold", PAGE), _local("change", group)

        def heads(body: Callable[[Dim], Stmt]) -> Stmt:
            return unroll("g", group, body)

        def each_key(body: Callable[[Dim], Stmt]) -> Stmt:
            return lanes(PAGE, body)

        def dot(r: Dim) -> Stmt:
            def one(g: Dim, lane: Dim) -> Stmt:
                terms = (
                    _f32(Load(q, (t, head(g), r))),
                    _f32(Load(cache, (layer, Dim.of(0), page, kv_head, r * PAGE + lane))),
                    Load(score, (g, lane)),
                )
                return Store(score, (g, lane), Apply(Fn.FMA, terms))

            return heads(lambda g: each_key(lambda lane: one(g, lane)))

        def scaled(g: Dim, lane: Dim) -> Stmt:
            value: Scalar = _mul(Load(score, (g, lane)), Const(self.scale, F32))
            if self.scales is not None:
                value = _mul(value, _f32(Load(self.scales, (layer, Dim.of(0), page, kv_head, lane))))
            if self.softcap:
                cap = Const(self.softcap, F32)
                value = _mul(Apply(Fn.TANH, (Apply(Fn.DIV, (value, cap)),)), cap)
            seen = _le(start + lane, position)
            if self.window:
                seen = Apply(Fn.AND, (seen, _le(low, start + lane)))
            return Store(score, (g, lane), Apply(Fn.SELECT, (seen, value, Const(float("-inf"), F32))))

        def weigh(g: Dim) -> Stmt:
            """Fold the page's maximum into `top`, turn scores into weights, fold their sum into `total`."""
            copied = each_key(lambda lane: Store(fold, (lane,), Load(score, (g, lane))))
            new_top = Apply(Fn.MAX, (Load(top, (g,)), Load(fold, (Dim.of(0),))))
            kept = Apply(Fn.EXP, (Apply(Fn.SUB, (Load(change, (g,)), Load(top, (g,)))),))

            def exponential(lane: Dim) -> Stmt:
                value = Apply(Fn.EXP, (Apply(Fn.SUB, (Load(score, (g, lane)), Load(top, (g,)))),))
                return Store(score, (g, lane), value)

            return seq(
                copied,
                *_halves(fold, Fn.MAX),
                Store(change, (g,), Load(top, (g,))),
                Store(top, (g,), new_top),
                Store(change, (g,), kept),
                each_key(exponential),
                each_key(lambda lane: Store(fold, (lane,), Load(score, (g, lane)))),
                *_halves(fold, Fn.ADD),
                Store(total, (g,), Apply(Fn.FMA, (Load(total, (g,)), Load(change, (g,)), Load(fold, (Dim.of(0),))))),
                unroll("c", parts, lambda c: lanes(width, lambda lane: rescale(g, c, lane))),
            )

        def rescale(g: Dim, c: Dim, lane: Dim) -> Stmt:
            return Store(acc, (g, c, lane), _mul(Load(acc, (g, c, lane)), Load(change, (g,))))

        def add_value(j: Dim) -> Stmt:
            def one(g: Dim, c: Dim, lane: Dim) -> Stmt:
                value = _f32(Load(cache, (layer, Dim.of(1), page, kv_head, j * self.size + c * width + lane)))
                return Store(acc, (g, c, lane), Apply(Fn.FMA, (Load(score, (g, j)), value, Load(acc, (g, c, lane)))))

            return heads(lambda g: unroll("c", parts, lambda c: lanes(width, lambda lane: one(g, c, lane))))

        # Keys outside the window have no weight, but 0 * value is no 0 where memory holds a NaN: leave them out.
        hidden = dim_max(0, low - start) if self.window else Dim.of(0)
        zeroed = heads(lambda g: each_key(lambda lane: Store(score, (g, lane), Const(0.0, F32))))
        scales = self.scales
        decoded: list[Stmt] = []  # the scale of a value goes into its weight
        if scales is not None:

            def decode(g: Dim, lane: Dim) -> Stmt:
                return Store(score, (g, lane), _mul(Load(score, (g, lane)), _f32(Load(scales, (layer, Dim.of(1), page, kv_head, lane)))))

            decoded.append(heads(lambda g: each_key(lambda lane: decode(g, lane))))
        body = seq(
            zeroed,
            loop("r", self.size, dot),
            heads(lambda g: each_key(lambda lane: scaled(g, lane))),
            heads(weigh),
            *decoded,
            loop("j", dim_min(PAGE, position + 1 - start) - hidden, lambda j: add_value(j + hidden)),
        )
        return allocated((score, fold, change), body)


def _halves(fold: Buffer, fn: Fn) -> list[Stmt]:
    steps: list[Stmt] = []
    half = PAGE // 2
    while half:
        steps.append(lanes(half, lambda lane, h=half: Store(fold, (lane,), Apply(fn, (Load(fold, (lane,)), Load(fold, (lane + h,)))))))
        half //= 2
    return steps


def _local(name: str, *shape: int) -> Buffer:
    return Buffer(name, tuple(Dim.of(n) for n in shape), F32, Scope.LOCAL)


def _f32(scalar: Load) -> Scalar:
    return scalar if scalar.buffer.dtype is F32 else Cast(scalar, F32)


def _mul(a: Scalar, b: Scalar) -> Scalar:
    return Apply(Fn.MUL, (a, b))


def _le(a: Dim, b: Dim) -> Scalar:
    return Apply(Fn.LE, (DimScalar(a), DimScalar(b)))
