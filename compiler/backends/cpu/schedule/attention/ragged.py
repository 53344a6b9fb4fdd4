"""Attention in concatenated texts, in which every token attends to its whole text. The patches of an image are a text, too.

A work item is a tile of adjacent tokens of one head. Each token has a lane: the maximum, the sum and the weights of the online softmax are
vectors over tokens, and lanes do not depend on each other. The item loops over the keys of a text once, KEYS at a time. If the tokens of an
item belong to several texts, the item computes all its tokens once for each text, and stores only the results of that text's tokens. Blocks
of KEYS keys are counted from the beginning of the text, so a row has the same bits wherever its text is in the batch.

If texts are long, the keys and values of each head are first copied, so that the keys of adjacent tokens are adjacent in memory, and the
values, too. In the operands, the keys of two tokens are thousands of bytes apart, so each key would need its own entry of the TLB. If a
register has room for LANES lanes, a tile of long texts has several vectors of tokens, which share the loads of a key. The tiles of long
texts are ordered by head, so the keys and values of a head stay in a cache. The loops for short texts and those for long texts compute the
same bits.

In paged attention, a vector has a lane per key of a page instead, because rows attend to different numbers of keys.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

from compiler.backends.cpu.schedule.folds import fold_halves, larger
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.attention import Attention, Ragged
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, Kernel, cast, exp, fma, less_equal, not_equal, select
from compiler.ops.attention.plain import capped, relative

LANES = 16
TOGETHER = 2  # number of vectors of a tile of long texts, on machines with 32 registers of LANES lanes, which have room for no more
LONG = 64  # texts of a batch are long if they have at least this many tokens on average
KEYS = 8  # number of keys whose scores are computed at once: enough to hide the latency of an addition, few enough for the registers
F32, I64 = DType.F32, DType.I64


def schedule_ragged(prim: PrimFunc, *, lanes: int) -> PrimFunc | None:
    """Schedule attention in concatenated texts, without a causal mask and without sinks, if the head size is a constant. Return None for
    any other kernel. A register of the machine has `lanes` lanes."""
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
    together = TOGETHER if lanes >= LANES else 1
    _RaggedAttention(queries, keys, values, sequences, starts, out, bias, node.scale, node.softcap, together).write(kernel)
    return PrimFunc(prim.params, prim.num_outputs, kernel.body(), {**prim.attrs, "schedule": "ragged"})


@dataclass(frozen=True, slots=True)
class _Softmax:
    """The online softmax of a tile over the keys so far, with a lane per token."""

    maximum: Array  # [vectors, LANES]
    total: Array  # [vectors, LANES]: sum of the weights
    values: Array  # [size, vectors, LANES]: weighted values


@dataclass(frozen=True, slots=True)
class _Source:
    """The keys and values of one head."""

    keys: Callable[[Dim, Dim], Scalar]  # maps the indices of a token and of an element to this element of the token's key
    values: Callable[[Dim, Dim], Scalar]


@dataclass(frozen=True, slots=True)
class _RaggedAttention:
    """The phases of the kernel, and its operands."""

    queries: Array  # [tokens, heads, size]
    keys: Array  # [tokens, kv_heads, size]
    values: Array
    sequences: Array  # [tokens]: the text of each token
    starts: Array  # [texts + 1]: the first token of each text, then the number of tokens
    out: Array
    bias: Array | None  # [heads, 2 * m + 1]: numbers that are added to scores, for distances -m to m between key and query
    scale: float
    softcap: float
    together: int  # number of vectors of a tile of long texts

    @property
    def size(self) -> int:
        return self.queries.shape[2].const

    def write(self, k: Kernel) -> None:
        """Write the phases: one that computes attention if texts are short; and one that copies keys and values, and one that computes
        attention, if texts are long. The phases that do not apply to a batch have no iterations."""
        (tokens, heads, _), kv_heads = self.queries.shape, self.keys.shape[1]
        num_texts = dim_max(self.starts.shape[0] - 1, 1)
        are_long = dim_min(tokens // (num_texts * LONG), 1)  # 1 or 0
        copies = [k.workspace(name, kv_heads, tokens, self.size) for name in ("keys", "values")]
        with k.parallel("p", ceil_div(tokens, LANES) * heads * (1 - are_long)) as p:
            head = k.let("h", p % heads, heads - 1)
            kv_head = head // (heads // kv_heads)
            read = (lambda token, e, array=array: cast(array[token, kv_head, e], F32) for array in (self.keys, self.values))
            self.tile(k, p // heads * LANES, head, _Source(*read), 1)
        with k.parallel("c", tokens * kv_heads * are_long) as c:
            token = k.let("token", c // kv_heads, tokens - 1)
            kv_head = k.let("kv", c % kv_heads, kv_heads - 1)
            for copy, array in zip(copies, (self.keys, self.values), strict=True):
                with k.serial("e", self.size) as e:
                    copy[kv_head, token, e] = cast(array[token, kv_head, e], F32)
        num_tiles = ceil_div(tokens, LANES * self.together)
        with k.parallel("l", num_tiles * heads * are_long) as p:
            head = k.let("h", p // num_tiles, heads - 1)
            kv_head = head // (heads // kv_heads)
            read = (lambda token, e, array=array: array[kv_head, token, e] for array in copies)
            self.tile(k, p % num_tiles * (LANES * self.together), head, _Source(*read), self.together)

    def tile(self, k: Kernel, first: Dim, head: Dim, source: _Source, vectors: int) -> None:
        """Compute attention for `vectors` vectors of tokens, from token `first` on. Lanes after the last token compute the last token
        again."""
        last = self.queries.shape[0] - 1
        queries = k.local("queries", self.size, vectors, LANES)
        with k.serial("r", self.size) as r, k.unroll("v", vectors) as v, k.vector(LANES) as lane:
            queries[r, v, lane] = cast(self.queries[dim_min(first + v * LANES + lane, last), head, r], F32) * self.scale
        low = k.let("low", cast(self.sequences[first], I64))
        high = k.let("high", cast(self.sequences[dim_min(first + (vectors * LANES - 1), last)], I64))
        with k.serial("x", high + 1 - low) as x:
            start = k.let("start", cast(self.starts[low + x], I64))
            end = k.let("end", cast(self.starts[low + x + 1], I64))
            self.text(k, first, head, queries, source, start, end)

    def text(self, k: Kernel, first: Dim, head: Dim, queries: Array, source: _Source, start: Dim, end: Dim) -> None:
        """Attend to the text of the tokens `start` to `end` - 1, and store the results of those tokens of the tile that belong to it."""
        vectors = queries.shape[1].const
        values, maximum, total = (
            k.local("values", self.size, vectors, LANES),
            k.local("maximum", vectors, LANES),
            k.local("total", vectors, LANES),
        )
        softmax = _Softmax(maximum, total, values)
        with k.serial("e", self.size) as e, k.unroll("v", vectors) as v, k.vector(LANES) as lane:
            values[e, v, lane] = 0.0
        with k.unroll("v", vectors) as v, k.vector(LANES) as lane:
            maximum[v, lane] = float("-inf")
        with k.unroll("v", vectors) as v, k.vector(LANES) as lane:
            total[v, lane] = 0.0
        with k.serial("b", ceil_div(end - start, KEYS)) as b:
            self.block(k, first, head, queries, source, start + b * KEYS, end, softmax)
        with k.serial("e", self.size) as e, k.unroll("v", vectors) as v, k.vector(LANES) as lane:
            token = first + v * LANES + lane
            with k.when(less_equal(start, token) & less_equal(token + 1, end)):
                self.out[token, head, e] = cast(values[e, v, lane] / total[v, lane], self.out.dtype)

    def block(self, k: Kernel, first: Dim, head: Dim, queries: Array, source: _Source, start: Dim, end: Dim, softmax: _Softmax) -> None:
        """Add KEYS keys, from token `start` on, to the softmax. If the text has fewer keys left, its last key fills the block with weight
        0."""
        vectors = queries.shape[1].const
        weights = k.local("weights", KEYS, vectors, LANES)
        old, rescale = k.local("old", vectors, LANES), k.local("rescale", vectors, LANES)
        highest, total, values = softmax.maximum, softmax.total, softmax.values

        def key(j: Dim | int) -> Dim:
            return dim_min(start + j, end - 1)

        with k.unroll("j", KEYS) as j, k.unroll("v", vectors) as v, k.vector(LANES) as lane:
            weights[j, v, lane] = 0.0
        with k.serial("r", self.size) as r, k.unroll("j", KEYS) as j, k.unroll("v", vectors) as v, k.vector(LANES) as lane:
            weights[j, v, lane] += queries[r, v, lane] * source.keys(key(j), r)
        with k.unroll("j", KEYS) as j, k.unroll("v", vectors) as v, k.vector(LANES) as lane:
            score = capped(weights[j, v, lane], self.softcap)
            if self.bias is not None:
                distance = relative(self.bias.buffer, start + j - (first + v * LANES + lane))
                score = score + cast(self.bias[head, distance], F32)
            weights[j, v, lane] = select(less_equal(start + j + 1, end), score, float("-inf"))

        with k.unroll("v", vectors) as v, k.vector(LANES) as lane:
            old[v, lane] = highest[v, lane]
        with k.unroll("v", vectors) as v, k.vector(LANES) as lane:
            largest: Scalar = old[v, lane]
            for j in range(KEYS):
                largest = larger(largest, weights[j, v, lane])
            highest[v, lane] = largest
        with k.unroll("v", vectors) as v, k.vector(LANES) as lane:
            rescale[v, lane] = exp(old[v, lane] - highest[v, lane])
        with k.unroll("j", KEYS) as j, k.unroll("v", vectors) as v, k.vector(LANES) as lane:
            weights[j, v, lane] = exp(weights[j, v, lane] - highest[v, lane])
        with k.unroll("v", vectors) as v, k.vector(LANES) as lane:
            value = total[v, lane] * rescale[v, lane]
            for j in range(KEYS):
                value = value + weights[j, v, lane]
            total[v, lane] = value
        self.lower(k, softmax, rescale)
        with k.serial("e", self.size) as e, k.unroll("v", vectors) as v, k.vector(LANES) as lane:
            value: Scalar = values[e, v, lane]
            for j in range(KEYS):
                value = fma(weights[j, v, lane], source.values(key(j), e), value)
            values[e, v, lane] = value

    def lower(self, k: Kernel, softmax: _Softmax, rescale: Array) -> None:
        """Multiply the weighted values so far by `rescale`, unless `rescale` is 1 for all tokens. After the first blocks, it usually is 1,
        because maxima rarely rise."""
        vectors = rescale.shape[0].const
        lost = k.local("lost", vectors, LANES)
        with k.unroll("v", vectors) as v, k.vector(LANES) as lane:
            lost[v, lane] = 1.0 - rescale[v, lane]
        fold_halves(k, lost, operator.add)
        with k.when(not_equal(lost[0, 0], 0.0)), k.serial("e", self.size) as e, k.unroll("v", vectors) as v, k.vector(LANES) as lane:
            softmax.values[e, v, lane] = softmax.values[e, v, lane] * rescale[v, lane]
