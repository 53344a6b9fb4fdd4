"""Truncations of a row: which tokens stay.

None of them sorts. A histogram of the weights says in which of its BUCKETS the last token that stays lies. The tokens there are listed, and
the list is narrowed down by the same means, until all keys in it are equal. All sums are of integers, so the answer is exact.
"""

from __future__ import annotations

from collections.abc import Callable

from compiler.ops.sampling_text import (
    BLOCK,
    FLAT,
    HERE,
    LANES,
    VECTORS,
    Index,
    RowText,
    each_lane,
    each_vector,
    folded,
    less,
    more,
    plus,
    share_of,
    weighed,
    weighed_id,
    whole,
    with_locals,
)
from runtime.sampling import FURTHEST, MEAN_BITS, SHARE_ONE, Number, Setting

BUCKETS = 512
ROUNDS = 40  # of narrowing: each divides the range of f32 numbers by almost BUCKETS
SPAN = 16.0  # nats that the first histogram tells apart
SLACK = 0.01  # nats, more than the rounding of any distance that a bucket has


class Truncations(RowText):
    def truncated(self) -> str:
        top_k, top_p, typical_p = (self.setting(s) for s in (Setting.TOP_K, Setting.TOP_P, Setting.TYPICAL_P))
        reach = self.number(Number.REACH)
        cut = f"""
          when 0 < {top_k} & {top_k} < {self.vocab} {{ {self.top_k(top_k)} }}
          when {top_p} < {SHARE_ONE} {{ {self.by_mass(self.own, top_p, lambda limit: limit)} }}
          when {reach} < inf {{ {self.kept(lambda index: f"distance[g, {index}] <= {reach}")} }}
          when {typical_p} < {SHARE_ONE} {{
            {self.mean()}
            {self.by_mass(lambda index: f"abs(distance[g, {index}] - mean[0])", typical_p, lambda limit: f"mean[0] + {limit} + {SLACK}")}
          }}"""
        numbers = [f"{name}: i64[1]" for name in ("wanted", "count", "before", "run", "chosen", "last")]
        reals = [f"{name}: f32[1]" for name in ("upto", "base", "nearest", "furthest", "scale", "mean")]
        return with_locals(cut, *numbers, *reals, f"histogram: i64[{BUCKETS}]")

    def top_k(self, top_k: str) -> str:
        """As many blocks as there are tokens wanted have their low within some distance: none wanted lies beyond it."""
        return f"""
          count[0] = 0
          for b in {self.blocks} {{ let c = count[0] {{
            list[g, c] = cast(i32, dim(b))
            count[0] = dim(c) + select(low[g, b] < inf, 1, 0)
          }} }}
          upto[0] = inf  wanted[0] = {top_k}
          when {top_k} <= count[0] {{
            {self.narrowed(lambda index: f"low[g, {index}]", None)}
            upto[0] = nearest[0]
          }}
          {self.listed(f"{self.own(HERE)} <= upto[0]", "upto[0]")}
          wanted[0] = {top_k}
          when {top_k} <= count[0] {{
            {self.narrowed(self.own, None)}
            {self.cut(self.own, None, "nearest[0]")}
          }}"""

    def by_mass(self, key: Index, share: str, reach: Callable[[str], str]) -> str:
        """Keep the smallest keys that together weigh this share of all. `reach` is a distance beyond which every key is beyond a limit."""
        edge = f"select(chosen[0] < {BUCKETS - 1}, (cast(f32, chosen[0]) + 1.0) / scale[0], inf)"
        return f"""
          base[0] = 0.0  scale[0] = {BUCKETS / SPAN}
          {self.counted(key)}
          total[0] = 0
          for q in {BUCKETS} {{ total[0] = total[0] + histogram[q] }}
          wanted[0] = {share_of("total[0]", share)}
          {self.chosen()}
          upto[0] = {edge}
          {self.listed(f"{self.bucket(key(HERE))} == cast(i32, chosen[0])", reach("upto[0]"))}
          {self.narrowed(key, self.own)}
          {self.cut(key, self.own, reach("nearest[0]"))}"""

    def bucket(self, key: str) -> str:
        return whole(less(f"{BUCKETS - 1}.0", f"({key} - base[0]) * scale[0]"))

    def counted(self, key: Index) -> str:
        """The histogram of the weights. An addition to what was just written has to wait for it: each vector of a block has buckets of
        its own."""
        each = weighed(self.own(HERE), lambda weight: f"weights[u, l] = {weight}", "l")
        parts = " + ".join(f"parts[{v}, {LANES}*e + l]" for v in range(VECTORS))
        add = f"let q within 0..{BUCKETS - 1} = buckets[u, e] {{ parts[u, q] = parts[u, q] + weights[u, e] }}"
        block = f"""
          {each_vector(f"buckets[u, l] = {self.bucket(key(HERE))}  {each}")}
          for e in {LANES} {{ for unroll u in {VECTORS} {{ {add} }} }}"""
        counted = f"""
          for e in {BUCKETS // LANES} {{ {each_vector(f"parts[u, {LANES}*e + l] = 0")} }}
          {self.live(block)}
          for e in {BUCKETS // LANES} {{ {each_lane(f"histogram[{LANES}*e + l] = {parts}")} }}"""
        shape = f"{VECTORS}, {LANES}"
        return with_locals(counted, f"parts: i64[{VECTORS}, {BUCKETS}]", f"buckets: i32[{shape}]", f"weights: i64[{shape}]")

    def emptied(self) -> str:
        return f"for e in {BUCKETS // LANES} {{ {each_lane(f'histogram[{LANES}*e + l] = 0')} }}"

    def chosen(self) -> str:
        """The bucket in which the weights come to `wanted`, which becomes what this bucket has to add."""
        return f"""
          run[0] = 0  before[0] = 0  chosen[0] = 0
          for q in {BUCKETS} {{
            run[0] = run[0] + histogram[q]
            when run[0] < wanted[0] {{ before[0] = run[0]  chosen[0] = dim(q) + 1 }}
          }}
          wanted[0] = wanted[0] - before[0]"""

    def mean(self) -> str:
        """The total weight, and the mean distance by weight."""

        near = less(f"{FURTHEST}", self.own(HERE))
        moment = f"cast(i64, {whole(f'{near} * {float(1 << MEAN_BITS)}')})"
        each = weighed(
            self.own(HERE),
            lambda weight: f"lanes[l] = lanes[l] + {weight}  moments[l] = moments[l] + (({weight} * {moment}) >> {MEAN_BITS})",
            "l",
        )
        means = f"""
          {each_lane("lanes[l] = 0  moments[l] = 0")}
          {self.live(each_vector(each))}
          {folded("lanes", plus)}
          {folded("moments", plus)}
          total[0] = lanes[0]
          mean[0] = cast(f32, moments[0]) / cast(f32, lanes[0])"""
        return with_locals(means, f"moments: i64[{LANES}]")

    def listed(self, condition: str, reach: str) -> str:
        """The tokens that meet the condition, by id; none of them stands in a block whose low lies beyond `reach`."""
        entry = f"let c = count[0] {{ list[g, c] = cast(i32, dim({BLOCK}*b + e))  count[0] = dim(c) + 1 }}"
        hits = f"select({condition} & {self.own(HERE)} < inf, 1, 0)"
        block = f"""
          {each_lane("lanes[l] = 0")}
          {each_vector(f"hits[{FLAT}] = {hits}  lanes[l] = lanes[l] + hits[{FLAT}]")}
          {folded("lanes", plus)}
          when 0 < lanes[0] {{ for e in {BLOCK} {{ when 0 < hits[e] {{ {entry} }} }} }}"""
        return with_locals(f"count[0] = 0\n{self.live(block, reach)}", f"hits: i64[{BLOCK}]")

    def narrowed(self, key: Index, distance: Index | None) -> str:
        """nearest: the key with which the list, by ascending keys, comes to weigh `wanted`; the list: those with this key; wanted: what
        they have to add. Entries weigh 1 where no distance is given."""
        bucket = self.bucket(key("id"))
        counted = weighed_id(distance, lambda weight: f"histogram[q] = histogram[q] + {weight}")
        ends = f"""
          nearest[0] = {less("nearest[0]", key("id"))}
          furthest[0] = {more("furthest[0]", key("id"))}"""
        return f"""
          nearest[0] = inf  furthest[0] = -inf
          let c = count[0] {{ for e in c {{ let id = list[g, e] {{ {ends} }} }} }}
          for round in {ROUNDS} {{ when nearest[0] < furthest[0] {{
            base[0] = nearest[0]
            scale[0] = {less("1e38", f"{BUCKETS - 1}.0 / (furthest[0] - nearest[0])")}
            {self.emptied()}
            let c = count[0] {{
              for e in c {{ let id = list[g, e] {{ let q within 0..{BUCKETS - 1} = {bucket} {{ {counted} }} }} }}
              {self.chosen()}
              count[0] = 0  nearest[0] = inf  furthest[0] = -inf
              for e in c {{ let id = list[g, e] {{ when {bucket} == cast(i32, chosen[0]) {{
                let to = count[0] {{ list[g, to] = cast(i32, dim(id))  count[0] = dim(to) + 1 }}
                {ends}
              }} }} }}
            }}
          }} }}"""

    def cut(self, key: Index, distance: Index | None, reach: str) -> str:
        """Nothing beyond `nearest`, and of those at it only the first that add what is wanted."""

        def within(index: str) -> str:
            return f"{key(index)} < nearest[0] | {key(index)} == nearest[0] & dim({index}) <= last[0]"

        added = weighed_id(distance, lambda weight: f"when run[0] < wanted[0] {{ last[0] = dim(id) }}  run[0] = run[0] + {weight}")
        return f"""
          run[0] = 0
          let c = count[0] {{ for e in c {{ let id = list[g, e] {{ {added} }} }} }}
          {self.kept(within, f"{reach} < low[g, b]")}"""
