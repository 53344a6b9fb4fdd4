"""Attention on a GPU in f32. A run is one token. A block computes a split in steps:

score   each thread multiplies one key by the queries of all the block's heads
weigh   find top, the largest score, and replace each score by its weight; add up the weights
mix     each thread computes some elements of the weighted sum of values, for all heads
"""

from __future__ import annotations

from dataclasses import replace

from compiler.backends.cuda.schedule.attention.walk import I64, LANE_PITCH, LOWEST, SPLIT, Partial, Run, Walk
from compiler.backends.cuda.schedule.hold import at_once, hold
from compiler.ir.dims import Dim, ceil_div, dim_max, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.attention import Attention, Ragged
from compiler.ir.loops.prim_func import PrimFunc
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import cast, const, fma, less, less_equal, select
from compiler.ops.attention.kv_cache import PAGE, bound_layer
from compiler.ops.attention.plain import CachedKey, RaggedKey, text_bounds
from compiler.ops.attention.reach import first_position, last_position

MOST_ELEMENTS = 32  # maximum number of elements of a key that a thread loads at once


def schedule_attention(prim: PrimFunc) -> PrimFunc | None:
    """Schedule attention of any kind. Return None for any other nest."""
    if not isinstance(prim.body, Attention):
        return None
    return replace(prim, body=FloatWalk(prim.body).body(), attrs={**prim.attrs, "schedule": "attention"})


class FloatWalk(Walk):
    """The unit for keys and values of any type. A run is one token."""

    def __init__(self, node: Attention) -> None:
        super().__init__(node)
        self.row_counts = (self.block_heads,)

    def begins_run(self, t: Dim, group: Dim) -> Scalar:
        return const(1, DType.BOOL)

    def allocate(self) -> None:
        """Allocate shared memory for the queries, the scores of a split, and the softmaxes of one token."""
        k, rows = self.k, self.block_heads
        self.rows, self.scores, self.lanes = (
            k.shared("queries", rows, self.size),
            k.shared("scores", rows, SPLIT),
            k.shared("lanes", rows, LANE_PITCH),
        )
        self.factors = k.shared("factors", 2, rows)
        self.joined, self.found = (
            Partial(k.shared(f"{name}_top", rows), k.shared(f"{name}_weights", rows), k.shared(f"{name}_means", rows, self.value_size))
            for name in ("joined", "found")
        )

    def find_run(self, t: Dim, group: Dim) -> Run:
        """Return the run of token `t` alone. The token sees the keys that its position allows, or its whole text if the attention has no
        positions."""
        k, node, source = self.k, self.node, self.node.keys
        sequence = k.let("s", cast(k.array(node.sequences)[t], I64))
        start = end = layer = Dim.of(0)
        if isinstance(source, Ragged):
            start, end = text_bounds(k, k.array(source.starts), sequence, self.tokens)
        else:
            layer = bound_layer(k, source.layer, source.cache)
        if node.positions is None:
            return Run(t, group, Dim.of(1), sequence, Dim.of(0), end - start, start, layer)
        positions = k.array(node.positions)
        last = k.let("position", last_position(positions, t))
        return Run(t, group, Dim.of(1), sequence, first_position(k, node, positions, t, last), last + 1, start, layer)

    def add_split(self, run: Run, rows: int, split: Dim) -> None:
        """Compute the softmax of a split in the steps score, weigh and mix, and join it with the splits before it. Keys of the split that
        the token does not see get weight 0."""
        k, scores, found = self.k, self.scores, self.found
        low = k.let("low", dim_max(run.low - split * SPLIT, 0), SPLIT - 1)
        high = k.let("high", dim_min(run.high - split * SPLIT, SPLIT), SPLIT)
        with k.threads("i", SPLIT) as i:
            with k.when(less_equal(low, i) & less(i, high)):
                self._score(run, split * SPLIT + i, i)
            with k.orelse(), k.unroll("g", rows) as g:
                scores[g, i] = LOWEST
        self.weigh(rows)
        with k.threads("i", SPLIT) as i, self.own_elements(i) as j:
            means = k.local("means", rows)
            with k.unroll("g", rows) as g:
                means[g] = 0.0
            with k.serial("p", ceil_div(high, PAGE) - low // PAGE) as p:
                first = (low // PAGE + p) * PAGE
                page = self._page(run, split * SPLIT + first)
                keys = [dim_min(first + n, high - 1) for n in range(PAGE)]  # keys after the last one may not exist
                values = hold(k, [self._key(run, split * SPLIT + i, page).value(run.group * rows, j) for i in keys])
                for n, value in enumerate(values):  # no branches, because a load would move into the only branch that uses it
                    seen = less_equal(low, first + n) & less(first + n, high)
                    with k.unroll("g", rows) as g:
                        means[g] = select(seen, fma(scores[g, first + n], value, means[g]), means[g])
            with k.unroll("g", rows) as g:
                found.means[g, j] = means[g]
        self.join(rows)

    def _score(self, run: Run, position: Dim, i: Dim) -> None:
        """Compute the scores of one key, for all heads of the block. The key is at `position` in its sequence, and at `i` in its split."""
        k, heads = self.k, self.block_heads
        key = self._key(run, position, self._page(run, position))
        dots = k.local("dots", heads)
        with k.unroll("g", heads) as g:
            dots[g] = 0.0
        group = at_once(self.size, MOST_ELEMENTS)
        with k.serial("m", self.size // group) as m:
            numbers = [m * group + u for u in range(group)]
            for r, element in zip(numbers, hold(k, [key.element(run.group * heads, r) for r in numbers]), strict=True):
                with k.unroll("g", heads) as g:
                    dots[g] = fma(self.rows[g, r], element, dots[g])
        own = run.token - run.start if self.node.positions is None else run.high - 1
        with k.unroll("g", heads) as g:
            self.scores[g, i] = self.finished(dots[g], self.head(run, g), position - own)

    # --- reading keys and values ---------------------------------------------------------------------------------------

    def _page(self, run: Run, position: Dim) -> Dim | None:
        """Return the number of the page with the key at a position. Return None if keys are not in pages."""
        source = self.node.keys
        if isinstance(source, Ragged):
            return None
        return self.k.let("page", cast(self.k.array(source.tables)[run.sequence, position // PAGE], I64))

    def _key(self, run: Run, position: Dim, page: Dim | None) -> CachedKey | RaggedKey:
        """Return the key at a position, with its value. `page` is what `_page` returns."""
        k, source = self.k, self.node.keys
        if isinstance(source, Ragged):
            return RaggedKey(k, source, Dim.of(self.heads), run.start + position)
        assert page is not None
        return CachedKey(k, source, Dim.of(self.heads), Dim.of(self.size), run.layer, page, position % PAGE)
