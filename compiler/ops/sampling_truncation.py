"""Truncations of a row: which tokens stay.

None of them sorts. Where weights decide, a sample says between which keys the last token that stays should lie. Going over the row, what is
nearer is added up and what lies between is listed; the list is narrowed down by histograms until all keys in it are equal. All sums
are of integers, so the answer is exact, and they show whether the sample was right.
"""

from __future__ import annotations

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
SPAN = 16.0  # nats that the histogram of the sample tells apart
SAMPLED = 256  # blocks of a row, at least, that make a sample
HEAVY = 1 / 12  # of the blocks, at most, are in every sample, as one of their tokens is heavy
STEP = 0.5  # nats, in which it is said how heavy
SLACK = 0.01  # nats, more than the rounding of any distance that a bucket has
MARGIN = 1 / 24  # of share * (1 - share): how wrong a sample may be, times 2 for top_p, and 3 for typical_p, which drops heavy tokens
WIDER = 2.0  # times: the range beside one that was not right
ATTEMPTS = 4


class Truncations(RowText):
    @property
    def stride(self) -> int:
        """A power of two: the sample has one block of so many, beside the heavy ones."""
        return 1 << max(0, (self.blocks // SAMPLED).bit_length() - 1)

    def truncated(self, then: str) -> str:
        """top_k, top_p and typical_p are one text, gone through three times: what they keep is nearest to `center`, and comes to the
        number of tokens or the weight that is wanted. Each lists the tokens among which the last one is that stays. `then` draws: it
        may find the row as it was, with the sums of what is `within`, where nobody else needs the row."""
        asked, reach = f"settings[i, {int(Setting.TOP_K)} + stage]", self.number(Number.REACH)
        everything = f"select(dim(stage) == 0, {self.vocab}, {SHARE_ONE})"
        cut_again = f"{reach} < inf | {self.setting(Setting.TYPICAL_P)} < {SHARE_ONE}"
        cut = f"""
          center[0] = 0.0  pending[0] = false
          for stage in 3 {{
            when dim(stage) == 2 & {reach} < inf {{
              stale[0] = true
              {self.kept(lambda index: f"distance[g, {index}] <= {reach}", reach)}
            }}
            when (0 < {asked} | 0 < dim(stage)) & {asked} < {everything} {{
              when dim(stage) == 2 {{ {self.mean()} }}
              when dim(stage) == 0 {{ {self.listed_by_number(asked)} }} else {{ {self.listed_by_weight(asked)} }}
              when 0 < dim(stage) | wanted[0] <= count[0] {{
                {self.narrowed(self.own, self.added)}
                {self.last()}
                stale[0] = dim(stage) == 0
                pending[0] = 0 < dim(stage)
                when dim(stage) == 0 | {self.tells_drawn} | dim(stage) == 1 & ({cut_again}) {{
                  pending[0] = false
                  upto[0] = center[0] + nearest[0] + {SLACK}
                  {self.kept(self.within, "upto[0]")}
                }}
              }}
            }}
          }}
          {then}"""
        numbers = [f"{name}: i64[1]" for name in ("wanted", "count", "before", "run", "chosen", "last")]
        reals = [f"{name}: f32[1]" for name in ("upto", "base", "nearest", "furthest", "scale", "center")]
        return with_locals(cut, *numbers, *reals, f"near: f32[{LANES}]", f"histogram: i64[{BUCKETS}]", "pending: bool[1]")

    def off_center(self, index: str) -> str:
        return f"abs({self.own(index)} - center[0])"

    @property
    def added(self) -> str:
        """The token `id`, number `e` of those at hand, belongs to the sums by its weight."""
        return f"let b = dim(id) // {BLOCK} {{ sum[g, b] = sum[g, b] + weight[e]  total[0] = total[0] + weight[e] }}"

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
            {self.narrowed(lambda index: f"low[g, {index}]")}
            upto[0] = nearest[0]
          }}
          {self.listed(f"{self.own(HERE)} <= upto[0]")}
          wanted[0] = {number}"""

    def listed_by_weight(self, share: str) -> str:
        """The tokens among which the smallest keys come to this share of all weights. Should that not be where the sample has it, it is
        before or behind: there a wider range is gone through, and at last all that is left."""
        found = f"""
          {self.guessed(share)}
          sought[0] = true
          for attempt in {ATTEMPTS} {{ when sought[0] {{
            {self.parted()}
            wanted[0] = {share_of("all[0]", share)} - total[0]
            sought[0] = wanted[0] <= 0 | between[0] < wanted[0]
            width[0] = select(dim(attempt) < {ATTEMPTS - 2}, {WIDER} * (until[0] - since[0]), inf)
            when wanted[0] <= 0 {{ until[0] = since[0]  since[0] = until[0] - width[0] }}
            when between[0] < wanted[0] {{ since[0] = until[0]  until[0] = since[0] + width[0] }}
          }} }}"""
        return with_locals(found, "since: f32[1]", "until: f32[1]", "width: f32[1]", "between: i64[1]", "all: i64[1]", "sought: bool[1]")

    def parted(self) -> str:
        """The list: tokens with keys from `since` to before `until`, which weigh `between`; sums: of those before them, `total` together;
        all: the weight of the row."""
        key = self.off_center(HERE)
        added = each_lane(f"""
          every[l] = every[l] + weight[l]
          lanes[l] = lanes[l] + select({key} < since[0], weight[l], 0)
          inner[l] = inner[l] + select({key} < until[0], weight[l], 0)
          hits[u, l] = select(since[0] <= {key} & {key} < until[0], 1:i32, 0:i32)""")
        listed = f'{weighed(self.own(HERE))} {added} tile "append"(list[g, 0], count[0], hits[u, 0]) dims({BLOCK}*b + {LANES}*u)'
        parted = f"""
          count[0] = 0
          {each_lane("every[l] = 0  inner[l] = 0")}
          {self.sums(f"for unroll u in {VECTORS} {{ {listed} }}")}
          {folded("every", plus)}
          {folded("inner", plus)}
          all[0] = every[0]  between[0] = inner[0] - total[0]"""
        return with_locals(parted, f"every: i64[{LANES}]", f"inner: i64[{LANES}]", f"hits: i32[{VECTORS}, {LANES}]")

    def guessed(self, share: str) -> str:
        """since, until: keys between which the smallest ones should come to this share of all weights."""
        part = f"(cast(f32, {share}) * {1 / SHARE_ONE})"
        guessed = f"""
          base[0] = 0.0  scale[0] = {BUCKETS / SPAN}
          {self.sampled_blocks()}
          {self.counted()}
          run[0] = 0
          for q in {BUCKETS} {{ run[0] = run[0] + histogram[q] }}
          goal[0] = cast(f32, run[0]) * {part}
          margin[0] = goal[0] * (1.0 - {part}) * {MARGIN} * cast(f32, dim(stage + 1))
          run[0] = 0  before[0] = 0  chosen[0] = 0
          for q in {BUCKETS} {{
            run[0] = run[0] + histogram[q]
            when cast(f32, run[0]) < goal[0] - margin[0] {{ before[0] = dim(q) + 1 }}
            when cast(f32, run[0]) < goal[0] + margin[0] {{ chosen[0] = dim(q) + 1 }}
          }}
          since[0] = (cast(f32, before[0]) - 0.5) / scale[0]
          until[0] = select(chosen[0] < {BUCKETS - 1}, (cast(f32, chosen[0]) + 0.5) / scale[0], inf)"""
        return with_locals(guessed, "goal: f32[1]", "margin: f32[1]", "heavy: f32[1]")

    def sampled_blocks(self) -> str:
        """The list: blocks with a token nearer than `heavy`, and some of the others."""
        near = f"low[g, b] <= cast(f32, dim(l)) * {STEP}"
        return f"""
          {each_lane("lanes[l] = 0")}
          for b in {self.blocks} {{ {each_lane(f"lanes[l] = lanes[l] + select({near}, 1, 0)")} }}
          heavy[0] = -1.0
          for l in {LANES} {{ when lanes[l] <= {int(self.blocks * HEAVY)} {{ heavy[0] = cast(f32, dim(l)) * {STEP} }} }}
          count[0] = 0
          for b in {self.blocks} {{ let c = count[0] {{
            list[g, c] = cast(i32, dim(b))
            count[0] = dim(c) + select(low[g, b] < inf & (low[g, b] <= heavy[0] | dim(b % {self.stride}) == 0), 1, 0)
          }} }}"""

    def bucket(self, key: str) -> str:
        return whole(less(f"{BUCKETS - 1}.0", f"({key} - base[0]) * scale[0]"))

    def counted(self) -> str:
        """The histogram of the weights of the blocks in the list, each of which stands for as many as it was taken from. An addition to
        what was just written has to wait for it: each vector of a block has buckets of its own."""
        sorted_in = each_lane(f"buckets[u, l] = {self.bucket(self.off_center(HERE))}  heights[u, l] = weight[l] << shift[0]")
        parts = " + ".join(f"parts[{v}, {LANES}*e + l]" for v in range(VECTORS))
        add = f"let q within 0..{BUCKETS - 1} = buckets[u, e] {{ parts[u, q] = parts[u, q] + heights[u, e] }}"
        counted = f"""
          for e in {BUCKETS // LANES} {{ {each_vector(f"parts[u, {LANES}*e + l] = 0")} }}
          let c = count[0] {{ for s in c {{ let b within 0..{self.blocks - 1} = list[g, s] {{
            shift[0] = select(low[g, b] <= heavy[0], 0, {self.stride.bit_length() - 1})
            {self.each_weight(sorted_in)}
            for e in {LANES} {{ for unroll u in {VECTORS} {{ {add} }} }}
          }} }} }}
          for e in {BUCKETS // LANES} {{ {each_lane(f"histogram[{LANES}*e + l] = {parts}")} }}"""
        shape = f"{VECTORS}, {LANES}"
        return with_locals(
            counted, f"parts: i64[{VECTORS}, {BUCKETS}]", f"buckets: i32[{shape}]", f"heights: i64[{shape}]", "shift: i64[1]"
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
        each = each_lane(f"lanes[l] = lanes[l] + weight[l]  moments[l] = moments[l] + ((weight[l] * {moment}) >> {MEAN_BITS})")
        means = f"""
          {each_lane("lanes[l] = 0  moments[l] = 0")}
          {self.live(self.each_weight(each))}
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

    def narrowed(self, own: Index, each: str = "") -> str:
        """nearest: the key with which the list, by ascending keys, comes to weigh `wanted`; the list: those with this key; wanted: what
        they have to add. `each` is done with all of a round; only those in buckets before the chosen one, which stay, have a weight then: a
        branch in its place could not be foretold."""
        key = "abs(near[l] - center[0])"
        sorted_in = each_lane(f"buckets[l] = cast(i64, {self.bucket(key)})")
        counted = f"let q within 0..{BUCKETS - 1} = buckets[e] {{ histogram[q] = histogram[q] + weight[e] }}"
        staying = each_lane("weight[l] = select(buckets[l] < chosen[0], weight[l], 0)")
        kept = "let to = count[0] { list[g, to] = cast(i32, dim(id))  count[0] = dim(to) + 1 }"
        ends = f"""
          {each_lane("least[l] = inf  most[l] = -inf")}
          {self.each_listed(own, each_lane(f"least[l] = {less('least[l]', key)}  most[l] = {more('most[l]', key)}"))}
          {folded("least", less)}
          {folded("most", more)}
          nearest[0] = least[0]  furthest[0] = most[0]"""
        narrowed = f"""
          {ends}
          for round in {ROUNDS} {{ when nearest[0] < furthest[0] {{
            base[0] = nearest[0]
            scale[0] = {less("1e38", f"{BUCKETS - 1}.0 / (furthest[0] - nearest[0])")}
            {self.emptied()}
            {self.each_listed(own, f"{sorted_in}  {self.weighed_near}", counted)}
            {self.chosen()}
            let c = count[0] {{
              count[0] = 0
              {self.each_of("c", own, f"{sorted_in}  {self.weighed_near}  {staying}", f"{each} when buckets[e] == chosen[0] {{ {kept} }}")}
            }}
            {ends}
          }} }}"""
        return with_locals(narrowed, f"most: f32[{LANES}]", f"buckets: i64[{LANES}]")

    def last(self) -> str:
        """Of the tokens at `nearest`, the last that it takes to add what is wanted."""
        added = f"when run[0] < wanted[0] {{ last[0] = dim(id)  {self.added} }}  run[0] = run[0] + weight[e]"
        return f"run[0] = 0\n{self.each_listed(self.own, self.weighed_near, added)}"

    def each_listed(self, own: Index, prepared: str, body: str = "") -> str:
        """`body` for each `id` of the list, as number `e` of LANES whose elements are in `near`, with which `prepared` is done at once."""
        return f"let c = count[0] {{ {self.each_of('c', own, prepared, body)} }}"

    def each_of(self, count: str, own: Index, prepared: str, body: str) -> str:
        each = f"for e in min({LANES}, {count} - {LANES}*k) {{ let id = list[g, {LANES}*k + e] {{ {body} }} }}" if body else ""
        return f"""
          for k in ({count} + {LANES - 1}) // {LANES} {{
            for e in {LANES} {{ let id = list[g, min({LANES}*k + e, {count} - 1)] {{ near[e] = {own("id")} }} }}
            {prepared}
            {each}
          }}"""

    @property
    def weighed_near(self) -> str:
        """What each of the tokens `near` adds to what is wanted."""
        return weighed("near[l]") + each_lane("weight[l] = select(dim(stage) == 0, 1, weight[l])")
