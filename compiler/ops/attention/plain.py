"""The reference loop nest of attention: the scores, their maximum, the sum of their exponentials, and the weighted sum of the values.

The interpreter runs these loops, and so does a back end that has no schedule for the given operands. A schedule may add the terms of a sum
in another order, and reads keys and values only once.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.dims import Dim, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.attention import Attention, Paged, Ragged
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.write import Array, Kernel, cast, exp, largest, maximum, tanh, total
from compiler.ops.attention.kv_cache import KEYS, PAGE, VALUES, bound_layer, key_index, value_index
from compiler.ops.attention.reach import first_position, last_position

F32, I64 = DType.F32, DType.I64


def capped(score: Scalar, softcap: float) -> Scalar:
    """Return softcap * tanh(score / softcap), or the score unchanged if softcap is 0."""
    return tanh(score / softcap) * softcap if softcap else score


def relative(bias: Buffer, distance: Dim) -> Dim:
    """Return the index in `bias` for a key at this distance from the query. Distances beyond the ends of `bias` are clamped."""
    furthest = bias.shape[1] // 2
    return dim_min(dim_max(distance, -furthest), furthest) + furthest


def plain_attention(node: Attention) -> Stmt:
    """Return the loops that fill `node.out`."""
    k, source = Kernel(), node.keys
    out, queries, sequences = k.arrays(node.out, node.queries, node.sequences)
    sinks, bias, positions = (None if buffer is None else k.array(buffer) for buffer in (node.sinks, node.bias, node.positions))
    (tokens, heads, size), value_size = queries.shape, out.shape[2]
    sums = k.workspace("sums", tokens, heads, value_size)
    weight_sum, top = k.workspace("total", tokens, heads), k.workspace("top", tokens, heads)
    scores = k.workspace("scores", tokens, heads, tokens if isinstance(source, Ragged) else source.tables.shape[1] * PAGE)

    def weight(t: Dim, h: Dim, position: Dim) -> Scalar:
        return exp(scores[t, h, position] - top[t, h])

    def attend(t: Dim, layer: Dim) -> None:
        sequence = k.let("s", cast(sequences[t], I64))
        start = end = Dim.of(0)
        if isinstance(source, Ragged):
            start, end = text_bounds(k, k.array(source.starts), sequence, tokens)
        own = t - start if positions is None else k.let("position", last_position(positions, t))
        low = Dim.of(0) if positions is None else first_position(k, node, positions, t, own)
        count = end - start if positions is None else own + 1 - low

        def at(position: Dim) -> CachedKey | RaggedKey:
            if isinstance(source, Ragged):
                return RaggedKey(k, source, heads, start + position)
            page = k.let("page", cast(k.array(source.tables)[sequence, position // PAGE], I64))
            return CachedKey(k, source, heads, size, layer, page, position % PAGE)

        with k.nest((heads, count)) as (h, i):
            key = at(low + i)
            score = total((size,), lambda r: cast(queries[t, h, r], F32) * key.element(h, r))
            score = capped(score * node.scale, node.softcap)
            if bias is not None:
                score = score + cast(bias[h, relative(bias.buffer, low + i - own)], F32)
            scores[t, h, low + i] = score
        with k.nest((heads,)) as (h,):
            highest = largest((count,), lambda i: scores[t, h, low + i])
            top[t, h] = highest if sinks is None else maximum(highest, cast(sinks[h], F32))
        with k.nest((heads,)) as (h,):
            weights = total((count,), lambda i: weight(t, h, low + i))
            weight_sum[t, h] = weights if sinks is None else weights + exp(cast(sinks[h], F32) - top[t, h])
        with k.nest((heads, value_size)) as (h, j):
            sums[t, h, j] = 0.0
        with k.nest((count,)) as (i,):
            key = at(low + i)
            with k.nest((heads, value_size)) as (h, j):
                sums[t, h, j] = sums[t, h, j] + weight(t, h, low + i) * key.value(h, j)  # product and sum are each rounded

    with k.scope():
        layer = bound_layer(k, source.layer, source.cache) if isinstance(source, Paged) else Dim.of(0)
        with k.nest((tokens,)) as (t,):
            attend(t, layer)
    with k.nest(out.shape) as (t, h, j):
        out[t, h, j] = cast(sums[t, h, j] / weight_sum[t, h], out.dtype)
    return k.body()


def text_bounds(k: Kernel, starts: Array, sequence: Dim, num_tokens: Dim) -> tuple[Dim, Dim]:
    """Return the first token of a sequence and the end of the sequence (one past its last token)."""
    start = k.let("start", cast(starts[sequence], I64), num_tokens)
    return start, k.let("end", cast(starts[sequence + 1], I64), num_tokens)


# --- the key at a position ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CachedKey:
    """The key at one position of a sequence, and its value, in the paged cache."""

    k: Kernel
    source: Paged
    heads: Dim
    size: Dim
    layer: Dim
    page: Dim
    offset: Dim  # offset of the key within its page

    def element(self, h: Dim, r: Dim) -> Scalar:
        """Return element `r` of the key that query head `h` reads."""
        return self._decoded(KEYS, h, key_index(self.size, self.offset, r))

    def value(self, h: Dim, j: Dim) -> Scalar:
        """Return element `j` of the value that query head `h` reads. In a cache without values, it is element `j` of the key."""
        if not self.source.has_values:
            return self.element(h, j)
        return self._decoded(VALUES, h, value_index(self.size, self.offset, j))

    def _decoded(self, half: int, h: Dim, index: Dim) -> Scalar:
        cache, scales = self.source.cache, self.source.scales
        kv_head = h // (self.heads // cache.shape[3])
        value = cast(self.k.array(cache)[self.layer, half, self.page, kv_head, index], F32)
        if scales is None:
            return value
        return value * cast(self.k.array(scales)[self.layer, half, self.page, kv_head, self.offset], F32)


@dataclass(frozen=True, slots=True)
class RaggedKey:
    """The key of one token, and its value, in tensors [tokens, kv_heads, size]."""

    k: Kernel
    source: Ragged
    heads: Dim
    token: Dim

    def element(self, h: Dim, r: Dim) -> Scalar:
        return self._element(self.source.keys, h, r)

    def value(self, h: Dim, j: Dim) -> Scalar:
        return self._element(self.source.values, h, j)

    def _element(self, buffer: Buffer, h: Dim, index: Dim) -> Scalar:
        return cast(self.k.array(buffer)[self.token, h // (self.heads // buffer.shape[1]), index], F32)
