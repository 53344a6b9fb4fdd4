"""Truncations of a row: which tokens stay.

None of them sorts. A histogram of the weights says in which of its BUCKETS the last token that stays lies. The tokens there are listed, and
the list is narrowed down by the same means, until all keys in it are equal. All sums are of integers, so the answer is exact.
"""

from __future__ import annotations

from collections.abc import Callable

from compiler.ops.sampling_text import (
    BLOCK,
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
        """top_k, top_p and typical_p are one text, gone through three times: what they keep is nearest to `center`, and comes to the
        number of tokens or the weight that is wanted. Each lists the tokens among which the last one is that stays."""
        asked, reach = f"settings[i, {int(Setting.TOP_K)} + stage]", self.number(Number.REACH)
        everything = f"select(dim(stage) == 0, {self.vocab}, {SHARE_ONE})"
        cut = f"""
          center[0] = 0.0
          for stage in 3 {{
            when dim(stage) == 2 & {reach} < inf {{ {self.kept(lambda index: f"distance[g, {index}] <= {reach}")} }}
            when (0 < {asked} | 0 < dim(stage)) & {asked} < {everything} {{
              when dim(stage) == 2 {{ {self.mean()} }}
              when dim(stage) == 0 {{ {self.listed_by_number(asked)} }} else {{ {self.listed_by_weight(asked)} }}
              when 0 < dim(stage) | wanted[0] <= count[0] {{
                {self.narrowed(self.off_center, self.weighed_id)}
                {self.last()}
                upto[0] = center[0] + nearest[0] + {SLACK}
                {self.kept_and_summed(self.within, "upto[0] < low[g, b]")}
              }}
            }}
          }}"""
        numbers = [f"{name}: i64[1]" for name in ("wanted", "count", "before", "run", "chosen", "last")]
        reals = [f"{name}: f32[1]" for name in ("upto", "base", "nearest", "furthest", "scale", "center")]
        return with_locals(cut, *numbers, *reals, f"histogram: i64[{BUCKETS}]")

    def off_center(self, index: str) -> str:
        return f"abs({self.own(index)} - center[0])"

    def weighed_id(self, use: Callable[[str], str]) -> str:
        """`use` of what the token `id` adds to what is wanted."""
        return weighed(self.own("id"), lambda weight: use(f"select(dim(stage) == 0, 1, {weight})"))

    def within(self, index: str) -> str:
        """Nothing beyond `nearest`, and nothing at it behind the last."""
        key = self.off_center(index)
        return f"({key} < nearest[0] | {key} == nearest[0] & dim({index}) <= last[0])"

    def listed_by_number(self, number: str) -> str:
        """As many blocks as there are tokens wanted have their low within some distance: none wanted lies beyond it."""
        return f"""
          count[0] = 0
          for b in {self.blocks} {{ let c = count[0] {{
            list[g, c] = cast(i32, dim(b))
            count[0] = dim(c) + select(low[g, b] < inf, 1, 0)
          }} }}
          upto[0] = inf  wanted[0] = {number}
          when wanted[0] <= count[0] {{
            {self.narrowed(lambda index: f"low[g, {index}]", lambda use: use("1"))}
            upto[0] = nearest[0]
          }}
          {self.listed(f"{self.own(HERE)} <= upto[0]")}
          wanted[0] = {number}"""

    def listed_by_weight(self, share: str) -> str:
        """The bucket in which the smallest keys come to this share of all weights."""
        edge = f"select(chosen[0] < {BUCKETS - 1}, (cast(f32, chosen[0]) + 1.0) / scale[0], inf)"
        return f"""
          base[0] = 0.0  scale[0] = {BUCKETS / SPAN}
          {self.counted()}
          total[0] = 0
          for q in {BUCKETS} {{ total[0] = total[0] + histogram[q] }}
          wanted[0] = {share_of("total[0]", share)}
          {self.chosen()}
          upto[0] = center[0] + {edge} + {SLACK}
          {self.listed(f"{self.bucket(self.off_center(HERE))} == cast(i32, chosen[0])")}"""

    def bucket(self, key: str) -> str:
        return whole(less(f"{BUCKETS - 1}.0", f"({key} - base[0]) * scale[0]"))

    def counted(self) -> str:
        """The histogram of the weights. An addition to what was just written has to wait for it: each vector of a block has buckets of
        its own, and the weights of a block are added while those of the next one are made."""
        each = weighed(self.own(HERE), lambda weight: f"weights[b % 2, u, l] = {weight}", "l")
        parts = " + ".join(f"parts[{v}, {LANES}*e + l]" for v in range(VECTORS))

        def added(slot: str) -> str:
            add = f"let q within 0..{BUCKETS - 1} = buckets[{slot}, u, e] {{ parts[u, q] = parts[u, q] + weights[{slot}, u, e] }}"
            return f"when held[{slot}] {{ for e in {LANES} {{ for unroll u in {VECTORS} {{ {add} }} }} }}"

        counted = f"""
          for e in {BUCKETS // LANES} {{ {each_vector(f"parts[u, {LANES}*e + l] = 0")} }}
          held[0] = false  held[1] = false
          for b in {self.blocks} {{
            held[b % 2] = low[g, b] < inf
            when held[b % 2] {{ {each_vector(f"buckets[b % 2, u, l] = {self.bucket(self.off_center(HERE))}  {each}")} }}
            {added("(b + 1) % 2")}
          }}
          {added(str((self.blocks - 1) % 2))}
          for e in {BUCKETS // LANES} {{ {each_lane(f"histogram[{LANES}*e + l] = {parts}")} }}"""
        shape = f"2, {VECTORS}, {LANES}"
        return with_locals(
            counted, f"parts: i64[{VECTORS}, {BUCKETS}]", f"buckets: i32[{shape}]", f"weights: i64[{shape}]", "held: bool[2]"
        )

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
        """center: the mean distance, by weight."""
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
          center[0] = cast(f32, moments[0]) / cast(f32, lanes[0])"""
        return with_locals(means, f"moments: i64[{LANES}]")

    def listed(self, condition: str) -> str:
        """The tokens that meet the condition, by id; none of them stands in a block whose low lies beyond `upto`."""
        hits = f"hits[u, l] = select({condition} & {self.own(HERE)} < inf, 1:i32, 0:i32)"
        found = f'{each_lane(hits)} tile "append"(list[g, 0], count[0], hits[u, 0]) dims({BLOCK}*b + {LANES}*u)'
        return with_locals(
            f"count[0] = 0\n{self.live(f'for unroll u in {VECTORS} {{ {found} }}', 'upto[0]')}", f"hits: i32[{VECTORS}, {LANES}]"
        )

    def narrowed(self, key: Index, weighed_id: Callable[[Callable[[str], str]], str]) -> str:
        """nearest: the key with which the list, by ascending keys, comes to weigh `wanted`; the list: those with this key; wanted: what
        they have to add."""
        bucket = self.bucket(key("id"))
        counted = weighed_id(lambda weight: f"histogram[q] = histogram[q] + {weight}")
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

    def last(self) -> str:
        """Of the tokens at `nearest`, the last that it takes to add what is wanted."""
        added = self.weighed_id(lambda weight: f"when run[0] < wanted[0] {{ last[0] = dim(id) }}  run[0] = run[0] + {weight}")
        return f"run[0] = 0  let c = count[0] {{ for e in c {{ let id = list[g, e] {{ {added} }} }} }}"
