"""Truncations of a row: which tokens stay.

None of them sorts. It finds a distance that bounds the answer, lists the tokens up to there, and narrows the list down: a histogram of the
weights between the smallest and the largest key says in which of its BUCKETS the answer lies, and what lies there is the next list, until
all keys in it are equal. All sums are of integers, so the answer is exact.
"""

from __future__ import annotations

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

BUCKETS = 256
ROUNDS = 40  # of narrowing: each divides the range of f32 numbers by almost BUCKETS
SPAN = 16.0  # nats behind the first bound that a histogram tells apart


class Truncations(RowText):
    def truncated(self) -> str:
        top_k, top_p, typical_p = (self.setting(s) for s in (Setting.TOP_K, Setting.TOP_P, Setting.TYPICAL_P))
        reach = self.number(Number.REACH)
        cut = f"""
          when 0 < {top_k} & {top_k} < {self.vocab} {{ {self.top_k(top_k)} }}
          when {top_p} < {SHARE_ONE} {{
            {self.summed()}
            wanted[0] = {share_of("total[0]", top_p)}
            {self.by_mass(self.own, 4.0, nearest_first=True)}
          }}
          when {reach} < inf {{ {self.kept(lambda index: f"distance[g, {index}] <= {reach}")} }}
          when {typical_p} < {SHARE_ONE} {{
            {self.mean()}
            wanted[0] = {share_of("total[0]", typical_p)}
            {self.by_mass(lambda index: f"abs(distance[g, {index}] - mean[0])", 0.5, nearest_first=False)}
          }}"""
        numbers = [f"{name}: i64[1]" for name in ("wanted", "count", "before", "run", "chosen", "last")]
        reals = [f"{name}: f32[1]" for name in ("from", "upto", "base", "nearest", "furthest", "scale", "mean")]
        return with_locals(cut, *numbers, *reals, f"histogram: i64[{BUCKETS}]")

    def top_k(self, top_k: str) -> str:
        """As many blocks as there are tokens wanted have their low within some distance: none wanted lies beyond it."""
        return f"""
          count[0] = 0
          for b in {self.blocks} {{ let c = count[0] {{
            list[g, c] = cast(i32, dim(b))
            count[0] = dim(c) + select(low[g, b] < inf, 1, 0)
          }} }}
          upto[0] = inf  from[0] = -1.0  wanted[0] = {top_k}
          when {top_k} <= count[0] {{
            {self.narrowed(lambda index: f"low[g, {index}]", None)}
            upto[0] = nearest[0]
          }}
          {self.listed(self.own, "", "upto[0]")}
          wanted[0] = {top_k}
          when {top_k} <= count[0] {{
            {self.narrowed(self.own, None)}
            {self.cut(self.own, None, nearest_first=True)}
          }}"""

    def by_mass(self, key: Index, bound: float, *, nearest_first: bool) -> str:
        """Keep the smallest keys that together weigh `wanted`. Most often those within a near bound do, and few blocks have any."""
        each = weighed(self.own(HERE), lambda weight: f"lanes[l] = lanes[l] + select({key(HERE)} <= upto[0], {weight}, 0)", "l")
        reach = "upto[0]" if nearest_first else ""
        return f"""
          from[0] = -1.0  base[0] = 0.0  upto[0] = {bound}  scale[0] = {BUCKETS / bound}
          {each_lane("lanes[l] = 0")}
          {self.live(each_vector(each), reach)}
          {folded("lanes", plus)}
          when lanes[0] < wanted[0] {{
            wanted[0] = wanted[0] - lanes[0]
            from[0] = upto[0]  base[0] = upto[0]  upto[0] = inf  scale[0] = {BUCKETS / SPAN}
          }}
          {self.counted(key, reach)}
          {self.chosen()}
          {self.listed(key, f" & {self.bucket(key(HERE))} == cast(i32, chosen[0])", reach)}
          {self.narrowed(key, self.own)}
          {self.cut(key, self.own, nearest_first=nearest_first)}"""

    def inside(self, key: Index) -> str:
        return f"from[0] < {key(HERE)} & {key(HERE)} <= upto[0] & {self.own(HERE)} < inf"

    def bucket(self, key: str) -> str:
        return whole(less(f"{BUCKETS - 1}.0", f"({key} - base[0]) * scale[0]"))

    def counted(self, key: Index, reach: str) -> str:
        """The histogram of the weights above `from` and within `upto`. An addition to what was just written has to wait for it: each vector
        of a block has buckets of its own, and weights outside add nothing to the bucket of their lane."""
        bucket = f"select({self.inside(key)}, {self.bucket(key(HERE))}, cast(i32, dim({BUCKETS // LANES}*l)))"
        each = weighed(self.own(HERE), lambda weight: f"weights[u, l] = select({self.inside(key)}, {weight}, 0)", "l")
        parts = " + ".join(f"parts[{v}, {LANES}*e + l]" for v in range(VECTORS))
        add = f"let q within 0..{BUCKETS - 1} = buckets[u, e] {{ parts[u, q] = parts[u, q] + weights[u, e] }}"
        block = f"""
          {each_vector(f"buckets[u, l] = {bucket}  {each}")}
          for e in {LANES} {{ for unroll u in {VECTORS} {{ {add} }} }}"""
        counted = f"""
          for e in {BUCKETS // LANES} {{ {each_vector(f"parts[u, {LANES}*e + l] = 0")} }}
          {self.live(block, reach)}
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

    def listed(self, key: Index, condition: str, reach: str) -> str:
        """The tokens whose key lies above `from` and within `upto`, and that meet the condition, by id."""
        entry = f"let c = count[0] {{ list[g, c] = cast(i32, dim({BLOCK}*b + e))  count[0] = dim(c) + 1 }}"
        block = f"""
          {each_lane("lanes[l] = 0")}
          {each_vector(f"hits[{FLAT}] = select({self.inside(key)}{condition}, 1, 0)  lanes[l] = lanes[l] + hits[{FLAT}]")}
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

    def cut(self, key: Index, distance: Index | None, *, nearest_first: bool) -> str:
        """Nothing beyond `nearest`, and of those at it only the first that add what is wanted."""

        def within(index: str) -> str:
            return f"{key(index)} < nearest[0] | {key(index)} == nearest[0] & dim({index}) <= last[0]"

        added = weighed_id(distance, lambda weight: f"when run[0] < wanted[0] {{ last[0] = dim(id) }}  run[0] = run[0] + {weight}")
        return f"""
          run[0] = 0
          let c = count[0] {{ for e in c {{ let id = list[g, e] {{ {added} }} }} }}
          {self.kept(within, "nearest[0] < low[g, b]" if nearest_first else "false")}"""
