"""Pieces of the loop nests of sampling, as text of the loop level, and what all stages of a row do.

`distance` holds the row, in blocks of BLOCK tokens, the last one filled up with infinitely far ones; `low` has the smallest of each
block, so that what is far is skipped unread: a block whose low is infinite holds nothing any more, and its distances mean nothing.
`sum` has the weight of each block.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.sampling import (
    LOG2_E,
    MANTISSA_BITS,
    POWER,
    ROUND,
    SHARE_BITS,
    SHARE_ONE,
    TWO,
    WEIGHT_BITS,
    Number,
    Setting,
)

LANES = 16
VECTORS = 4
BLOCK = VECTORS * LANES
FLAT = f"{LANES}*u + l"  # a lane of a block
HERE = f"{BLOCK}*b + {FLAT}"

SCALE_BITS = 24  # of the tile that makes weights
BEYOND = 48.0  # powers of two that are told apart: all weights from 41 on are 0

Index = Callable[[str], str]  # the row's element at an index


def with_locals(body: str, *buffers: str) -> str:
    """The body with numbers of its own around it, each written `name: type[extents]`."""
    for buffer in reversed(buffers):
        body = f"alloc local {buffer} {{\n{body}\n}}"
    return body


def each_lane(body: str) -> str:
    return f"for vector l in {LANES} {{\n{body}\n}}"


def each_vector(body: str) -> str:
    """For each lane of each vector of a block."""
    return f"for u in {VECTORS} {{ {each_lane(body)} }}"


def folded(buffer: str, combine: Callable[[str, str], str]) -> str:
    """Lanes folded into lane 0."""
    steps: list[str] = []
    half = LANES // 2
    while half:
        steps.append(f"for vector l in {half} {{ {buffer}[l] = {combine(f'{buffer}[l]', f'{buffer}[l + {half}]')} }}")
        half //= 2
    return "\n".join(steps)


def plus(a: str, b: str) -> str:
    return f"{a} + {b}"


def less(a: str, b: str) -> str:
    return f"select({b} < {a}, {b}, {a})"


def more(a: str, b: str) -> str:
    return f"select({a} < {b}, {b}, {a})"


def weighed(distance: str) -> str:
    """weight: `runtime.sampling.weigh` of a distance, step by step, in each lane. The tile shifts 6 bits further up than that, and so down:
    as much as is added to what rounds, which leaves an integer as even as it was."""
    fraction = f"{POWER[-1]:.20f}"
    for coefficient in (*reversed(POWER[:-1]), 1.0):
        fraction = f"({fraction} * power[l] + {coefficient:.20f})"
    base = ROUND + SCALE_BITS - (WEIGHT_BITS - MANTISSA_BITS)
    steps = f"""
      power[l] = {distance} * {LOG2_E:.20f}
      power[l] = {less(f"{BEYOND}", "power[l]")}
      rounded[l] = power[l] + {base}
      power[l] = power[l] - (rounded[l] - {base})
      mantissa[l] = {fraction} + {TWO}"""
    return f'{each_lane(steps)}\ntile "shift"(weight[0], mantissa[0], rounded[0])'


def bits_beyond(number: str, base: float) -> str:
    return f"(bits({number}) - bits({base}))"


def whole(number: str) -> str:
    """A number in 0 .. 2^23 as the nearest i32."""
    return bits_beyond(f"{number} + {ROUND}", ROUND)


def share_of(total: str, share: str) -> str:
    """At least 1, of products that fit 64 bits."""
    low = SHARE_ONE - 1
    part = f"(({total} >> {SHARE_BITS}) * {share} + ((({total} & {low}) * {share}) >> {SHARE_BITS}))"
    return f"max(1, {part})"


class RowText:
    """Text about one row: row `g` of the work space, row `i` of what is asked, row `source` of the logits."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.blocks = -(-vocab // BLOCK)

    # --- elements ------------------------------------------------------------------------------------------------------

    def number(self, column: Number) -> str:
        return f"numbers[i, {int(column)}]"

    def setting(self, column: Setting) -> str:
        return f"settings[i, {int(column)}]"

    @property
    def tells_drawn(self) -> str:
        """Whether what was drawn from will be told."""
        return f"0 <= {self.setting(Setting.TOP)} & {self.setting(Setting.PROCESSED)} == 1"

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

    def adjusted(self) -> str:
        """The row's own logits: biased, penalised, masked."""
        value = self.own("id")
        penalty = f"({self.number(Number.FREQUENCY)} * cast(f32, seen_counts[start + e]) + {self.number(Number.PRESENCE)})"
        copied = self.each_block(lambda at: each_vector(f"{self.own(HERE)} = {at(HERE)}"), self.raw)
        word = f"masks[mask, min({BLOCK // 32}*b + u // 2, {-(-self.vocab // 32) - 1})]"
        bit = f"({word} >> cast(i32, dim({LANES}*(u % 2) + l))) & 1:i32"
        masked = each_vector(f"{self.own(HERE)} = select(({bit}) == 1:i32, {self.own(HERE)}, -inf)")
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
              top[u, l] = {more("top[u, l]", x)}"""

        spread = f"""
          highs[{FLAT}] = top[u, l]
          places[{FLAT}] = cast(i64, place[u, l]) * {BLOCK} + dim({FLAT})
          bads[{FLAT}] = nans[u, l]"""
        folded = f"""
          {each_vector("top[u, l] = -inf  place[u, l] = 0:i32  nans[u, l] = 0:i32")}
          {self.each_block(lambda at: each_vector(seen(at)), at)}
          {each_vector(spread)}
          best[0] = -inf  first[0] = 0  bad[0] = 0
          for e in {BLOCK} {{
            bad[0] = bad[0] + cast(i64, bads[e])
            when best[0] < highs[e] | best[0] == highs[e] & places[e] < first[0] {{ best[0] = highs[e]  first[0] = places[e] }}
          }}"""
        vectors = [f"{name}: {kind}[{VECTORS}, {LANES}]" for name, kind in (("top", "f32"), ("place", "i32"), ("nans", "i32"))]
        numbers = [f"{name}: {kind}[{BLOCK}]" for name, kind in (("highs", "f32"), ("places", "i64"), ("bads", "i32"))]
        return with_locals(folded, *vectors, *numbers)

    def measured(self, sharpness: str) -> str:
        """Logits become distances."""
        return f"""
          when adjusted[0] {{ {self.measured_from(self.own, sharpness)} }}
          else {{ {self.measured_from(self.raw, sharpness)} }}"""

    def measured_from(self, at: Index, sharpness: str) -> str:
        return "stale[0] = true\n" + self.each_block(lambda at: self.renewed(f"(best[0] - {at(HERE)}) * {sharpness}"), at)

    def renewed(self, value: str) -> str:
        """Other distances in block `b`, and its low."""
        each = f"{self.own(HERE)} = {value}  least[l] = {less('least[l]', self.own(HERE))}"
        return f"{each_lane('least[l] = inf')}\n{each_vector(each)}\n{folded('least', less)}\nlow[g, b] = least[0]"

    def summed(self) -> str:
        """The weight of each block, and of all, where they are not known already."""
        added = self.each_weight(each_lane("lanes[l] = lanes[l] + weight[l]"))
        return f"when stale[0] {{ {self.sums(added)} }}"

    def each_weight(self, body: str) -> str:
        """`body` for each vector of block `b`, of which `weight` is known."""
        return f"for u in {VECTORS} {{ {weighed(self.own(HERE))} {body} }}"

    def sums(self, body: str) -> str:
        """`body` adds the weights of block `b` to `lanes`."""
        block = f"""
          {each_lane("lanes[l] = 0")}
          {body}
          {folded("lanes", plus)}
          sum[g, b] = lanes[0]  total[0] = total[0] + lanes[0]"""
        return f"total[0] = 0  stale[0] = false\nfor b in {self.blocks} {{ sum[g, b] = 0 }}\n{self.live(block)}"

    def kept(self, condition: Index, reach: str) -> str:
        """Only what the condition keeps, of each index: nothing beyond `reach`."""
        kept = self.renewed(self.own_if(condition))
        return self.live(f"when {reach} < low[g, b] {{ low[g, b] = inf }} else {{ {kept} }}")

    def own_if(self, condition: Index) -> str:
        return f"select({condition(HERE)}, {self.own(HERE)}, inf)"
