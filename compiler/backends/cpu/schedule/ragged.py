"""Attention within texts that stand one behind the other.

A thread takes LANES neighbouring tokens of one head, a lane for each, and walks the keys of their text once, KEYS at a time: every number
of a softmax is then one vector, and no lane looks at another. Where the tokens belong to several texts, the thread walks each of these in
turn, and keeps the rows of that text's own tokens. Steps are counted from the beginning of the text, so a row has the same bits wherever
its text stands.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.dims import Dim, ceil_div, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops import Attention, PrimFunc, Ragged, Scalar
from compiler.ir.prove import prove_eq
from compiler.ir.write import Array, Kernel, cast, exp, fma, less_equal, maximum, select
from compiler.ops.plain_attention import relative

LANES = 16
KEYS = 8  # scores computed at once: enough to hide the latency of an addition, few enough for the registers
F32, I64 = DType.F32, DType.I64


def schedule_ragged(prim: PrimFunc) -> PrimFunc | None:
    """Of tokens that see their whole text, each query head with a kv head of its own."""
    match prim.body:
        case Attention(keys=Ragged() as source, positions=None, softcap=0, sinks=None) as node:
            pass
        case _:
            return None
    heads, size = node.queries.shape[1:]
    if not (size.is_const and prove_eq(heads, source.keys.shape[1])):
        return None
    kernel = Kernel()
    q, k, v, text_ids, starts, out = kernel.arrays(node.queries, source.keys, source.values, node.sequences, source.starts, node.out)
    bias = None if node.bias is None else kernel.array(node.bias)
    _Ragged(q, k, v, text_ids, starts, bias, out, node.scale).write(kernel)
    return PrimFunc(prim.params, prim.num_outputs, kernel.body(), {**prim.attrs, "schedule": "ragged"})


@dataclass(frozen=True, slots=True)
class _Ragged:
    queries: Array
    keys: Array
    values: Array
    text_ids: Array
    starts: Array
    bias: Array | None
    out: Array
    scale: float

    @property
    def size(self) -> int:
        return self.queries.shape[2].const

    def write(self, k: Kernel) -> None:
        tokens, heads, _ = self.queries.shape
        with k.parallel("p", ceil_div(tokens, LANES) * heads) as p:
            head = k.let("h", p % heads, heads - 1)
            self.tile(k, p // heads * LANES, head)

    def tile(self, k: Kernel, first: Dim, head: Dim) -> None:
        """LANES tokens from `first` on. Behind the last token, lanes repeat it."""
        last = self.queries.shape[0] - 1
        queries = k.local("queries", self.size, LANES)
        with k.serial("r", self.size) as r, k.vector(LANES) as lane:
            queries[r, lane] = cast(self.queries[dim_min(first + lane, last), head, r], F32) * self.scale
        low = k.let("low", cast(self.text_ids[first], I64))
        high = k.let("high", cast(self.text_ids[dim_min(first + (LANES - 1), last)], I64))
        with k.serial("x", high + 1 - low) as x:
            start = k.let("start", cast(self.starts[low + x], I64))
            end = k.let("end", cast(self.starts[low + x + 1], I64))
            self.text(k, first, head, queries, start, end)

    def text(self, k: Kernel, first: Dim, head: Dim, queries: Array, start: Dim, end: Dim) -> None:
        """One text, `start` to `end`, for the tokens of the tile."""
        sums, top, total = k.local("sums", self.size, LANES), k.local("top", LANES), k.local("total", LANES)
        with k.serial("e", self.size) as e, k.vector(LANES) as lane:
            sums[e, lane] = 0.0
        with k.vector(LANES) as lane:
            top[lane] = float("-inf")
        with k.vector(LANES) as lane:
            total[lane] = 0.0
        with k.serial("b", ceil_div(end - start, KEYS)) as b:
            self.block(k, first, head, queries, start + b * KEYS, end, sums, top, total)
        with k.serial("e", self.size) as e, k.vector(LANES) as lane:
            token = first + lane
            with k.when(less_equal(start, token) & less_equal(token + 1, end)):
                self.out[token, head, e] = cast(sums[e, lane] / total[lane], self.out.dtype)

    def block(self, k: Kernel, first: Dim, head: Dim, queries: Array, start: Dim, end: Dim, sums: Array, top: Array, total: Array) -> None:
        """Add KEYS keys to what was summed. Behind the end, the last key stands in with no weight."""
        weights, old, change = k.local("weights", KEYS, LANES), k.local("old", LANES), k.local("change", LANES)

        def key(j: Dim | int) -> Dim:
            return dim_min(start + j, end - 1)

        with k.unroll("j", KEYS) as j, k.vector(LANES) as lane:
            weights[j, lane] = 0.0
        with k.serial("r", self.size) as r, k.unroll("j", KEYS) as j, k.vector(LANES) as lane:
            weights[j, lane] += queries[r, lane] * cast(self.keys[key(j), head, r], F32)
        with k.unroll("j", KEYS) as j, k.vector(LANES) as lane:
            score: Scalar = weights[j, lane]
            if self.bias is not None:
                score = score + cast(self.bias[head, relative(self.bias.buffer, start + j - (first + lane))], F32)
            weights[j, lane] = select(less_equal(start + j + 1, end), score, float("-inf"))

        with k.vector(LANES) as lane:
            old[lane] = top[lane]
        with k.vector(LANES) as lane:
            largest: Scalar = old[lane]
            for j in range(KEYS):
                largest = maximum(largest, weights[j, lane])
            top[lane] = largest
        with k.vector(LANES) as lane:
            change[lane] = exp(old[lane] - top[lane])
        with k.unroll("j", KEYS) as j, k.vector(LANES) as lane:
            weights[j, lane] = exp(weights[j, lane] - top[lane])
        with k.vector(LANES) as lane:
            value = total[lane] * change[lane]
            for j in range(KEYS):
                value = value + weights[j, lane]
            total[lane] = value
        with k.serial("e", self.size) as e, k.vector(LANES) as lane:
            value = sums[e, lane] * change[lane]
            for j in range(KEYS):
                value = fma(weights[j, lane], cast(self.values[key(j), head, e], F32), value)
            sums[e, lane] = value
