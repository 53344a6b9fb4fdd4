"""Attention in three launches: a thread per score, one per row of scores, one per element of the result.

A thread folds keys by position, from the first that its token sees, so that nothing of the batch around a token changes its bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.backends.cuda.schedule.elements import elements
from compiler.ir.dims import Dim, dim_max
from compiler.ir.dtypes import DType
from compiler.ir.loops.attention import Attention, Ragged
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.write import Kernel, cast, exp, fma, less, less_equal, maximum
from compiler.ops.attention.kv_cache import PAGE, bound_layer
from compiler.ops.attention.plain import CachedKey, RaggedKey, capped, relative, text_bounds

F32, I64 = DType.F32, DType.I64
LOWEST = float("-inf")


def schedule_attention(prim: PrimFunc) -> PrimFunc | None:
    if not isinstance(prim.body, Attention):
        return None
    return replace(prim, body=_Attention(prim.body).body(), attrs={**prim.attrs, "schedule": "attention"})


@dataclass(frozen=True, slots=True)
class _Seen:
    """The keys that a token attends to: first .. own of its sequence, which begins at key `start` of the batch."""

    sequence: Dim
    start: Dim
    first: Dim
    end: Dim
    own: Dim

    @property
    def count(self) -> Dim:
        return self.end - self.first


class _Attention:
    def __init__(self, node: Attention) -> None:
        self.node, self.k = node, Kernel()
        self.out, self.queries = self.k.arrays(node.out, node.queries)
        self.tokens, self.heads, self.size = self.out.shape

    def body(self) -> Stmt:
        k, source = self.k, self.node.keys
        most = self.tokens if isinstance(source, Ragged) else source.tables.shape[1] * PAGE  # keys of a sequence
        self.scores = k.workspace("scores", self.tokens, self.heads, most)
        self.sums = k.workspace("sums", self.tokens, self.heads)
        with elements(k, [("t", self.tokens), ("h", self.heads), ("i", most)]) as (t, h, i):
            self._score(t, h, i)
        with elements(k, [("t", self.tokens), ("h", self.heads)]) as (t, h):
            self._weigh(t, h)
        with elements(k, [("t", self.tokens), ("h", self.heads), ("j", self.size)]) as (t, h, j):
            self._mix(t, h, j)
        return k.body()

    def _score(self, t: Dim, h: Dim, i: Dim) -> None:
        k, node = self.k, self.node
        seen = self._seen(t)
        with k.when(less_equal(seen.first, i) & less(i, seen.end)):
            key = self._key(seen, i)
            dot = k.local("dot", 1)
            dot[0] = 0.0
            with k.serial("r", self.size) as r:
                dot[0] = fma(cast(self.queries[t, h, r], F32), key.element(h, r), dot[0])
            score = capped(dot[0] * node.scale, node.softcap)
            if node.bias is not None:
                score = score + cast(k.array(node.bias)[h, relative(node.bias, i - seen.own)], F32)
            self.scores[t, h, i] = score

    def _weigh(self, t: Dim, h: Dim) -> None:
        """Replace each score by exp(score - top), and sum these."""
        k, sink = self.k, self._sink(h)
        seen = self._seen(t)
        top, weights = k.local("top", 1), k.local("weights", 1)
        top[0] = LOWEST if sink is None else sink
        with k.serial("i", seen.count) as i:
            top[0] = maximum(top[0], self.scores[t, h, seen.first + i])
        weights[0] = 0.0 if sink is None else exp(sink - top[0])
        with k.serial("i", seen.count) as i:
            self.scores[t, h, seen.first + i] = exp(self.scores[t, h, seen.first + i] - top[0])
            weights[0] = weights[0] + self.scores[t, h, seen.first + i]
        self.sums[t, h] = weights[0]

    def _mix(self, t: Dim, h: Dim, j: Dim) -> None:
        k = self.k
        seen = self._seen(t)
        mean = k.local("mean", 1)
        mean[0] = 0.0
        with k.serial("i", seen.count) as i:
            value = self._key(seen, seen.first + i).value(h, j)
            mean[0] = fma(self.scores[t, h, seen.first + i], value, mean[0])
        self.out[t, h, j] = cast(mean[0] / self.sums[t, h], self.out.dtype)

    # --- keys --------------------------------------------------------------------------------------------------------

    def _seen(self, t: Dim) -> _Seen:
        k, node, source = self.k, self.node, self.node.keys
        sequence = k.let("s", cast(k.array(node.sequences)[t], I64))
        start = end = Dim.of(0)
        if isinstance(source, Ragged):
            start, end = text_bounds(k, k.array(source.starts), sequence, self.tokens)
        own = t - start if node.positions is None else k.let("position", cast(k.array(node.positions)[t], I64))
        end = end - start if node.positions is None else own + 1
        return _Seen(sequence, start, dim_max(0, own - (node.window - 1)) if node.window else Dim.of(0), end, own)

    def _key(self, seen: _Seen, position: Dim) -> CachedKey | RaggedKey:
        k, source = self.k, self.node.keys
        if isinstance(source, Ragged):
            return RaggedKey(k, source, self.heads, seen.start + position)
        layer = bound_layer(k, source.layer, source.cache)
        page = k.let("page", cast(k.array(source.tables)[seen.sequence, position // PAGE], I64))
        return CachedKey(k, source, self.heads, self.size, layer, page, position % PAGE)

    def _sink(self, h: Dim) -> Scalar | None:
        return None if self.node.sinks is None else cast(self.k.array(self.node.sinks)[h], F32)
