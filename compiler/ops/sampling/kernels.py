"""The loop nests of the sampling operators."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.dims import Dim
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.statements import Stmt
from compiler.ir.loops.write import Array, cast, const, equal, index, minimum, not_equal, select
from compiler.ops.index import clamped_index
from compiler.ops.sampling.row import BLOCK, BOOL, F32, I32, I64, INF, LANES, plus
from compiler.ops.sampling.truncation import Truncations, number
from compiler.sampling.philox import MULTIPLIERS, NUM_ROUNDS, WEYL
from runtime.sampling import NOT_A_NUMBER, NOTHING_LEFT, NUM_TOP, Number, Setting

WORD = 2**32 - 1
ONE = const(1.0, F32)


def sample_nest(operands: Mapping[str, Buffer], outputs: Mapping[str, Buffer]) -> Stmt:
    """Return the nest of `sample`. Operands and outputs are given by name."""
    row = _Sampling(operands, outputs)
    with row.each_row(listing=True):
        row.sample()
    return row.k.body()


def logprobs_nest(operands: Mapping[str, Buffer], outputs: Mapping[str, Buffer]) -> Stmt:
    """Return the nest of `token_logprobs`. Operands and outputs are given by name."""
    row = _Sampling(operands, outputs)
    with row.each_row(listing=False):
        row.rank_given()
    return row.k.body()


class _Sampling(Truncations):
    """Writes the code that samples one row, or ranks the given token of one row."""

    def sample(self) -> None:
        """Draw a token and report the requested log-probabilities. If the row, after bias, penalties and mask, has a NaN or
        positive infinity, or if no token may be drawn, write NOT_A_NUMBER or NOTHING_LEFT in place of the token."""
        k, i, arrays = self.k, self.i, self.arrays
        self.report_nothing()
        self.adjusted = k.local("adjusted", 1, dtype=BOOL)
        biased, seen = (arrays[f"{name}_starts"] for name in ("bias", "seen"))
        self.adjusted[0] = (self.setting(Setting.MASK) >= 0) | (biased[i] < biased[i + 1]) | (seen[i] < seen[i + 1])
        with k.when(self.adjusted[0]):
            self.adjust()
            self.find_best(self.own)
        with k.orelse():
            self.find_best(self.raw)
        tokens = arrays["tokens"]
        with k.when((self.bad[0] > 0) | equal(self.best[0], INF)):
            tokens[i] = NOT_A_NUMBER
        with k.orelse():
            with k.when(equal(self.best[0], -INF)):
                tokens[i] = NOTHING_LEFT
            with k.orelse():
                self.draw_and_report()

    def rank_given(self) -> None:
        """Report the rank of the given token, its distance (how much its logit is below the largest logit), and the most probable
        tokens."""
        self.report_nothing()
        token = clamped_index(self.k, "token", self.arrays["tokens"][self.i], Dim.of(self.vocab))
        self.find_best(self.raw)
        self.measure(self.raw, lambda: ONE)
        self.report(token, cast(self.arrays["tops"][self.i], I64))

    def draw_and_report(self) -> None:
        """Draw a token, or choose the best token if the sharpness (1 / temperature) is 0. Report log-probabilities if they are
        requested."""

        k, tokens = self.k, self.arrays["tokens"]

        def sharpness() -> Load:
            return self.number(Number.SHARPNESS)

        def safe_sharpness() -> Scalar:
            return select(equal(sharpness(), 0.0), ONE, sharpness())

        tokens[self.i] = cast(self.first[0], I32)
        with k.when(not_equal(sharpness(), 0.0) | self.tells_drawn):
            with k.when(self.adjusted[0]):
                self.measure(self.own, safe_sharpness)
            with k.orelse():
                self.measure(self.raw, safe_sharpness)
        with k.when(not_equal(sharpness(), 0.0)):
            self.truncate(self.draw)
        with k.when(self.setting(Setting.TOP) >= 0):
            with k.when(not_equal(self.setting(Setting.PROCESSED), 1)):
                with k.when(self.adjusted[0]):
                    self.find_best(self.raw)
                self.measure(self.raw, lambda: ONE)
            token = k.let("token", tokens[self.i])
            self.report(token, self.setting(Setting.TOP))

    # --- drawing a token -----------------------------------------------------------------------------------------------

    def draw(self) -> None:
        """Draw the first token at which the cumulative weight exceeds a random fraction of the total weight."""
        k, run, before, chosen = self.k, self.run, self.before, self.chosen
        with k.scope():
            random = k.local("random", 1, dtype=I64)
            self.sum_weights()
            self.write_random(random)
            run[0] = 0
            before[0] = 0
            chosen[0] = 0
            with k.serial("b", self.blocks) as b:
                run[0] = run[0] + self.sum[self.g, b]
                with k.when(run[0] <= random[0]):
                    before[0] = run[0]
                    chosen[0] = index(b) + 1
            b = clamped_index(k, "b", chosen[0], Dim.of(self.blocks))  # if all weights are 0, `chosen` is beyond the last block
            with k.when(self.pending[0]), self.each_vector(b) as (_, _, at):
                self.distance[self.g, at] = select(self.within(at), self.own(at), INF)
            run[0] = before[0]
            chosen[0] = 0
            with self.each_weight(b) as u, k.serial("e", LANES) as e:
                run[0] = run[0] + self.weight[e]
                with k.when(run[0] <= random[0]):
                    chosen[0] = index(LANES * u + e) + 1
            self.arrays["tokens"][self.i] = cast(minimum(index(BLOCK * b) + chosen[0], self.vocab - 1), I32)

    def write_random(self, random: Array) -> None:
        """Write a random integer below the total weight: (53 random bits * total weight) / 2^53. The product is computed in parts that stay
        below 2^63."""
        k, total = self.k, self.total
        with k.scope():
            counter, key, part = (k.local(name, size, dtype=I64) for name, size in (("counter", 4), ("key", 2), ("part", 2)))
            words = [(self.setting(c) >> shift) & WORD for c in (Setting.POSITION, Setting.SEED) for shift in (0, 32)]
            for n, word in enumerate((words[0], words[1], self.setting(Setting.CHOICE))):
                counter[n] = word
            counter[3] = 0
            key[0] = words[2]
            key[1] = words[3]
            with k.serial("round", NUM_ROUNDS):
                part[0] = counter[0] * MULTIPLIERS[0]
                part[1] = counter[2] * MULTIPLIERS[1]
                counter[0] = (part[1] >> 32 & WORD) ^ counter[1] ^ key[0]
                counter[1] = part[1] & WORD
                counter[2] = (part[0] >> 32 & WORD) ^ counter[3] ^ key[1]
                counter[3] = part[0] & WORD
                key[0] = key[0] + WEYL[0] & WORD
                key[1] = key[1] + WEYL[1] & WORD
            random[0] = counter[0] << 21 ^ counter[1] >> 11
            part[0] = random[0] >> 27
            part[1] = random[0] & 2**27 - 1
            key[0] = total[0] >> 31
            key[1] = total[0] & 2**31 - 1
            random[0] = part[0] * key[0] * 32 + (part[0] * key[1] + part[1] * key[0] * 16 + (part[1] * key[1] >> 27) >> 26)

    # --- reporting log-probabilities -----------------------------------------------------------------------------------

    def report_nothing(self) -> None:
        """Fill the outputs of the row with the values that mark a row without requested log-probabilities."""
        arrays, i = self.arrays, self.i
        for name in ("distances", "totals", "ranks"):
            arrays[name][i] = 0
        with self.k.serial("e", NUM_TOP) as e:
            arrays["top_ids"][i, e] = -1
            arrays["top_distances"][i, e] = 0.0

    def report(self, token: Dim, num_top: Scalar) -> None:
        """Report the rank and the distance (compiler/sampling/meaning.py) of `token`, and the `num_top` most probable tokens. Each of these
        tokens is deleted from the row; nothing reads the row afterwards."""
        k, g, i, low, arrays = self.k, self.g, self.i, self.low, self.arrays
        with k.scope():
            own, rest, chosen = k.local("own", 1), k.local("rest", 1), k.local("chosen", 1, dtype=I64)
            self.sum_weights()
            own[0] = self.own(token)
            self.clear(self.lanes)
            with self.live(lambda: own[0]) as b, self.each_vector(b) as (_, lane, at):
                tied = equal(self.own(at), own[0]) & (index(at) < index(token)) & (own[0] < INF)
                self.lanes[lane] = self.lanes[lane] + select((self.own(at) < own[0]) | tied, number(1), 0)
            self.fold_lanes(self.lanes, plus)
            arrays["distances"][i] = own[0]
            arrays["totals"][i] = self.total[0]
            arrays["ranks"][i] = cast(self.lanes[0] + 1, I32)
            top = clamped_index(k, "top", num_top, Dim.of(NUM_TOP + 1))
            with k.serial("at", top) as at:
                own[0] = INF
                chosen[0] = 0
                with k.serial("b", self.blocks) as b, k.when(low[g, b] < own[0]):
                    own[0] = low[g, b]
                    chosen[0] = index(b)
                with k.when(own[0] < INF):
                    b = k.let("b", chosen[0], self.blocks - 1)
                    low[g, b] = INF
                    rest[0] = INF
                    with k.serial("e", BLOCK) as e:
                        with k.when(equal(self.own(BLOCK * b + e), own[0]) & equal(low[g, b], INF)):
                            arrays["top_ids"][i, at] = cast(index(BLOCK * b + e), I32)
                            arrays["top_distances"][i, at] = own[0]
                            low[g, b] = own[0]
                            self.distance[g, BLOCK * b + e] = INF
                        rest[0] = select(self.own(BLOCK * b + e) < rest[0], self.own(BLOCK * b + e), rest[0])
                    low[g, b] = rest[0]
