"""Attention on a GPU in f32. A block computes one token with some of the query heads of one kv head, a split of keys at a time, in steps:

    score   each thread multiplies one key by the queries of all the block's heads
    weigh   find top, the largest score, and replace each score by exp(score - top), its weight; add up the weights
    mix     each thread computes one element of the weighted sum of values, for all heads

splits.py describes how splits are merged. If pages are bf16, tensor_attention.py replaces this schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.backends.cuda.schedule.splits import F32, FEW, I64, LANES, LOWEST, SPLIT, ZERO, Partial, SplitAttention, join
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.attention import Attention, Ragged
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.write import Array, cast, equal, exp, fma, less, less_equal, maximum
from compiler.ir.prove import prove_le
from compiler.machine.intrinsics.arrive import Arrive
from compiler.ops.attention.kv_cache import PAGE, bound_layer
from compiler.ops.attention.plain import CachedKey, RaggedKey, capped, relative, text_bounds


def schedule_attention(prim: PrimFunc) -> PrimFunc | None:
    if not isinstance(prim.body, Attention):
        return None
    return replace(prim, body=_Attention(prim.body).body(), attrs={**prim.attrs, "schedule": "attention"})


@dataclass(frozen=True, slots=True)
class _Seen:
    """The keys that a token sees: positions `first` to `end` - 1 of its sequence. In concatenated texts, `start` is the index of the
    sequence's first key; for pages it is 0. `own` is the token's position."""

    sequence: Dim
    start: Dim
    first: Dim
    end: Dim
    own: Dim

    @property
    def first_split(self) -> Dim:
        return self.first // SPLIT

    @property
    def num_splits(self) -> Dim:
        return ceil_div(self.end, SPLIT) - self.first_split


class _Attention(SplitAttention):
    def body(self) -> Stmt:
        k, few, splits, groups = self.k, dim_min(self.tokens, FEW), self.most_splits, self.groups
        stored = self.allocate_stored(few, splits)
        arrived = k.counters("arrived", FEW, groups)
        many = Dim.of(0) if prove_le(self.tokens, FEW) else self.tokens * groups
        with k.grid("b", dim_max(few * groups * splits, many)) as b:
            with k.when(less(self.tokens, FEW + 1) & less(b, few * groups * splits)):
                t, group, split = k.unravel(b, [("t", few), ("group", Dim.of(groups)), ("split", splits)])
                self._attend_to_one(t, group, split, stored, arrived)
            if many != Dim.of(0):
                with k.when(less(FEW, self.tokens) & less(b, many)):
                    t, group = k.unravel(b, [("t", self.tokens), ("group", Dim.of(groups))])
                    self._attend_to_all(t, group)
        return k.body()

    def _attend_to_one(self, t: Dim, group: Dim, split: Dim, stored: Partial, arrived: Array) -> None:
        k, seen = self.k, self._seen(t)
        with k.when(less_equal(seen.first_split, split) & less(split, seen.first_split + seen.num_splits)):
            found, queries = self._partial("found"), self._load_queries(t, group)
            self._split(seen, t, group, split, queries, found)
            with k.threads("i", SPLIT) as i, k.serial("g", self.block_heads) as g:
                h = group * self.block_heads + g
                with k.when(less(i, 1)):
                    stored.top[t, h, split] = found.top[g]
                    stored.weights[t, h, split] = found.weights[g]
                with self.own_elements(i) as j:
                    stored.means[t, h, split, j] = found.means[g, j]
            is_last = k.shared("is_last", 1, dtype=DType.I32)
            k.tile(Arrive(), is_last[0], arrived[t, group], dims=(seen.num_splits,))
            last = equal(is_last[0], 1)
            with k.when(last), k.threads("i", SPLIT) as i, k.serial("g", self.block_heads) as g, self.own_elements(i) as j:
                self.join_stored(t, group * self.block_heads + g, j, (seen.first_split, seen.num_splits), stored)

    def _attend_to_all(self, t: Dim, group: Dim) -> None:
        k, seen = self.k, self._seen(t)
        found, joined, queries = self._partial("found"), self._partial("joined"), self._load_queries(t, group)
        with k.threads("i", SPLIT) as i, k.serial("g", self.block_heads) as g:
            top, weights = self.begin(group * self.block_heads + g)
            with k.when(less(i, 1)):
                joined.top[g] = top
                joined.weights[g] = weights
            with self.own_elements(i) as j:
                joined.means[g, j] = 0.0
        with k.serial("n", seen.num_splits) as n:
            self._split(seen, t, group, seen.first_split + n, queries, found)
            with k.threads("i", SPLIT) as i, k.serial("g", self.block_heads) as g, self.own_elements(i) as j:
                earlier, later = (joined.top[g], joined.weights[g], joined.means[g, j]), (found.top[g], found.weights[g], found.means[g, j])
                joined.means[g, j] = join(earlier, later)[2]
            with k.threads("g", self.block_heads) as g:
                after = k.local("after", 2)
                after[0], after[1], _ = join((joined.top[g], joined.weights[g], ZERO), (found.top[g], found.weights[g], ZERO))
                joined.top[g] = after[0]
                joined.weights[g] = after[1]
        with k.threads("i", SPLIT) as i, k.serial("g", self.block_heads) as g, self.own_elements(i) as j:
            self.out[t, group * self.block_heads + g, j] = cast(joined.means[g, j] / joined.weights[g], self.out.dtype)

    # --- attention to a split ------------------------------------------------------------------------------------------

    def _partial(self, name: str) -> Partial:
        """Allocate the online softmax of the block's heads in shared memory."""
        k, heads = self.k, self.block_heads
        return Partial(
            k.shared(f"{name}_top", heads), k.shared(f"{name}_weights", heads), k.shared(f"{name}_means", heads, self.value_size)
        )

    def _load_queries(self, t: Dim, group: Dim) -> Array:
        k = self.k
        queries = k.shared("queries", self.block_heads, self.size)
        with k.threads("i", SPLIT) as i, k.serial("g", self.block_heads) as g, self.own_elements(i, self.size) as j:
            queries[g, j] = cast(self.queries[t, group * self.block_heads + g, j], F32)
        return queries

    def _split(self, seen: _Seen, t: Dim, group: Dim, split: Dim, queries: Array, found: Partial) -> None:
        k, heads = self.k, self.block_heads
        low = k.let("low", dim_max(seen.first - split * SPLIT, 0), SPLIT - 1)
        high = k.let("high", dim_min(seen.end - split * SPLIT, SPLIT), SPLIT)
        scores, lanes = k.shared("scores", heads, SPLIT), k.shared("lanes", heads, LANES)
        with k.threads("i", SPLIT) as i:
            with k.when(less_equal(low, i) & less(i, high)):
                self._score(seen, group, split * SPLIT + i, queries, scores, i)
            with k.orelse(), k.unroll("g", heads) as g:
                scores[g, i] = LOWEST
        self.fold(scores, lanes, found.top, heads, maximum)
        with k.threads("i", SPLIT) as i, k.unroll("g", heads) as g:
            scores[g, i] = exp(scores[g, i] - found.top[g])
        self.fold(scores, lanes, found.weights, heads, lambda a, b: a + b)
        with k.threads("i", SPLIT) as i, self.own_elements(i) as j:
            means = k.local("means", heads)
            with k.unroll("g", heads) as g:
                means[g] = 0.0
            with k.serial("p", ceil_div(high, PAGE) - low // PAGE) as p:
                first = k.let("first", dim_max((low // PAGE + p) * PAGE, low), SPLIT - 1)
                end = dim_min((low // PAGE + p + 1) * PAGE, high)
                page = self._page(seen, split * SPLIT + first)
                with k.serial("n", end - first) as n:
                    value = k.local("value", 1)
                    value[0] = self._key(seen, split * SPLIT + first + n, page).value(group * heads, j)
                    with k.unroll("g", heads) as g:
                        means[g] = fma(scores[g, first + n], value[0], means[g])
            with k.unroll("g", heads) as g:
                found.means[g, j] = means[g]

    def _score(self, seen: _Seen, group: Dim, position: Dim, queries: Array, scores: Array, i: Dim) -> None:
        k, node, heads = self.k, self.node, self.block_heads
        key = self._key(seen, position, self._page(seen, position))
        dots, element = k.local("dots", heads), k.local("element", 1)
        with k.unroll("g", heads) as g:
            dots[g] = 0.0
        with k.serial("r", self.size) as r:
            element[0] = key.element(group * heads, r)
            with k.unroll("g", heads) as g:
                dots[g] = fma(queries[g, r], element[0], dots[g])
        with k.unroll("g", heads) as g:
            score = capped(dots[g] * node.scale, node.softcap)
            if node.bias is not None:
                score = score + cast(k.array(node.bias)[group * heads + g, relative(node.bias, position - seen.own)], F32)
            scores[g, i] = score

    # --- reading keys and values ---------------------------------------------------------------------------------------

    def _seen(self, t: Dim) -> _Seen:
        k, node, source = self.k, self.node, self.node.keys
        sequence = k.let("s", cast(k.array(node.sequences)[t], I64))
        start = end = Dim.of(0)
        if isinstance(source, Ragged):
            start, end = text_bounds(k, k.array(source.starts), sequence, self.tokens)
        own = t - start if node.positions is None else k.let("position", cast(k.array(node.positions)[t], I64))
        end = end - start if node.positions is None else own + 1
        return _Seen(sequence, start, dim_max(0, own - (node.window - 1)) if node.window else Dim.of(0), end, own)

    def _page(self, seen: _Seen, position: Dim) -> Dim | None:
        k, source = self.k, self.node.keys
        if isinstance(source, Ragged):
            return None
        return k.let("page", cast(k.array(source.tables)[seen.sequence, position // PAGE], I64))

    def _key(self, seen: _Seen, position: Dim, page: Dim | None) -> CachedKey | RaggedKey:
        k, source = self.k, self.node.keys
        if isinstance(source, Ragged):
            return RaggedKey(k, source, Dim.of(self.heads), seen.start + position)
        assert page is not None
        layer = bound_layer(k, source.layer, source.cache)
        return CachedKey(k, source, Dim.of(self.heads), Dim.of(self.size), layer, page, position % PAGE)
