"""Truncations of a row: which tokens stay.

None of them sorts. Where weights decide, a sample estimates between which keys the last token that stays should lie. One pass over the row
adds up what is nearer and lists what lies between; histograms narrow the list down until all keys in it are equal. All sums are of
integers, so the answer is exact, and they show whether the estimate was right.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from compiler.ir.dims import Dim, DimLike, ceil_div, dim_min
from compiler.ir.loops.scalars import Scalar
from compiler.ir.loops.write import Array, cast, const, equal, index, select
from compiler.machine.intrinsics.append import Append
from compiler.ops.sampling.meaning import FURTHEST, MEAN_BITS
from compiler.ops.sampling.row import BLOCK, BOOL, F32, I32, I64, INF, LANES, VECTORS, Read, Row, less, more, plus, share_of, whole
from runtime.sampling import SHARE_ONE, Number, Setting

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


def number(value: int) -> Scalar:
    return const(value, I64)


class Truncations(Row):
    stage: Dim

    @property
    def stride(self) -> int:
        """A power of two: the sample has one block of so many, beside the heavy ones."""
        return 1 << max(0, (self.blocks // SAMPLED).bit_length() - 1)

    def truncate(self, then: Callable[[], None]) -> None:
        """top_k, top_p and typical_p are three iterations of one loop: each keeps the tokens nearest to `center`, up to the number of
        tokens or the weight that is wanted. Each lists the tokens among which the last one is that stays. `then` draws: it may find the
        row as it was, with the sums of what is `within`, where nothing else reads the row."""
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
        return abs(self.own(at) - self.center[0])

    def add_token(self, id_: Dim, e: Dim) -> None:
        """Token `id_`, number `e` of those at hand, belongs to the sums by its weight."""
        with self.k.scope():
            b = self.k.let("b", index(id_) // BLOCK)
            self.sum[self.g, b] = self.sum[self.g, b] + self.weight[e]
            self.total[0] = self.total[0] + self.weight[e]

    def within(self, at: DimLike) -> Scalar:
        """Nothing beyond `nearest`, and nothing at it behind the last."""
        key, nearest = self.off_center, self.nearest
        return (key(at) < nearest[0]) | equal(key(at), nearest[0]) & (index(at) <= self.last[0])

    # --- lists ---------------------------------------------------------------------------------------------------------

    def list_blocks(self, chosen: Callable[[Dim], Scalar]) -> None:
        self.count[0] = 0
        with self.k.serial("b", self.blocks) as b:
            c = self.k.let("c", self.count[0])
            self.list[self.g, c] = cast(index(b), I32)
            self.count[0] = index(c) + select(chosen(b), number(1), 0)

    def list_by_number(self, wanted: Callable[[], Scalar]) -> None:
        """As many blocks as there are tokens wanted have their low within some distance: none wanted lies beyond it."""
        self.list_blocks(lambda b: self.low[self.g, b] < INF)
        self.upto[0] = INF
        self.wanted[0] = wanted()
        with self.k.when(self.wanted[0] <= self.count[0]):
            self.narrow(lambda at: self.low[self.g, at], None)
            self.upto[0] = self.nearest[0]
        self.list_tokens(lambda at: self.own(at) <= self.upto[0])
        self.wanted[0] = wanted()

    def list_by_weight(self, share: Callable[[], Scalar]) -> None:
        """The tokens among which the smallest keys come to this share of all weights. Should that not be where the sample has it, it is
        before or behind: there a wider range is gone through, and at last all that is left."""
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
        """The list: tokens with keys from `since` to before `until`, which weigh `between`; sums: of those before them, `total` together;
        all: the weight of the row."""
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
        """The tokens of a vector that are hits go to the list."""
        self.k.tile(Append(), self.list[self.g, 0], self.count[0], hits[u, 0], dims=(BLOCK * b + LANES * u,))

    def list_tokens(self, condition: Read) -> None:
        """The tokens that meet the condition, by id; none of them is in a block whose low lies beyond `upto`."""
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
        """Parts of a list of so many, with the elements of LANES of them in `near`."""
        k = self.k
        with k.serial("k", ceil_div(count, LANES)) as part:
            with k.serial("e", LANES) as e:
                id_ = k.let("id", self.list[self.g, dim_min(LANES * part + e, count - 1)])
                self.near[e] = read(id_)
            yield part

    @contextmanager
    def each_id(self, count: Dim, part: Dim) -> Generator[tuple[Dim, Dim]]:
        """Each token of such a part, and its number there."""
        with self.k.serial("e", dim_min(LANES, count - LANES * part)) as e:
            yield self.k.let("id", self.list[self.g, LANES * part + e]), e

    @contextmanager
    def each_listed(self, read: Read) -> Generator[tuple[Dim, Dim]]:
        """Parts of the list: its length, and the number of the part."""
        with self.k.scope():
            count = self.k.let("c", self.count[0])
            with self.each_of(count, read) as part:
                yield count, part

    # --- the sample ----------------------------------------------------------------------------------------------------

    def guess(self, share: Callable[[], Scalar]) -> None:
        """since, until: keys between which the smallest ones should come to this share of all weights."""
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
        """The list: blocks with a token nearer than `heavy`, and some of the others."""
        k, low, g, lanes, heavy = self.k, self.low, self.g, self.lanes, self.heavy
        self.clear(lanes)
        with k.serial("b", self.blocks) as b, k.vector(LANES) as lane:
            lanes[lane] = lanes[lane] + select(low[g, b] <= cast(index(lane), F32) * STEP, number(1), 0)
        heavy[0] = -1.0
        with k.serial("l", LANES) as lane, k.when(lanes[lane] <= int(self.blocks * HEAVY)):
            heavy[0] = cast(index(lane), F32) * STEP
        self.list_blocks(lambda b: (low[g, b] < INF) & ((low[g, b] <= heavy[0]) | equal(index(b % self.stride), 0)))

    def bucket(self, key: Scalar) -> Scalar:
        scaled = (key - self.base[0]) * self.scale[0]
        return whole(select(scaled < BUCKETS - 1, scaled, BUCKETS - 1))

    def count_sample(self) -> None:
        """The histogram of the weights of the blocks in the list, each of which stands for as many as it was taken from. An addition to
        what was just written has to wait for it: each vector of a block has buckets of its own."""
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
        """The bucket in which the weights come to `wanted`, which becomes what this bucket has to add."""
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
        """center: the mean distance, by weight."""
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
        """nearest: the key with which the list, by ascending keys, comes to weigh `wanted`; the list: those with this key; wanted: what
        they have to add. `each` is done with all of a round; only those in buckets before the chosen one, which stay, have a weight then: a
        branch in its place could not be predicted."""
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

            find_ends()
            with k.serial("round", ROUNDS), k.when(nearest[0] < furthest[0]):
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
                find_ends()

    def find_last(self) -> None:
        """Of the tokens at `nearest`, the last that it takes to add what is wanted."""
        self.run[0] = 0
        with self.each_listed(self.own) as (count, part):
            self.weigh_near()
            with self.each_id(count, part) as (id_, e):
                with self.k.when(self.run[0] < self.wanted[0]):
                    self.last[0] = index(id_)
                    self.add_token(id_, e)
                self.run[0] = self.run[0] + self.weight[e]

    def weigh_near(self) -> None:
        """What each of the tokens `near` adds to what is wanted."""
        self.weigh(lambda lane: self.near[lane])
        with self.k.vector(LANES) as lane:
            self.weight[lane] = select(equal(index(self.stage), 0), number(1), self.weight[lane])
