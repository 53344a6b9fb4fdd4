"""The loop nests of sampling, as text of the loop level: a row is worked on by one thread, in memory that stays in its cache.

`distance` holds the row, in blocks of BLOCK tokens, the last one filled up with infinitely far ones; `low` has the smallest of each
block, so that what is far is skipped unread: a block whose low is infinite holds nothing any more, and its distances mean nothing.
`sum` has the weight of each block, `list` the tokens that a truncation still has to choose between. There are GROUPS of such rows,
taken in turn by the rows to sample.

A truncation never sorts. It finds a distance that bounds the answer, lists the tokens up to there, and narrows the list down: a
histogram of the weights between the smallest and the largest key says in which of its BUCKETS the answer lies, and what lies there is
the next list, until all keys in it are equal. All sums are of integers, so the answer is exact.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.philox import MULTIPLIERS, NUM_ROUNDS, WEYL
from runtime.sampling import (
    FURTHEST,
    LOG2_E,
    MANTISSA_BITS,
    MEAN_BITS,
    NOT_A_NUMBER,
    NOTHING_LEFT,
    NUM_TOP,
    POWER,
    SHARE_BITS,
    SHARE_ONE,
    WEIGHT_BITS,
    Number,
    Setting,
)

LANES = 16
VECTORS = 4
BLOCK = VECTORS * LANES
GROUPS = 16
BUCKETS = 256
ROUNDS = 40  # of narrowing: each divides the range of f32 numbers by almost BUCKETS
BOUNDS = 4  # of a truncation by mass: 4, 8 and 16 nats, then none
WORD = 2**32 - 1
HERE = f"{BLOCK}*b + {LANES}*u + l"  # a lane of block `b`

Index = Callable[[str], str]  # the row's element at an index


def sample_text(vocab: int) -> str:
    return _Row(vocab).sample()


def judge_text(vocab: int) -> str:
    return _Row(vocab).judge()


# --- pieces of text ----------------------------------------------------------------------------------------------------


def _locals(body: str, *buffers: str) -> str:
    """The body with numbers of its own around it, each written `name: type[extents]`."""
    for buffer in reversed(buffers):
        body = f"alloc local {buffer} {{\n{body}\n}}"
    return body


def _lanes(body: str) -> str:
    return f"for vector l in {LANES} {{\n{body}\n}}"


def _block(body: str) -> str:
    """For each lane of each vector of a block."""
    return f"for unroll u in {VECTORS} {{ {_lanes(body)} }}"


def _halves(buffer: str, combine: Callable[[str, str], str]) -> str:
    """Lanes folded into lane 0."""
    steps: list[str] = []
    half = LANES // 2
    while half:
        steps.append(f"for vector l in {half} {{ {buffer}[l] = {combine(f'{buffer}[l]', f'{buffer}[l + {half}]')} }}")
        half //= 2
    return "\n".join(steps)


def _plus(a: str, b: str) -> str:
    return f"{a} + {b}"


def _less(a: str, b: str) -> str:
    return f"select({b} < {a}, {b}, {a})"


def _more(a: str, b: str) -> str:
    return f"select({a} < {b}, {b}, {a})"


def _of(distance: Index | None, use: Callable[[str], str]) -> str:
    """`use` of what the token `id` weighs: 1 where no distance is given."""
    return use("1") if distance is None else _weighed(distance("id"), use)


def _weighed(distance: str, use: Callable[[str], str], lane: str = "0") -> str:
    """`use` of the weight of a distance: `runtime.sampling.weigh`, step by step."""
    fraction = f"{POWER[-1]:.20f}"
    for coefficient in (*reversed(POWER[:-1]), 1.0):
        fraction = f"({fraction} * power[{lane}] + {coefficient:.20f})"
    mantissa = f"cast(i64, cast(i32, {fraction} * {float(1 << MANTISSA_BITS)}))"
    weight = f"(({mantissa} << {WEIGHT_BITS - MANTISSA_BITS}) >> cast(i64, cast(i32, whole[{lane}])))"
    return f"""
      power[{lane}] = {distance} * {LOG2_E:.20f}
      power[{lane}] = select(power[{lane}] < {FURTHEST}, power[{lane}], {FURTHEST})
      whole[{lane}] = floor(power[{lane}])
      power[{lane}] = power[{lane}] - whole[{lane}]
      {use(weight)}"""


def _share(total: str, share: str) -> str:
    """At least 1, of products that fit 64 bits."""
    low = SHARE_ONE - 1
    part = f"(({total} >> {SHARE_BITS}) * {share} + ((({total} & {low}) * {share}) >> {SHARE_BITS}))"
    return f"max(1, {part})"


class _Row:
    """Text about one row: row `g` of the work space, row `i` of what is asked, row `source` of the logits."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.blocks = -(-vocab // BLOCK)

    # --- functions -----------------------------------------------------------------------------------------------------

    def sample(self) -> str:
        words = -(-self.vocab // 32)
        lists = (
            "bias_starts: i32[n + 1], bias_ids: i32[biased], bias_values: f32[biased], "
            "seen_starts: i32[n + 1], seen_ids: i32[seen], seen_counts: i32[seen]"
        )
        return f"""prim sample(logits: f32[r, {self.vocab}], rows: i32[n], numbers: f32[n, {len(Number)}], settings: i64[n, {len(Setting)}],
          {lists}, masks: i32[masked, {words}], out tokens: i32[n], {self.told}) {{
          {self.groups(self.sampled(), listing=True)}
        }}"""

    def judge(self) -> str:
        judged = f"let token = tokens[i] {{ {self.judged_raw('cast(i64, tops[i])')} }}"
        return f"""prim judge(logits: f32[r, {self.vocab}], rows: i32[n], tokens: i32[n], tops: i32[n], {self.told}) {{
          {self.groups(self.nothing_told() + judged, listing=False)}
        }}"""

    @property
    def told(self) -> str:
        return (
            "out distances: f32[n], out totals: i64[n], out ranks: i32[n], "
            f"out top_ids: i32[n, {NUM_TOP}], out top_distances: f32[n, {NUM_TOP}]"
        )

    def groups(self, body: str, *, listing: bool) -> str:
        lanes = (f"{name}: {kind}[{LANES}]" for name, kind in (("lanes", "i64"), ("least", "f32"), ("power", "f32"), ("whole", "f32")))
        text = f"""
          for parallel g in min(n, {GROUPS}) {{
            for turn in (n - g + {GROUPS - 1}) // {GROUPS} {{
              let i = dim(g + {GROUPS} * turn) {{
                let source = rows[i] {{
                  {_locals(body, "best: f32[1]", "first: i64[1]", "bad: i64[1]", "total: i64[1]", *lanes)}
                }}
              }}
            }}
          }}"""
        buffers = [
            f"distance: f32[{GROUPS}, {self.blocks * BLOCK}]",
            f"low: f32[{GROUPS}, {self.blocks}]",
            f"sum: i64[{GROUPS}, {self.blocks}]",
        ]
        if listing:
            buffers.append(f"list: i32[{GROUPS}, {self.blocks * BLOCK}]")
        for buffer in reversed(buffers):
            text = f"alloc global {buffer} {{\n{text}\n}}"
        return text

    def sampled(self) -> str:
        adjusting = f"0 <= {self.setting(Setting.MASK)} | bias_starts[i] < bias_starts[i + 1] | seen_starts[i] < seen_starts[i + 1]"
        drawn = f"""
          tokens[i] = cast(i32, first[0])
          when {self.number(Number.SHARPNESS)} == 0.0 {{
            when 0 <= {self.setting(Setting.TOP)} & {self.setting(Setting.PROCESSED)} == 1 {{ {self.measured("1.0")} }}
          }} else {{
            {self.measured(self.number(Number.SHARPNESS))}
            {self.truncated()}
            {self.drawn()}
          }}
          when 0 <= {self.setting(Setting.TOP)} {{
            let token = tokens[i] {{
              when {self.setting(Setting.PROCESSED)} == 1 {{ {self.judged(self.setting(Setting.TOP))} }}
              else {{ {self.judged_raw(self.setting(Setting.TOP))} }}
            }}
          }}"""
        return f"""
          {self.nothing_told()}
          alloc local adjusted: bool[1] {{
            adjusted[0] = {adjusting}
            when adjusted[0] {{
              {self.adjusted()}
              {self.extreme(self.own)}
            }} else {{ {self.extreme(self.raw)} }}
            when 0 < bad[0] | best[0] == inf {{ tokens[i] = {NOT_A_NUMBER}:i32 }}
            else {{ when best[0] == -inf {{ tokens[i] = {NOTHING_LEFT}:i32 }} else {{ {drawn} }} }}
          }}"""

    # --- elements ------------------------------------------------------------------------------------------------------

    def number(self, column: Number) -> str:
        return f"numbers[i, {int(column)}]"

    def setting(self, column: Setting) -> str:
        return f"settings[i, {int(column)}]"

    def raw(self, index: str) -> str:
        return f"logits[source, {index}]"

    def own(self, index: str) -> str:
        return f"distance[g, {index}]"

    def each_block(self, body: Callable[[Index], str], at: Index) -> str:
        """Blocks `b` of the row; of the logits, the last one may end early."""
        full = self.vocab // BLOCK if at == self.raw else self.blocks
        text = f"for b in {full} {{\n{body(at)}\n}}" if full else ""
        if full == self.blocks:
            return text

        def filled(index: str) -> str:
            return f"guard(0 <= {index} < {self.vocab} ? {at(index)} : -inf)"

        return f"{text}\nlet b = {full} {{\n{body(filled)}\n}}"

    def live(self, body: str, reach: str = "") -> str:
        """Blocks that hold a token, within this distance where one is given."""
        condition = f"low[g, b] <= {reach} & low[g, b] < inf" if reach else "low[g, b] < inf"
        return f"for b in {self.blocks} {{ when {condition} {{\n{body}\n}} }}"

    # --- stages --------------------------------------------------------------------------------------------------------

    def nothing_told(self) -> str:
        return f"""
          distances[i] = 0.0  totals[i] = 0  ranks[i] = 0:i32
          for e in {NUM_TOP} {{ top_ids[i, e] = -1:i32  top_distances[i, e] = 0.0 }}"""

    def adjusted(self) -> str:
        """The row's own logits: biased, penalised, masked."""
        value = self.own("id")
        penalty = f"({self.number(Number.FREQUENCY)} * cast(f32, seen_counts[start + e]) + {self.number(Number.PRESENCE)})"
        copied = self.each_block(lambda at: _block(f"{self.own(HERE)} = {at(HERE)}"), self.raw)
        word = f"masks[mask, min({BLOCK // 32}*b + u // 2, {-(-self.vocab // 32) - 1})]"
        bit = f"({word} >> cast(i32, dim({LANES}*(u % 2) + l))) & 1:i32"
        masked = _block(f"{self.own(HERE)} = select(({bit}) == 1:i32, {self.own(HERE)}, -inf)")
        return f"""
          {copied}
          let start = bias_starts[i] {{ let end = bias_starts[i + 1] {{ for e in end - start {{
            let id = bias_ids[start + e] {{ {value} = {value} + bias_values[start + e] }}
          }} }} }}
          let start = seen_starts[i] {{ let end = seen_starts[i + 1] {{ for e in end - start {{
            let id = seen_ids[start + e] {{
              {value} = select(0.0 < {value}, {value} / {self.number(Number.REPETITION)}, {value} * {self.number(Number.REPETITION)})
              when 0:i32 < seen_counts[start + e] {{ {value} = {value} - {penalty} }}
            }}
          }} }} }}
          when 0 <= {self.setting(Setting.MASK)} {{
            let mask = {self.setting(Setting.MASK)} {{ for b in {self.blocks} {{ {masked} }} }}
          }}"""

    def extreme(self, at: Index) -> str:
        """best: the highest logit, first: where it stands first, bad: whether there is a NaN."""

        def seen(at: Index) -> str:
            x = at(HERE)
            return f"""
              place[u, l] = select(top[u, l] < {x}, cast(i32, dim(b)), place[u, l])
              nans[u, l] = select({x} == {x}, nans[u, l], 1:i32)
              top[u, l] = {_more("top[u, l]", x)}"""

        flat = f"{LANES}*u + l"
        spread = f"""
          highs[{flat}] = top[u, l]
          places[{flat}] = cast(i64, place[u, l]) * {BLOCK} + dim({flat})
          bads[{flat}] = nans[u, l]"""
        folded = f"""
          {_block("top[u, l] = -inf  place[u, l] = 0:i32  nans[u, l] = 0:i32")}
          {self.each_block(lambda at: _block(seen(at)), at)}
          {_block(spread)}
          best[0] = -inf  first[0] = 0  bad[0] = 0
          for e in {BLOCK} {{
            bad[0] = bad[0] + cast(i64, bads[e])
            when best[0] < highs[e] | best[0] == highs[e] & places[e] < first[0] {{ best[0] = highs[e]  first[0] = places[e] }}
          }}"""
        vectors = [f"{name}: {kind}[{VECTORS}, {LANES}]" for name, kind in (("top", "f32"), ("place", "i32"), ("nans", "i32"))]
        numbers = [f"{name}: {kind}[{BLOCK}]" for name, kind in (("highs", "f32"), ("places", "i64"), ("bads", "i32"))]
        return _locals(folded, *vectors, *numbers)

    def measured(self, sharpness: str) -> str:
        """Logits become distances."""
        return f"""
          when adjusted[0] {{ {self.measured_from(self.own, sharpness)} }}
          else {{ {self.measured_from(self.raw, sharpness)} }}"""

    def measured_from(self, at: Index, sharpness: str) -> str:
        return self.each_block(lambda at: self.renewed(f"(best[0] - {at(HERE)}) * {sharpness}"), at)

    def renewed(self, value: str) -> str:
        """Other distances in block `b`, and its low."""
        each = f"{self.own(HERE)} = {value}  least[l] = {_less('least[l]', self.own(HERE))}"
        return f"{_lanes('least[l] = inf')}\n{_block(each)}\n{_halves('least', _less)}\nlow[g, b] = least[0]"

    def summed(self) -> str:
        """The weight of each block, and of all."""
        each = _weighed(self.own(HERE), lambda weight: f"lanes[l] = lanes[l] + {weight}", "l")
        block = f"{_lanes('lanes[l] = 0')}\n{_block(each)}\n{_halves('lanes', _plus)}\nsum[g, b] = lanes[0]\ntotal[0] = total[0] + lanes[0]"
        return f"total[0] = 0\nfor b in {self.blocks} {{ sum[g, b] = 0 }}\n{self.live(block)}"

    def kept(self, condition: Index, skipped: str = "false") -> str:
        """Only what the condition keeps, of each index; a block that is `skipped` goes unread."""
        kept = self.renewed(f"select({condition(HERE)}, {self.own(HERE)}, inf)")
        return self.live(f"when {skipped} {{ low[g, b] = inf }} else {{ {kept} }}")

    # --- truncations ---------------------------------------------------------------------------------------------------

    def truncated(self) -> str:
        top_k, top_p, typical_p = (self.setting(s) for s in (Setting.TOP_K, Setting.TOP_P, Setting.TYPICAL_P))
        reach = self.number(Number.REACH)
        cut = f"""
          when 0 < {top_k} & {top_k} < {self.vocab} {{ {self.top_k(top_k)} }}
          when {top_p} < {SHARE_ONE} {{
            {self.summed()}
            wanted[0] = {_share("total[0]", top_p)}
            {self.by_mass(self.own, 2.0, nearest_first=True)}
          }}
          when {reach} < inf {{ {self.kept(lambda index: f"distance[g, {index}] <= {reach}")} }}
          when {typical_p} < {SHARE_ONE} {{
            {self.mean()}
            wanted[0] = {_share("total[0]", typical_p)}
            {self.by_mass(lambda index: f"abs(distance[g, {index}] - mean[0])", 0.5, nearest_first=False)}
          }}"""
        numbers = [f"{name}: i64[1]" for name in ("wanted", "count", "before", "run", "chosen", "last")]
        reals = [f"{name}: f32[1]" for name in ("from", "upto", "base", "nearest", "furthest", "scale", "mean")]
        return _locals(cut, *numbers, *reals, f"histogram: i64[{BUCKETS}]")

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
          {self.listed(self.own, nearest_first=True)}
          wanted[0] = {top_k}
          when {top_k} <= count[0] {{
            {self.narrowed(self.own, None)}
            {self.cut(self.own, None, nearest_first=True)}
          }}"""

    def by_mass(self, key: Index, bound: float, *, nearest_first: bool) -> str:
        """Keep the smallest keys that together weigh `wanted`. Bounds are tried one by one, each twice the last."""
        each = _weighed(self.own(HERE), lambda weight: f"lanes[l] = lanes[l] + select({key(HERE)} <= upto[0], {weight}, 0)", "l")
        mass = self.live(_block(each), "upto[0]" if nearest_first else "")
        return f"""
          run[0] = 0  upto[0] = {bound}  from[0] = -1.0
          for e in {BOUNDS} {{ when run[0] < wanted[0] {{
            before[0] = run[0]
            from[0] = select(0 < dim(e), upto[0], -1.0)
            upto[0] = select(dim(e) < {BOUNDS - 1}, upto[0] * 2.0, inf)
            {_lanes("lanes[l] = 0")}
            {mass}
            {_halves("lanes", _plus)}
            run[0] = lanes[0]
          }} }}
          wanted[0] = wanted[0] - before[0]
          {self.listed(key, nearest_first=nearest_first)}
          {self.narrowed(key, self.own)}
          {self.cut(key, self.own, nearest_first=nearest_first)}"""

    def mean(self) -> str:
        """The total weight, and the mean distance by weight."""

        near = _less(f"{FURTHEST}", self.own(HERE))
        moment = f"cast(i64, cast(i32, {near} * {float(1 << MEAN_BITS)}))"
        each = _weighed(
            self.own(HERE),
            lambda weight: f"lanes[l] = lanes[l] + {weight}  moments[l] = moments[l] + (({weight} * {moment}) >> {MEAN_BITS})",
            "l",
        )
        means = f"""
          {_lanes("lanes[l] = 0  moments[l] = 0")}
          {self.live(_block(each))}
          {_halves("lanes", _plus)}
          {_halves("moments", _plus)}
          total[0] = lanes[0]
          mean[0] = cast(f32, moments[0]) / cast(f32, lanes[0])"""
        return _locals(means, f"moments: i64[{LANES}]")

    def listed(self, key: Index, *, nearest_first: bool) -> str:
        """The tokens whose key lies above `from` and within `upto`, by id."""
        here = f"{BLOCK}*b + e"
        inside = f"from[0] < {key(here)} & {key(here)} <= upto[0] & distance[g, {here}] < inf"
        entry = f"""for e in {BLOCK} {{ let c = count[0] {{
          list[g, c] = cast(i32, dim({here}))
          count[0] = dim(c) + select({inside}, 1, 0)
        }} }}"""
        return f"count[0] = 0\n{self.live(entry, 'upto[0]' if nearest_first else '')}"

    def narrowed(self, key: Index, distance: Index | None) -> str:
        """nearest: the key with which the list, by ascending keys, comes to weigh `wanted`; the list: those with this key; wanted: what
        they have to add. Entries weigh 1 where no distance is given."""
        bucket = f"cast(i64, {_less(f'{BUCKETS - 1}.0', '(' + key('id') + ' - base[0]) * scale[0]')})"
        counted = _of(distance, lambda weight: f"histogram[q] = histogram[q] + {weight}")
        ends = f"""
          nearest[0] = {_less("nearest[0]", key("id"))}
          furthest[0] = {_more("furthest[0]", key("id"))}"""
        return f"""
          nearest[0] = inf  furthest[0] = -inf
          let c = count[0] {{ for e in c {{ let id = list[g, e] {{ {ends} }} }} }}
          for round in {ROUNDS} {{ when nearest[0] < furthest[0] {{
            base[0] = nearest[0]
            scale[0] = {_less("1e38", f"{BUCKETS - 1}.0 / (furthest[0] - nearest[0])")}
            for e in {BUCKETS // LANES} {{ {_lanes(f"histogram[{LANES}*e + l] = 0")} }}
            let c = count[0] {{
              for e in c {{ let id = list[g, e] {{ let q within 0..{BUCKETS - 1} = {bucket} {{ {counted} }} }} }}
              run[0] = 0  before[0] = 0  chosen[0] = 0
              for q in {BUCKETS} {{
                run[0] = run[0] + histogram[q]
                when run[0] < wanted[0] {{ before[0] = run[0]  chosen[0] = dim(q) + 1 }}
              }}
              wanted[0] = wanted[0] - before[0]
              count[0] = 0  nearest[0] = inf  furthest[0] = -inf
              for e in c {{ let id = list[g, e] {{ when {bucket} == chosen[0] {{
                let to = count[0] {{ list[g, to] = cast(i32, dim(id))  count[0] = dim(to) + 1 }}
                {ends}
              }} }} }}
            }}
          }} }}"""

    def cut(self, key: Index, distance: Index | None, *, nearest_first: bool) -> str:
        """Nothing beyond `nearest`, and of those at it only the first that add what is wanted."""

        def within(index: str) -> str:
            return f"{key(index)} < nearest[0] | {key(index)} == nearest[0] & dim({index}) <= last[0]"

        added = _of(distance, lambda weight: f"when run[0] < wanted[0] {{ last[0] = dim(id) }}  run[0] = run[0] + {weight}")
        return f"""
          run[0] = 0
          let c = count[0] {{ for e in c {{ let id = list[g, e] {{ {added} }} }} }}
          {self.kept(within, "nearest[0] < low[g, b]" if nearest_first else "false")}"""

    # --- the draw ------------------------------------------------------------------------------------------------------

    def drawn(self) -> str:
        """The first token up to which the weights add up to more than a random share of all of them."""
        found = f"""
          {self.summed()}
          {self.random()}
          run[0] = 0  before[0] = 0  chosen[0] = 0
          for b in {self.blocks} {{
            run[0] = run[0] + sum[g, b]
            when run[0] <= random[0] {{ before[0] = run[0]  chosen[0] = dim(b) + 1 }}
          }}
          let b within 0..{self.blocks - 1} = chosen[0] {{
            run[0] = before[0]  chosen[0] = 0
            for e in {BLOCK} {{
              {_weighed(f"distance[g, {BLOCK}*b + e]", lambda weight: f"run[0] = run[0] + {weight}")}
              when run[0] <= random[0] {{ chosen[0] = dim(e) + 1 }}
            }}
            tokens[i] = cast(i32, dim({BLOCK}*b) + chosen[0])
          }}"""
        return _locals(found, *(f"{name}: i64[1]" for name in ("run", "before", "chosen", "random")))

    def random(self) -> str:
        """Below the total, by a product of 53 random bits and the total, taken apart so that no part passes 2^63."""
        words = [f"(({self.setting(column)} >> {shift}) & {WORD})" for column in (Setting.POSITION, Setting.SEED) for shift in (0, 32)]
        rounds = f"""
          counter[0] = {words[0]}  counter[1] = {words[1]}  counter[2] = {self.setting(Setting.CHOICE)}  counter[3] = 0
          key[0] = {words[2]}  key[1] = {words[3]}
          for round in {NUM_ROUNDS} {{
            part[0] = counter[0] * {MULTIPLIERS[0]}  part[1] = counter[2] * {MULTIPLIERS[1]}
            counter[0] = (((part[1] >> 32) & {WORD}) ^ counter[1]) ^ key[0]  counter[1] = part[1] & {WORD}
            counter[2] = (((part[0] >> 32) & {WORD}) ^ counter[3]) ^ key[1]  counter[3] = part[0] & {WORD}
            key[0] = (key[0] + {WEYL[0]}) & {WORD}  key[1] = (key[1] + {WEYL[1]}) & {WORD}
          }}
          random[0] = (counter[0] << 21) ^ (counter[1] >> 11)
          part[0] = random[0] >> 27  part[1] = random[0] & {2**27 - 1}
          key[0] = total[0] >> 31  key[1] = total[0] & {2**31 - 1}
          random[0] = part[0] * key[0] * 32 + ((part[0] * key[1] + part[1] * key[0] * 16 + ((part[1] * key[1]) >> 27)) >> 26)"""
        return _locals(rounds, "counter: i64[4]", "key: i64[2]", "part: i64[2]")

    # --- what is told --------------------------------------------------------------------------------------------------

    def judged_raw(self, num_top: str) -> str:
        """Of the logits as they came."""
        return f"{self.extreme(self.raw)}\n{self.measured_from(self.raw, '1.0')}\n{self.judged(num_top)}"

    def judged(self, num_top: str) -> str:
        """About `token`. Alternatives are taken out of the row one by one, as nothing needs it any more."""

        here = self.own(HERE)
        ahead = f"{here} < own[0] | {here} == own[0] & dim({HERE}) < dim(token) & own[0] < inf"
        nearer = f"lanes[l] = lanes[l] + select({ahead}, 1, 0)"
        taken = f"""
          low[g, b] = inf  rest[0] = inf
          for e in {BLOCK} {{
            when distance[g, {BLOCK}*b + e] == own[0] & low[g, b] == inf {{
              top_ids[i, at] = cast(i32, dim({BLOCK}*b + e))  top_distances[i, at] = own[0]
              low[g, b] = own[0]  distance[g, {BLOCK}*b + e] = inf
            }}
            rest[0] = {_less("rest[0]", f"distance[g, {BLOCK}*b + e]")}
          }}
          low[g, b] = rest[0]"""
        told = f"""
          {self.summed()}
          own[0] = distance[g, token]
          {_lanes("lanes[l] = 0")}
          {self.live(_block(nearer), "own[0]")}
          {_halves("lanes", _plus)}
          distances[i] = own[0]  totals[i] = total[0]  ranks[i] = cast(i32, lanes[0] + 1)
          let top within 0..{NUM_TOP} = {num_top} {{ for at in top {{
            own[0] = inf  chosen[0] = 0
            for b in {self.blocks} {{ when low[g, b] < own[0] {{ own[0] = low[g, b]  chosen[0] = dim(b) }} }}
            when own[0] < inf {{ let b within 0..{self.blocks - 1} = chosen[0] {{ {taken} }} }}
          }} }}"""
        return _locals(told, "own: f32[1]", "rest: f32[1]", "chosen: i64[1]")
