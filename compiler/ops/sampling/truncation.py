"""Truncation of a row by top_k, top_p, min_p and typical_p: it selects the tokens that remain candidates.

top_k, top_p and typical_p give each token a sort key and keep the tokens with the smallest keys, but they do not sort the row. For top_p
and typical_p, a sample of blocks estimates a range of keys that should contain the key of the last token to keep. One pass over the row
sums the weights of the tokens before that range, and lists the tokens within it. These sums show whether the range contains the key of the
last token to keep. Histograms narrow the list until all its keys are equal. All sums are of integers, so the result is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from compiler.ir.dims import Dim, DimLike, ceil_div, dim_min
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, cast, const, equal, index, select
from compiler.machine.intrinsics.append import Append
from compiler.ops.sampling.row import BLOCK, BOOL, F32, I32, I64, INF, LANES, VECTORS, Read, Row, less, more, plus, share_of, whole
from compiler.sampling.meaning import FURTHEST, MEAN_BITS
from runtime.sampling import SHARE_ONE, Number, Setting

BUCKETS = 512
ROUNDS = 40  # maximum number of rounds of `narrow`; each divides the range of f32 numbers by almost BUCKETS
SPAN = 16.0  # nats that the histogram of the sampled blocks covers
SAMPLED = 256  # minimum number of blocks in a sample, unless the row has fewer
HEAVY = 1 / 12  # maximum fraction of the row's blocks in a sample because of a heavy token (one within the distance `heavy`)
STEP = 0.5  # nats between the candidates for the threshold `heavy`
SLACK = 0.01  # nats, more than the rounding error of any distance in a bucket
# The margin of a sample's estimate of `share` is share * (1 - share) * MARGIN, times 2 for top_p and times 3 for typical_p, which may drop
# heavy tokens.
MARGIN = 1 / 24
WIDER = 2.0  # width of the next range, relative to the range that missed the last token to keep
ATTEMPTS = 4


def number(value: int) -> Scalar:
    return const(value, I64)


class Truncations(Row):
    """A row and the code that truncates it."""

    stage: Dim  # 0: top_k, 1: top_p, 2: typical_p

    @property
    def stride(self) -> int:
        """Return the stride, a power of two, at which a sample includes blocks without heavy tokens."""
        return 1 << max(0, (self.blocks // SAMPLED).bit_length() - 1)

    def truncate(self, then: Callable[[], None]) -> None:
        """Apply top_k, top_p and typical_p as three iterations of one loop, and min_p before typical_p. Each iteration keeps the tokens
        nearest to `center`, up to the wanted number or weight, and finds the last token to keep in a list of candidates. `then` draws the
        token. If nothing else reads the row, the last truncation does not rewrite it: the row still has all tokens, but its sums contain
        only those for which `within` holds."""
        k = self.k

        def reach() -> Scalar:
            return self.number(Number.REACH)

        with k.scope():
            self.wanted, self.count, self.before, self.run, self.chosen, self.last = (
                k.local(name, 1, dtype=I64) for name in ("wanted", "count", "before", "run", "chosen", "last")
            )
            self.upto, self.base, self.nearest, self.furthest, self.scale, self.center = (
                k.local(name, 1) for name in ("upto", "base", "nearest", "furthest", "scale", "center")
            )
            self.near, self.histogram = k.local("near", LANES), k.local("histogram", BUCKETS, dtype=I64)
            self.pending = k.local("pending", 1, dtype=BOOL)
            self.center[0] = 0.0
            self.pending[0] = False
            with k.serial("stage", 3) as stage:
                self.stage = stage

                def asked() -> Scalar:
                    return self.arrays["settings"][self.i, int(Setting.TOP_K) + stage]

                def is_stage(n: int) -> Scalar:
                    return equal(index(stage), n)

                with k.when(is_stage(2) & (reach() < INF)):
                    self.stale[0] = True
                    self.keep(lambda at: self.own(at) <= reach(), reach)
                everything = select(is_stage(0), number(self.vocab), SHARE_ONE)
                with k.when(((asked() > 0) | (index(stage) > 0)) & (asked() < everything)):
                    with k.when(is_stage(2)):
                        self.find_mean()
                    with k.when(is_stage(0)):
                        self.list_by_number(asked)
                    with k.orelse():
                        self.list_by_weight(asked)
                    with k.when((index(stage) > 0) | (self.wanted[0] <= self.count[0])):
                        self.narrow(self.own, self.add_token)
                        self.find_last()
                        self.stale[0] = is_stage(0)
                        self.pending[0] = index(stage) > 0
                        cut_again = (reach() < INF) | (self.setting(Setting.TYPICAL_P) < SHARE_ONE)
                        with k.when(is_stage(0) | self.tells_drawn | is_stage(1) & cut_again):
                            self.pending[0] = False
                            self.upto[0] = self.center[0] + self.nearest[0] + SLACK
                            self.keep(self.within, lambda: self.upto[0])
            then()

    def off_center(self, at: DimLike) -> Scalar:
        """Return the sort key of a token: the difference between its distance and `center`."""
        return abs(self.own(at) - self.center[0])

    def add_token(self, id_: Dim, e: Dim) -> None:
        """Add the weight of token `id_` to the sums of its block and the row. The token is element `e` of the current vector."""
        with self.k.scope():
            b = self.k.let("b", index(id_) // BLOCK)
            self.sum[self.g, b] = self.sum[self.g, b] + self.weight[e]
            self.total[0] = self.total[0] + self.weight[e]

    def within(self, at: DimLike) -> Scalar:
        """Return whether a token is kept: its key is below `nearest`, or equal to `nearest` and its id is at most `last`."""
        key, nearest = self.off_center, self.nearest
        return (key(at) < nearest[0]) | equal(key(at), nearest[0]) & (index(at) <= self.last[0])

    # --- lists ---------------------------------------------------------------------------------------------------------

    def list_blocks(self, chosen: Callable[[Dim], Scalar]) -> None:
        """List the blocks for which `chosen` holds."""
        self.count[0] = 0
        with self.k.serial("b", self.blocks) as b:
            c = self.k.let("c", self.count[0])
            self.list[self.g, c] = cast(index(b), I32)
            self.count[0] = index(c) + select(chosen(b), number(1), 0)

    def list_by_number(self, wanted: Callable[[], Scalar]) -> None:
        """List the candidates for the `wanted` nearest tokens: all tokens up to a distance within which at least `wanted` blocks have a
        token, or the whole row if fewer blocks have one."""
        self.list_blocks(lambda b: self.low[self.g, b] < INF)
        self.upto[0] = INF
        self.wanted[0] = wanted()
        with self.k.when(self.wanted[0] <= self.count[0]):
            self.narrow(lambda at: self.low[self.g, at], None)
            self.upto[0] = self.nearest[0]
        self.list_tokens(lambda at: self.own(at) <= self.upto[0])
        self.wanted[0] = wanted()

    def list_by_weight(self, share: Callable[[], Scalar]) -> None:
        """List the candidates for the last token to keep: tokens are kept by ascending keys until they make up the fraction `share` of the
        total weight. If the range that the sample estimates does not contain that token, try a wider range before or after it, and at last
        the whole remaining row."""
        k, wanted = self.k, self.wanted
        with k.scope():
            self.since, self.until, width = (k.local(name, 1) for name in ("since", "until", "width"))
            self.between, self.all = k.local("between", 1, dtype=I64), k.local("all", 1, dtype=I64)
            sought = k.local("sought", 1, dtype=BOOL)
            since, until, between = self.since, self.until, self.between
            self.guess(share)
            sought[0] = True
            with k.serial("attempt", ATTEMPTS) as attempt, k.when(sought[0]):
                self.part()
                wanted[0] = share_of(self.all[0], share()) - self.total[0]
                sought[0] = (wanted[0] <= 0) | (between[0] < wanted[0])
                width[0] = select(index(attempt) < ATTEMPTS - 2, WIDER * (until[0] - since[0]), INF)
                with k.when(wanted[0] <= 0):
                    until[0] = since[0]
                    since[0] = until[0] - width[0]
                with k.when(between[0] < wanted[0]):
                    since[0] = until[0]
                    until[0] = since[0] + width[0]

    def part(self) -> None:
        """List the tokens whose keys are at least `since` and below `until`, and set `between` to their weight. Set `sum` and `total` to
        the weights of the tokens with keys below `since`, and `all` to the weight of the row."""
        k, weight, key = self.k, self.weight, self.off_center
        since, until = self.since, self.until
        with k.scope():
            every, inner = k.local("every", LANES, dtype=I64), k.local("inner", LANES, dtype=I64)
            hits = k.local("hits", VECTORS, LANES, dtype=I32)
            self.count[0] = 0
            self.clear(every, inner)
            with self.sums() as b, k.unroll("u", VECTORS) as u:
                self.weigh(lambda lane: self.own(BLOCK * b + LANES * u + lane))
                with k.vector(LANES) as lane:
                    at = BLOCK * b + LANES * u + lane
                    every[lane] = every[lane] + weight[lane]
                    self.lanes[lane] = self.lanes[lane] + select(key(at) < since[0], weight[lane], 0)
                    inner[lane] = inner[lane] + select(key(at) < until[0], weight[lane], 0)
                    hits[u, lane] = select((since[0] <= key(at)) & (key(at) < until[0]), const(1, I32), 0)
                self.append(hits, b, u)
            self.fold_lanes(every, plus)
            self.fold_lanes(inner, plus)
            self.all[0] = every[0]
            self.between[0] = inner[0] - self.total[0]

    def append(self, hits: Array, b: Dim, u: Dim) -> None:
        """Append to the list those tokens of vector `u` of block `b` for which `hits` is set."""
        self.k.tile(Append(), self.list[self.g, 0], self.count[0], hits[u, 0], dims=(BLOCK * b + LANES * u,))

    def list_tokens(self, condition: Read) -> None:
        """List the remaining tokens that meet the condition, by ascending id. Blocks whose `low` exceeds `upto` are skipped; no token in
        them may meet the condition."""
        k = self.k
        with k.scope():
            hits = k.local("hits", VECTORS, LANES, dtype=I32)
            self.count[0] = 0
            with self.live(lambda: self.upto[0]) as b, k.unroll("u", VECTORS) as u:
                with k.vector(LANES) as lane:
                    at = BLOCK * b + LANES * u + lane
                    hits[u, lane] = select(condition(at) & (self.own(at) < INF), const(1, I32), 0)
                self.append(hits, b, u)

    @contextmanager
    def each_of(self, count: Dim, read: Read) -> Generator[Dim]:
        """Loop over the first `count` entries of the list in parts of LANES entries. Set `near` to what `read` returns for the tokens of
        the part. Gathers need less code than scalar loads, whose loop LLVM would unroll."""
        k = self.k
        with k.serial("k", ceil_div(count, LANES)) as part:
            with k.vector(LANES) as lane:
                id_ = k.let("id", self.list[self.g, dim_min(LANES * part + lane, count - 1)])
                self.near[lane] = read(id_)
            yield part

    @contextmanager
    def each_id(self, count: Dim, part: Dim) -> Generator[tuple[Dim, Dim]]:
        """Loop over the tokens of part `part` of the list, which has `count` tokens. Yield each token's id and its index within the
        part."""
        with self.k.serial("e", dim_min(LANES, count - LANES * part)) as e:
            yield self.k.let("id", self.list[self.g, LANES * part + e]), e

    @contextmanager
    def each_listed(self, read: Read) -> Generator[tuple[Dim, Dim]]:
        """Loop over the whole list in parts of LANES entries. Yield the length of the list and the number of the part."""
        with self.k.scope():
            count = self.k.let("c", self.count[0])
            with self.each_of(count, read) as part:
                yield count, part

    # --- the sample ----------------------------------------------------------------------------------------------------

    def guess(self, share: Callable[[], Scalar]) -> None:
        """Set `since` and `until` to an estimated range of keys. If weights are summed by ascending keys, the sum should reach the fraction
        `share` of the total weight at a key in that range."""
        k, run, before, chosen, scale = self.k, self.run, self.before, self.chosen, self.scale

        def part() -> Scalar:
            return cast(share(), F32) * (1 / SHARE_ONE)

        with k.scope():
            goal, margin, self.heavy = k.local("goal", 1), k.local("margin", 1), k.local("heavy", 1)
            self.base[0] = 0.0
            scale[0] = BUCKETS / SPAN
            self.sample_blocks()
            self.count_sample()
            run[0] = 0
            with k.serial("q", BUCKETS) as q:
                run[0] = run[0] + self.histogram[q]
            goal[0] = cast(run[0], F32) * part()
            margin[0] = goal[0] * (1.0 - part()) * MARGIN * cast(index(self.stage + 1), F32)
            run[0] = 0
            before[0] = 0
            chosen[0] = 0
            with k.serial("q", BUCKETS) as q:
                run[0] = run[0] + self.histogram[q]
                with k.when(cast(run[0], F32) < goal[0] - margin[0]):
                    before[0] = index(q) + 1
                with k.when(cast(run[0], F32) < goal[0] + margin[0]):
                    chosen[0] = index(q) + 1
            self.since[0] = (cast(before[0], F32) - 0.5) / scale[0]
            self.until[0] = select(chosen[0] < BUCKETS - 1, (cast(chosen[0], F32) + 0.5) / scale[0], INF)

    def sample_blocks(self) -> None:
        """List the blocks that have a token within the distance `heavy`, and a sample of all other blocks. Set `heavy` to the largest
        multiple of STEP within which at most the fraction HEAVY of the blocks have a token, or to -1 if there is none."""
        k, low, g, lanes, heavy = self.k, self.low, self.g, self.lanes, self.heavy
        self.clear(lanes)
        with k.serial("b", self.blocks) as b, k.vector(LANES) as lane:
            lanes[lane] = lanes[lane] + select(low[g, b] <= cast(index(lane), F32) * STEP, number(1), 0)
        heavy[0] = -1.0
        with k.serial("l", LANES) as lane, k.when(lanes[lane] <= int(self.blocks * HEAVY)):
            heavy[0] = cast(index(lane), F32) * STEP
        self.list_blocks(lambda b: (low[g, b] < INF) & ((low[g, b] <= heavy[0]) | equal(index(b % self.stride), 0)))

    def bucket(self, key: Scalar) -> Scalar:
        """Return the bucket of a key. The last bucket also contains all larger keys."""
        scaled = (key - self.base[0]) * self.scale[0]
        return whole(select(scaled < BUCKETS - 1, scaled, BUCKETS - 1))

    def count_sample(self) -> None:
        """Compute the histogram of the weights of the listed blocks, each scaled by the number of blocks it represents. Each vector of a
        block has separate buckets, since an addition would have to wait for the previous addition to the same bucket."""
        k = self.k
        with k.scope():
            parts = k.local("parts", VECTORS, BUCKETS, dtype=I64)
            buckets, heights = k.local("buckets", VECTORS, LANES, dtype=I32), k.local("heights", VECTORS, LANES, dtype=I64)
            shift = k.local("shift", 1, dtype=I64)
            with k.serial("e", BUCKETS // LANES) as e, k.serial("u", VECTORS) as u, k.vector(LANES) as lane:
                parts[u, LANES * e + lane] = 0
            with k.scope():
                c = k.let("c", self.count[0])
                with k.serial("s", c) as s:
                    b = k.let("b", self.list[self.g, s], self.blocks - 1)
                    heavy = self.low[self.g, b] <= self.heavy[0]
                    shift[0] = select(heavy, number(0), self.stride.bit_length() - 1)
                    with self.each_weight(b) as u, k.vector(LANES) as lane:
                        buckets[u, lane] = self.bucket(self.off_center(BLOCK * b + LANES * u + lane))
                        heights[u, lane] = self.weight[lane] << shift[0]
                    with k.serial("e", LANES) as e, k.unroll("u", VECTORS) as u:
                        q = k.let("q", buckets[u, e], BUCKETS - 1)
                        parts[u, q] = parts[u, q] + heights[u, e]
            with k.serial("e", BUCKETS // LANES) as e, k.vector(LANES) as lane:
                at = LANES * e + lane
                summed: Scalar = parts[0, at]
                for v in range(1, VECTORS):
                    summed = summed + parts[v, at]
                self.histogram[at] = summed

    # --- narrowing -----------------------------------------------------------------------------------------------------

    def choose_bucket(self) -> None:
        """Find the bucket in which the cumulative weight reaches `wanted`. Subtract the weight of all buckets before it from `wanted`."""
        run, before, chosen, wanted = self.run, self.before, self.chosen, self.wanted
        run[0] = 0
        before[0] = 0
        chosen[0] = 0
        with self.k.serial("q", BUCKETS) as q:
            run[0] = run[0] + self.histogram[q]
            with self.k.when(run[0] < wanted[0]):
                before[0] = run[0]
                chosen[0] = index(q) + 1
        wanted[0] = wanted[0] - before[0]

    def find_mean(self) -> None:
        """Set `center` to the weighted mean of the distances."""
        k, lanes, weight = self.k, self.lanes, self.weight
        with k.scope():
            moments = k.local("moments", LANES, dtype=I64)
            self.clear(lanes, moments)
            with self.live() as b, self.each_weight(b) as u, k.vector(LANES) as lane:
                own = self.own(BLOCK * b + LANES * u + lane)
                near = select(own < float(FURTHEST), own, float(FURTHEST))
                moment = cast(whole(near * float(1 << MEAN_BITS)), I64)
                lanes[lane] = lanes[lane] + weight[lane]
                moments[lane] = moments[lane] + (weight[lane] * moment >> MEAN_BITS)
            self.fold_lanes(lanes, plus)
            self.fold_lanes(moments, plus)
            self.center[0] = cast(moments[0], F32) / cast(lanes[0], F32)

    def narrow(self, read: Read, each: Callable[[Dim, Dim], None] | None) -> None:
        """Set `nearest` to the key at which the weight of the list, by ascending keys, reaches `wanted`. Reduce the list to the tokens with
        this key, and `wanted` to the weight that these tokens must contribute.

        In each round, `each` is called for all tokens of the list. During the call, only tokens in buckets before the chosen bucket have
        a weight other than 0. So `each` needs no branch, which would be unpredictable.
        """
        k, weight, nearest, furthest, least = self.k, self.weight, self.nearest, self.furthest, self.least

        def key(lane: Dim) -> Scalar:
            return abs(self.near[lane] - self.center[0])

        with k.scope():
            most, buckets = k.local("most", LANES), k.local("buckets", LANES, dtype=I64)

            def sort_in() -> None:
                with k.vector(LANES) as lane:
                    buckets[lane] = cast(self.bucket(key(lane)), I64)

            def find_ends() -> None:
                with k.vector(LANES) as lane:
                    least[lane] = INF
                    most[lane] = -INF
                with self.each_listed(read), k.vector(LANES) as lane:
                    least[lane] = less(least[lane], key(lane))
                    most[lane] = more(most[lane], key(lane))
                self.fold_lanes(least, less)
                self.fold_lanes(most, more)
                nearest[0] = least[0]
                furthest[0] = most[0]

            nearest[0] = -INF
            furthest[0] = INF
            # The last iteration only finds the ends. A call before the loop would be a second copy of the code of `find_ends`.
            with k.serial("round", ROUNDS + 1) as round_, k.when(nearest[0] < furthest[0]):
                find_ends()
                with k.when((nearest[0] < furthest[0]) & (index(round_) < ROUNDS)):
                    self.base[0] = nearest[0]
                    scale = float(BUCKETS - 1) / (furthest[0] - nearest[0])
                    self.scale[0] = less(const(1e38, F32), scale)
                    with k.serial("e", BUCKETS // LANES) as e, k.vector(LANES) as lane:
                        self.histogram[LANES * e + lane] = 0
                    with self.each_listed(read) as (count, part):
                        sort_in()
                        self.weigh_near()
                        with self.each_id(count, part) as (_, e):
                            q = k.let("q", buckets[e], BUCKETS - 1)
                            self.histogram[q] = self.histogram[q] + weight[e]
                    self.choose_bucket()
                    with k.scope():
                        count = k.let("c", self.count[0])
                        self.count[0] = 0
                        with self.each_of(count, read) as part:
                            sort_in()
                            self.weigh_near()
                            with k.vector(LANES) as lane:
                                weight[lane] = select(buckets[lane] < self.chosen[0], weight[lane], 0)
                            with self.each_id(count, part) as (id_, e):
                                if each is not None:
                                    each(id_, e)
                                with k.when(equal(buckets[e], self.chosen[0])):
                                    to = k.let("to", self.count[0])
                                    self.list[self.g, to] = cast(index(id_), I32)
                                    self.count[0] = index(to) + 1

    def find_last(self) -> None:
        """Set `last` to the last token with the key `nearest` that is needed to reach `wanted`. Add the weights of the tokens up to `last`
        to the sums of their blocks and of the row."""
        self.run[0] = 0
        with self.each_listed(self.own) as (count, part):
            self.weigh_near()
            with self.each_id(count, part) as (id_, e):
                with self.k.when(self.run[0] < self.wanted[0]):
                    self.last[0] = index(id_)
                    self.add_token(id_, e)
                self.run[0] = self.run[0] + self.weight[e]

    def weigh_near(self) -> None:
        """Set `weight` to what each token in `near` contributes to `wanted`: 1 for top_k, otherwise its weight."""
        self.weigh(lambda lane: self.near[lane])
        with self.k.vector(LANES) as lane:
            self.weight[lane] = select(equal(index(self.stage), 0), number(1), self.weight[lane])
