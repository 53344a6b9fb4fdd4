"""Attention within texts that stand one behind the other.

A thread takes LANES neighbouring tokens of one head, a lane for each, and walks the keys of their text once, KEYS at a time: every number
of a softmax is then one vector, and no lane looks at another. Where the tokens belong to several texts it walks each of these in turn,
and keeps the rows of that text's own tokens. Steps are counted from the beginning of the text, so a row has the same bits wherever its
text stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compiler.backends.cpu.schedule.nests import lanes, loop, named, parallel, seq, unroll, when
from compiler.backends.cpu.schedule.pieces import exp_of_difference, f32, le, local, mul
from compiler.forms.nest import allocated
from compiler.ir.dims import Dim, DimVar, ceil_div, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops import Apply, Buffer, Cast, Const, Fn, Let, Load, PrimFunc, Scalar, Stmt, Store
from compiler.ops.ragged import relative

LANES = 16
KEYS = 8  # scores that are in the making at once: enough to hide how long one addition takes, few enough for the registers
F32, I64 = DType.F32, DType.I64


def schedule_ragged(prim: PrimFunc) -> PrimFunc | None:
    if "ragged" not in prim.attrs or not prim.buffers[0].shape[2].is_const:
        return None
    q, k, v, text_ids, starts, *bias, out = prim.buffers
    (scale,) = prim.attrs["attention"]
    body = _Ragged(q, k, v, text_ids, starts, bias[0] if bias else None, out, scale).body()
    return PrimFunc(prim.params, prim.num_outputs, body, {**prim.attrs, "schedule": "ragged"})


@dataclass(frozen=True, slots=True)
class _Ragged:
    q: Buffer
    k: Buffer
    v: Buffer
    text_ids: Buffer
    starts: Buffer
    bias: Buffer | None
    out: Buffer
    scale: float

    @property
    def size(self) -> int:
        return self.q.shape[2].const

    def body(self) -> Stmt:
        tokens, heads, _ = self.q.shape
        num_tiles = ceil_div(tokens, LANES)
        return parallel("p", num_tiles * heads, lambda p: named("h", p % heads, heads - 1, lambda h: self.tile(p // heads * LANES, h)))

    def tile(self, first: Dim, h: Dim) -> Stmt:
        """Behind the last token, lanes repeat it."""
        last = self.q.shape[0] - 1
        queries = local("queries", self.size, LANES)

        def query(r: Dim, lane: Dim) -> Stmt:
            value = f32(Load(self.q, (dim_min(first + lane, last), h, r)))
            return Store(queries, (r, lane), mul(value, Const(self.scale, F32)))

        def text(number: Dim) -> Stmt:
            bounds = Load(self.starts, (number,)), Load(self.starts, (number + 1,))
            return _let("start", bounds[0], lambda start: _let("end", bounds[1], lambda end: self.text(first, h, queries, start, end)))

        def texts(low: Dim, high: Dim) -> Stmt:
            return loop("x", high + 1 - low, lambda x: text(low + x))

        ends = Load(self.text_ids, (first,)), Load(self.text_ids, (dim_min(first + (LANES - 1), last),))
        return allocated(
            (queries,),
            seq(
                loop("r", self.size, lambda r: _each(lambda lane: query(r, lane))),
                _let("low", ends[0], lambda low: _let("high", ends[1], lambda high: texts(low, high))),
            ),
        )

    def text(self, first: Dim, h: Dim, queries: Buffer, start: Dim, end: Dim) -> Stmt:
        sums, top, total = local("sums", self.size, LANES), local("top", LANES), local("total", LANES)

        def put(e: Dim, lane: Dim) -> Stmt:
            value = Apply(Fn.DIV, (Load(sums, (e, lane)), Load(total, (lane,))))
            result = value if self.out.dtype is F32 else Cast(value, self.out.dtype)
            own = Apply(Fn.AND, (le(start, first + lane), le(first + lane + 1, end)))
            return when(own, Store(self.out, (first + lane, h, e), result))

        def keys(b: Dim) -> Stmt:
            return self.keys(first, h, queries, start + b * KEYS, end, sums, top, total)

        return allocated(
            (sums, top, total),
            seq(
                loop("e", self.size, lambda e: _each(lambda lane: Store(sums, (e, lane), Const(0.0, F32)))),
                _each(lambda lane: Store(top, (lane,), Const(float("-inf"), F32))),
                _each(lambda lane: Store(total, (lane,), Const(0.0, F32))),
                loop("b", ceil_div(end - start, KEYS), keys),
                loop("e", self.size, lambda e: _each(lambda lane: put(e, lane))),
            ),
        )

    def keys(self, first: Dim, h: Dim, queries: Buffer, start: Dim, end: Dim, sums: Buffer, top: Buffer, total: Buffer) -> Stmt:
        """Add KEYS keys to what was summed. Behind the end, the last key stands in with no weight."""
        weights, old, change = local("weights", KEYS, LANES), local("old", LANES), local("change", LANES)

        def each_key(body: Callable[[Dim, Dim], Stmt]) -> Stmt:
            return unroll("j", KEYS, lambda j: _each(lambda lane: body(j, lane)))

        def key(j: Dim) -> Dim:
            return dim_min(start + j, end - 1)

        def dot(r: Dim, j: Dim, lane: Dim) -> Stmt:
            terms = (Load(queries, (r, lane)), f32(Load(self.k, (key(j), h, r))), Load(weights, (j, lane)))
            return Store(weights, (j, lane), Apply(Fn.FMA, terms))

        def score(j: Dim, lane: Dim) -> Stmt:
            value: Scalar = Load(weights, (j, lane))
            if self.bias is not None:
                value = Apply(Fn.ADD, (value, f32(Load(self.bias, (h, relative(self.bias, start + j, first + lane))))))
            return Store(weights, (j, lane), Apply(Fn.SELECT, (le(start + j + 1, end), value, Const(float("-inf"), F32))))

        def raised(lane: Dim) -> Stmt:
            return Store(top, (lane,), _fold(Fn.MAX, Load(old, (lane,)), weights, lane))

        def weight(j: Dim, lane: Dim) -> Stmt:
            return Store(weights, (j, lane), exp_of_difference(Load(weights, (j, lane)), Load(top, (lane,))))

        def summed(lane: Dim) -> Stmt:
            return Store(total, (lane,), _fold(Fn.ADD, mul(Load(total, (lane,)), Load(change, (lane,))), weights, lane))

        def mixed(e: Dim, lane: Dim) -> Stmt:
            value: Scalar = mul(Load(sums, (e, lane)), Load(change, (lane,)))
            for j in (Dim.of(j) for j in range(KEYS)):
                value = Apply(Fn.FMA, (Load(weights, (j, lane)), f32(Load(self.v, (key(j), h, e))), value))
            return Store(sums, (e, lane), value)

        return allocated(
            (weights, old, change),
            seq(
                each_key(lambda j, lane: Store(weights, (j, lane), Const(0.0, F32))),
                loop("r", self.size, lambda r: each_key(lambda j, lane: dot(r, j, lane))),
                each_key(score),
                _each(lambda lane: Store(old, (lane,), Load(top, (lane,)))),
                _each(raised),
                _each(lambda lane: Store(change, (lane,), exp_of_difference(Load(old, (lane,)), Load(top, (lane,))))),
                each_key(weight),
                _each(summed),
                loop("e", self.size, lambda e: _each(lambda lane: mixed(e, lane))),
            ),
        )


def _each(body: Callable[[Dim], Stmt]) -> Stmt:
    return lanes(LANES, body)


def _let(name: str, value: Load, body: Callable[[Dim], Stmt]) -> Stmt:
    var = DimVar(name)
    return Let(var, Cast(value, I64), body(Dim.of(var)))


def _fold(fn: Fn, value: Scalar, weights: Buffer, lane: Dim) -> Scalar:
    for j in range(KEYS):
        value = Apply(fn, (value, Load(weights, (Dim.of(j), lane))))
    return value
