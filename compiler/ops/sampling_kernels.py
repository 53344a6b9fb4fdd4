"""The loop nests of sampling, as text of the loop level: a row is worked on by one thread, in memory that stays in its cache. There is
work space for GROUPS rows, taken in turn by those to sample."""

from __future__ import annotations

from compiler.ops.sampling_text import BLOCK, HERE, LANES, each_lane, each_vector, folded, less, plus, with_locals
from compiler.ops.sampling_truncation import Truncations
from runtime.philox import MULTIPLIERS, NUM_ROUNDS, WEYL
from runtime.sampling import NOT_A_NUMBER, NOTHING_LEFT, NUM_TOP, Number, Setting

GROUPS = 16
WORD = 2**32 - 1


def sample_text(vocab: int) -> str:
    return _Kernels(vocab).sample()


def judge_text(vocab: int) -> str:
    return _Kernels(vocab).judge()


class _Kernels(Truncations):
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
        told = f"{self.measured_from(self.raw, '1.0')} {self.judged('cast(i64, tops[i])')}"
        judged = f"let token = tokens[i] {{ {self.extreme(self.raw)} {told} }}"
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
        integers = (f"{name}: i64[{LANES}]" for name in ("lanes", "weight"))
        lanes = (*integers, *(f"{name}: f32[{LANES}]" for name in ("least", "power", "rounded", "mantissa")))
        text = f"""
          for parallel g in min(n, {GROUPS}) {{
            for turn in (n - g + {GROUPS - 1}) // {GROUPS} {{
              let i = dim(g + {GROUPS} * turn) {{
                let source = rows[i] {{
                  {with_locals(body, "best: f32[1]", "first: i64[1]", "bad: i64[1]", "total: i64[1]", "stale: bool[1]", *lanes)}
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
        sharpness = self.number(Number.SHARPNESS)
        drawn = f"""
          tokens[i] = cast(i32, first[0])
          when {sharpness} != 0.0 | {self.tells_drawn} {{ {self.measured(f"select({sharpness} == 0.0, 1.0, {sharpness})")} }}
          when {sharpness} != 0.0 {{ {self.truncated(self.drawn())} }}
          when 0 <= {self.setting(Setting.TOP)} {{
            when {self.setting(Setting.PROCESSED)} != 1 {{
              when adjusted[0] {{ {self.extreme(self.raw)} }}
              {self.measured_from(self.raw, "1.0")}
            }}
            let token = tokens[i] {{ {self.judged(self.setting(Setting.TOP))} }}
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

    # --- the draw ------------------------------------------------------------------------------------------------------

    def drawn(self) -> str:
        """The first token up to which the weights add up to more than a random share of all of them."""
        taken = f"""
          for e in {LANES} {{
            run[0] = run[0] + weight[e]
            when run[0] <= random[0] {{ chosen[0] = dim({LANES}*u + e) + 1 }}
          }}"""
        found = f"""
          {self.summed()}
          {self.random()}
          run[0] = 0  before[0] = 0  chosen[0] = 0
          for b in {self.blocks} {{
            run[0] = run[0] + sum[g, b]
            when run[0] <= random[0] {{ before[0] = run[0]  chosen[0] = dim(b) + 1 }}
          }}
          let b within 0..{self.blocks - 1} = chosen[0] {{
            when pending[0] {{ {each_vector(f"{self.own(HERE)} = {self.own_if(self.within)}")} }}
            run[0] = before[0]  chosen[0] = 0
            {self.each_weight(taken)}
            tokens[i] = cast(i32, dim({BLOCK}*b) + chosen[0])
          }}"""
        return with_locals(found, "random: i64[1]")

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
        return with_locals(rounds, "counter: i64[4]", "key: i64[2]", "part: i64[2]")

    # --- what is told --------------------------------------------------------------------------------------------------

    def nothing_told(self) -> str:
        return f"""
          distances[i] = 0.0  totals[i] = 0  ranks[i] = 0:i32
          for e in {NUM_TOP} {{ top_ids[i, e] = -1:i32  top_distances[i, e] = 0.0 }}"""

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
            rest[0] = {less("rest[0]", f"distance[g, {BLOCK}*b + e]")}
          }}
          low[g, b] = rest[0]"""
        told = f"""
          {self.summed()}
          own[0] = distance[g, token]
          {each_lane("lanes[l] = 0")}
          {self.live(each_vector(nearer), "own[0]")}
          {folded("lanes", plus)}
          distances[i] = own[0]  totals[i] = total[0]  ranks[i] = cast(i32, lanes[0] + 1)
          let top within 0..{NUM_TOP} = {num_top} {{ for at in top {{
            own[0] = inf  chosen[0] = 0
            for b in {self.blocks} {{ when low[g, b] < own[0] {{ own[0] = low[g, b]  chosen[0] = dim(b) }} }}
            when own[0] < inf {{ let b within 0..{self.blocks - 1} = chosen[0] {{ {taken} }} }}
          }} }}"""
        return with_locals(told, "own: f32[1]", "rest: f32[1]", "chosen: i64[1]")
