"""Attention in concatenated texts, in which every token attends to its whole text.

A work item is LANES adjacent tokens of one head. Each token has a lane: the maximum, the sum and the weights of the online softmax are
vectors over tokens, and lanes do not depend on each other. The item loops over the keys of a text once, KEYS at a time. If its tokens
belong to several texts, it computes all its tokens once for each text, and stores only the results of that text's tokens. Blocks are
counted from the beginning of the text, so a row has the same bits wherever its text is in the batch.

In paged attention, vectors go over the keys of a page instead, because rows attend to different numbers of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.dims import Dim, ceil_div, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.attention import Attention, Ragged
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, cast, exp, fma, less_equal, maximum, select
from compiler.ops.attention.plain import capped, relative

LANES = 16
KEYS = 8  # keys whose scores are computed at once: enough to hide the latency of an addition, few enough for the registers
F32, I64 = DType.F32, DType.I64


def schedule_ragged(prim: PrimFunc) -> PrimFunc | None:
    """Schedule attention without a causal mask and without sinks. Return None for any other kernel."""
    match prim.body:
        case Attention(keys=Ragged() as texts, positions=None, sinks=None) as node:
            pass
        case _:
            return None
    if not node.queries.shape[2].is_const:
        return None
    kernel = Kernel()
    queries, keys, values, sequences, starts, out = kernel.arrays(
        node.queries, texts.keys, texts.values, node.sequences, texts.starts, node.out
    )
    bias = None if node.bias is None else kernel.array(node.bias)
    _RaggedAttention(queries, keys, values, sequences, starts, out, bias, node.scale, node.softcap).write(kernel)
    return PrimFunc(prim.params, prim.num_outputs, kernel.body(), {**prim.attrs, "schedule": "ragged"})


@dataclass(frozen=True, slots=True)
class _Softmax:
    """The online softmax of a tile over the keys so far, with a lane per token."""

    maximum: Array  # [LANES]
    total: Array  # [LANES]: sum of the weights
    values: Array  # [size, LANES]: weighted values


@dataclass(frozen=True, slots=True)
class _RaggedAttention:
    queries: Array  # [tokens, heads, size]
    keys: Array  # [tokens, kv_heads, size]
    values: Array
    sequences: Array  # [tokens]: the text of each token
    starts: Array  # [texts + 1]
    out: Array
    bias: Array | None  # [heads, 2 * m + 1]
    scale: float
    softcap: float

    @property
    def size(self) -> int:
        return self.queries.shape[2].const

    def write(self, k: Kernel) -> None:
        tokens, heads, _ = self.queries.shape
        with k.parallel("p", ceil_div(tokens, LANES) * heads) as p:
            head = k.let("h", p % heads, heads - 1)
            self.tile(k, p // heads * LANES, head)

    def tile(self, k: Kernel, first: Dim, head: Dim) -> None:
        """Compute attention for LANES tokens from token `first`. Lanes after the last token compute the last token again."""
        last = self.queries.shape[0] - 1
        queries = k.local("queries", self.size, LANES)
        with k.serial("r", self.size) as r, k.vector(LANES) as lane:
            queries[r, lane] = cast(self.queries[dim_min(first + lane, last), head, r], F32) * self.scale
        low = k.let("low", cast(self.sequences[first], I64))
        high = k.let("high", cast(self.sequences[dim_min(first + (LANES - 1), last)], I64))
        with k.serial("x", high + 1 - low) as x:
            start = k.let("start", cast(self.starts[low + x], I64))
            end = k.let("end", cast(self.starts[low + x + 1], I64))
            self.text(k, first, head, queries, start, end)

    def text(self, k: Kernel, first: Dim, head: Dim, queries: Array, start: Dim, end: Dim) -> None:
        """Attend to the text at positions `start` to `end` - 1, and store the results of those tokens that belong to it."""
        values, maximum, total = k.local("values", self.size, LANES), k.local("maximum", LANES), k.local("total", LANES)
        softmax = _Softmax(maximum, total, values)
        with k.serial("e", self.size) as e, k.vector(LANES) as lane:
            values[e, lane] = 0.0
        with k.vector(LANES) as lane:
            maximum[lane] = float("-inf")
        with k.vector(LANES) as lane:
            total[lane] = 0.0
        with k.serial("b", ceil_div(end - start, KEYS)) as b:
            self.block(k, first, head, queries, start + b * KEYS, end, softmax)
        with k.serial("e", self.size) as e, k.vector(LANES) as lane:
            token = first + lane
            with k.when(less_equal(start, token) & less_equal(token + 1, end)):
                self.out[token, head, e] = cast(values[e, lane] / total[lane], self.out.dtype)

    def block(self, k: Kernel, first: Dim, head: Dim, queries: Array, start: Dim, end: Dim, softmax: _Softmax) -> None:
        """Add KEYS keys to the softmax. If the text has fewer keys left, its last key fills the block with weight 0."""
        weights, old, rescale = k.local("weights", KEYS, LANES), k.local("old", LANES), k.local("rescale", LANES)
        highest, total, values = softmax.maximum, softmax.total, softmax.values
        kv_head = head // (self.queries.shape[1] // self.keys.shape[1])

        def key(j: Dim | int) -> Dim:
            return dim_min(start + j, end - 1)

        with k.unroll("j", KEYS) as j, k.vector(LANES) as lane:
            weights[j, lane] = 0.0
        with k.serial("r", self.size) as r, k.unroll("j", KEYS) as j, k.vector(LANES) as lane:
            weights[j, lane] += queries[r, lane] * cast(self.keys[key(j), kv_head, r], F32)
        with k.unroll("j", KEYS) as j, k.vector(LANES) as lane:
            score = capped(weights[j, lane], self.softcap)
            if self.bias is not None:
                score = score + cast(self.bias[head, relative(self.bias.buffer, start + j - (first + lane))], F32)
            weights[j, lane] = select(less_equal(start + j + 1, end), score, float("-inf"))

        with k.vector(LANES) as lane:
            old[lane] = highest[lane]
        with k.vector(LANES) as lane:
            largest: Scalar = old[lane]
            for j in range(KEYS):
                largest = maximum(largest, weights[j, lane])
            highest[lane] = largest
        with k.vector(LANES) as lane:
            rescale[lane] = exp(old[lane] - highest[lane])
        with k.unroll("j", KEYS) as j, k.vector(LANES) as lane:
            weights[j, lane] = exp(weights[j, lane] - highest[lane])
        with k.vector(LANES) as lane:
            value = total[lane] * rescale[lane]
            for j in range(KEYS):
                value = value + weights[j, lane]
            total[lane] = value
        with k.serial("e", self.size) as e, k.vector(LANES) as lane:
            value = values[e, lane] * rescale[lane]
            for j in range(KEYS):
                value = fma(weights[j, lane], cast(self.values[key(j), kv_head, e], F32), value)
            values[e, lane] = value
