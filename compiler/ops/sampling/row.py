"""Operations on a row of logits that all stages of sampling share.

The distance of a token is how far its logit is below the row's largest logit, times the sharpness (1 / temperature). `distance` has the
distances of a row, in blocks of BLOCK tokens; the last block is padded with infinite distances. `low` has the smallest distance of each
block, so that a block without near tokens can be skipped without reading its distances. A block whose `low` is infinite has no tokens left,
and its distances are undefined. `sum` has the weight of each block.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from compiler.ir.dims import Dim, DimLike, ceil_div, dim_min
from compiler.ir.dtypes import DType
from compiler.ir.loops.buffers import Buffer
from compiler.ir.loops.scalars import Load, Scalar
from compiler.ir.loops.write import Array, Kernel, bits_of, cast, const, equal, guard, halvings, index, maximum, select
from compiler.machine.intrinsics.shift import Shift
from compiler.ops.index import clamped_index
from compiler.sampling.meaning import LOG2_E, MANTISSA_BITS, POWER, ROUND, TWO
from runtime.sampling import SHARE_BITS, SHARE_ONE, WEIGHT_BITS, Number, Setting

GROUPS = 16  # number of rows that have workspace at the same time
LANES = 16
VECTORS = 4
BLOCK = VECTORS * LANES

SCALE_BITS = 24  # the `Shift` tile multiplies mantissas by 2^SCALE_BITS
BEYOND = 48.0  # limit to which a distance, in powers of two, is clamped; from a distance of 41 on, the weight is 0
INF = float("inf")

F32, I32, I64, BOOL = DType.F32, DType.I32, DType.I64, DType.BOOL

Read = Callable[[DimLike], Scalar]  # index -> element of the row


def less(a: Scalar, b: Scalar) -> Scalar:
    """Return the smaller number, or `a` if one is NaN."""
    return select(b < a, b, a)


def more(a: Scalar, b: Scalar) -> Scalar:
    """Return the larger number, or `a` if one is NaN."""
    return select(a < b, b, a)


def plus(a: Scalar, b: Scalar) -> Scalar:
    return a + b


def whole(number: Scalar) -> Scalar:
    """Round a number in 0 .. 2^23 to the nearest integer, an i32."""
    return bits_of(number + float(ROUND)) - bits_of(const(float(ROUND), F32))


def share_of(total: Scalar, share: Scalar) -> Scalar:
    """Return the fraction `share` of `total`, but at least 1. `share` is in units of 2^-SHARE_BITS. No product exceeds 64 bits."""
    return maximum(const(1, I64), (total >> SHARE_BITS) * share + ((total & (SHARE_ONE - 1)) * share >> SHARE_BITS))


class Row:
    """A row of logits and its workspace: row `g` of the workspace, row `i` of the operands, row `source` of the logits. One thread
    processes a row, so the row stays in the cache of this thread's core."""

    g: Dim
    i: Dim
    source: Dim

    def __init__(self, operands: Mapping[str, Buffer], outputs: Mapping[str, Buffer]) -> None:
        self.k = k = Kernel()
        self.arrays = {name: k.array(buffer) for name, buffer in (*operands.items(), *outputs.items())}
        self.vocab = self.arrays["logits"].shape[1].const
        self.blocks = -(-self.vocab // BLOCK)

    @contextmanager
    def each_row(self, *, listing: bool) -> Generator[None]:
        """Loop over the rows. The workspace has room for GROUPS rows and is reused for later rows. With `listing`, the workspace includes
        `list`, which truncation needs."""
        k = self.k
        self.distance = k.workspace("distance", GROUPS, self.blocks * BLOCK)
        self.low = k.workspace("low", GROUPS, self.blocks)
        self.sum = k.workspace("sum", GROUPS, self.blocks, dtype=I64)
        if listing:
            self.list = k.workspace("list", GROUPS, self.blocks * BLOCK, dtype=I32)
        rows = self.arrays["rows"]
        count = rows.shape[0]
        with k.parallel("g", dim_min(count, GROUPS)) as self.g, k.serial("turn", ceil_div(count - self.g, GROUPS)) as turn:
            self.i = k.let("i", index(self.g + GROUPS * turn))
            self.source = clamped_index(k, "source", rows[self.i], self.arrays["logits"].shape[0])
            self.best = k.local("best", 1)
            self.first, self.bad, self.total = (k.local(name, 1, dtype=I64) for name in ("first", "bad", "total"))
            self.stale = k.local("stale", 1, dtype=BOOL)
            self.lanes, self.weight = (k.local(name, LANES, dtype=I64) for name in ("lanes", "weight"))
            self.least, self.power, self.rounded, self.mantissa = (k.local(n, LANES) for n in ("least", "power", "rounded", "mantissa"))
            yield

    # --- elements ------------------------------------------------------------------------------------------------------

    def number(self, column: Number) -> Load:
        return self.arrays["numbers"][self.i, int(column)]

    def setting(self, column: Setting) -> Load:
        return self.arrays["settings"][self.i, int(column)]

    @property
    def tells_drawn(self) -> Scalar:
        """Return whether log-probabilities are reported under the distribution from which the token is drawn."""
        return (self.setting(Setting.TOP) >= 0) & equal(self.setting(Setting.PROCESSED), 1)

    def raw(self, at: DimLike) -> Scalar:
        """Return an element of the logits as they were given."""
        return self.arrays["logits"][self.source, at]

    def own(self, at: DimLike) -> Scalar:
        """Return an element of `distance`: a distance, or an adjusted logit before distances are measured."""
        return self.distance[self.g, at]

    # --- loops ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def each_vector(self, b: Dim) -> Generator[tuple[Dim, Dim, Dim]]:
        """Loop over the vectors of a block and their lanes. Yield the index of the vector, the lane, and the id of the lane's token."""
        with self.k.serial("u", VECTORS) as u, self.k.vector(LANES) as lane:
            yield u, lane, BLOCK * b + LANES * u + lane

    def each_block(self, read: Read, body: Callable[[Dim, Read], None]) -> None:
        """Call `body(b, read)` for each block of the row. If the last block of the logits is partial, the `read` that the body gets for
        this block returns -inf beyond the vocabulary."""
        full = self.vocab // BLOCK if read == self.raw else self.blocks
        if full:
            with self.k.serial("b", full) as b:
                body(b, read)
        if full < self.blocks:
            with self.k.scope():
                body(self.k.let("b", const(full, I64)), lambda at: guard(0, at, self.vocab, read(at), -INF))

    @contextmanager
    def live(self, reach: Callable[[], Scalar] | None = None) -> Generator[Dim]:
        """Loop over the blocks that have a token left; if `reach` is given, only over blocks with a token within this distance."""
        with self.k.serial("b", self.blocks) as b:
            some = self.low[self.g, b] < INF
            with self.k.when(some if reach is None else (self.low[self.g, b] <= reach()) & some):
                yield b

    def clear(self, *arrays: Array) -> None:
        with self.k.vector(LANES) as lane:
            for array in arrays:
                array[lane] = 0

    def fold_lanes(self, array: Array, combine: Callable[[Scalar, Scalar], Scalar]) -> None:
        """Reduce all lanes into lane 0, by repeated halving."""
        for half in halvings(LANES):
            with self.k.vector(half) as lane:
                array[lane] = combine(array[lane], array[lane + half])

    # --- stages --------------------------------------------------------------------------------------------------------

    def adjust(self) -> None:
        """Write the row's logits to `distance`, after applying bias, penalties and mask."""
        k, i, arrays = self.k, self.i, self.arrays

        def copy(b: Dim, read: Read) -> None:
            with self.each_vector(b) as (_, _, at):
                self.distance[self.g, at] = read(at)

        self.each_block(self.raw, copy)
        with k.scope():
            starts, ids, values = (arrays[name] for name in ("bias_starts", "bias_ids", "bias_values"))
            start, end = (clamped_index(k, n, starts[at], ids.shape[0] + 1) for n, at in (("start", i), ("end", i + 1)))
            with k.serial("e", end - start) as e:
                id_ = clamped_index(k, "id", ids[start + e], Dim.of(self.vocab))
                self.distance[self.g, id_] = self.own(id_) + values[start + e]
        with k.scope():
            starts, ids, counts = (arrays[name] for name in ("seen_starts", "seen_ids", "seen_counts"))
            start, end = (clamped_index(k, n, starts[at], ids.shape[0] + 1) for n, at in (("start", i), ("end", i + 1)))
            with k.serial("e", end - start) as e:
                id_ = clamped_index(k, "id", ids[start + e], Dim.of(self.vocab))
                divided, multiplied = (self.own(id_) / self.number(Number.REPETITION), self.own(id_) * self.number(Number.REPETITION))
                self.distance[self.g, id_] = select(self.own(id_) > 0.0, divided, multiplied)
                with k.when(counts[start + e] > 0):
                    penalty = self.number(Number.FREQUENCY) * cast(counts[start + e], F32) + self.number(Number.PRESENCE)
                    self.distance[self.g, id_] = self.own(id_) - penalty
        with k.when((self.setting(Setting.MASK) >= 0) & (index(arrays["masks"].shape[0]) > 0)):
            mask = clamped_index(k, "mask", self.setting(Setting.MASK), arrays["masks"].shape[0])
            with k.serial("b", self.blocks) as b, self.each_vector(b) as (u, lane, at):
                word = arrays["masks"][mask, dim_min(BLOCK // 32 * b + u // 2, -(-self.vocab // 32) - 1)]
                bit = word >> cast(index(LANES * (u % 2) + lane), I32) & 1
                self.distance[self.g, at] = select(equal(bit, 1), self.own(at), -INF)

    def find_best(self, read: Read) -> None:
        """Set `best` to the highest logit, `first` to the lowest token id that has it, and `bad` to the number of lanes with a NaN."""
        k = self.k
        with k.scope():
            top, place, nans = (k.local(n, VECTORS, LANES, dtype=d) for n, d in (("top", F32), ("place", I32), ("nans", I32)))
            highs, places, bads = (k.local(n, BLOCK, dtype=d) for n, d in (("highs", F32), ("places", I64), ("bads", I32)))
            with self.each_vector(Dim.of(0)) as (u, lane, _):
                top[u, lane] = -INF
                place[u, lane] = 0
                nans[u, lane] = 0

            def compare(b: Dim, read: Read) -> None:
                with self.each_vector(b) as (u, lane, at):
                    place[u, lane] = select(top[u, lane] < read(at), cast(index(b), I32), place[u, lane])
                    nans[u, lane] = select(equal(read(at), read(at)), nans[u, lane], 1)
                    top[u, lane] = select(top[u, lane] < read(at), read(at), top[u, lane])

            self.each_block(read, compare)
            with self.each_vector(Dim.of(0)) as (u, lane, at):
                highs[at] = top[u, lane]
                places[at] = cast(place[u, lane], I64) * BLOCK + index(at)
                bads[at] = nans[u, lane]
            best, first, bad = self.best, self.first, self.bad
            best[0] = -INF
            first[0] = 0
            bad[0] = 0
            with k.serial("e", BLOCK) as e:
                bad[0] = bad[0] + cast(bads[e], I64)
                with k.when((best[0] < highs[e]) | equal(best[0], highs[e]) & (places[e] < first[0])):
                    best[0] = highs[e]
                    first[0] = places[e]

    def measure(self, read: Read, sharpness: Callable[[], Scalar]) -> None:
        """Set `distance` to how much each logit that `read` returns is below `best`, times `sharpness`."""
        self.stale[0] = True
        self.each_block(read, lambda b, read: self.renew(b, lambda at: (self.best[0] - read(at)) * sharpness()))

    def renew(self, b: Dim, distance: Read) -> None:
        """Replace the distances of block `b` by what `distance` returns for each token, and update `low`, the smallest distance of the
        block."""
        least = self.least
        with self.k.vector(LANES) as lane:
            least[lane] = INF
        with self.each_vector(b) as (_, lane, at):
            self.distance[self.g, at] = distance(at)
            least[lane] = select(self.own(at) < least[lane], self.own(at), least[lane])
        self.fold_lanes(least, less)
        self.low[self.g, b] = least[0]

    def keep(self, condition: Read, reach: Callable[[], Scalar]) -> None:
        """Set the distance of each token that does not meet the condition to infinity. No token beyond the distance `reach` may meet the
        condition: a block that has only such tokens is dropped without reading it."""
        with self.live() as b:
            with self.k.when(reach() < self.low[self.g, b]):
                self.low[self.g, b] = INF
            with self.k.orelse():
                self.renew(b, lambda at: select(condition(at), self.own(at), INF))

    # --- weights -------------------------------------------------------------------------------------------------------

    def weigh(self, distance: Read) -> None:
        """Set `weight` to `meaning.weigh` of a distance, in each lane. The tile shifts left by 6 more bits than `meaning.weigh` before it
        shifts right. The constant added for rounding is larger accordingly, so that ties round as in `meaning.weigh`."""
        power, rounded, mantissa = self.power, self.rounded, self.mantissa
        base = float(ROUND + SCALE_BITS - (WEIGHT_BITS - MANTISSA_BITS))
        with self.k.vector(LANES) as lane:
            power[lane] = distance(lane) * LOG2_E
            power[lane] = select(power[lane] < BEYOND, power[lane], BEYOND)
            rounded[lane] = power[lane] + base
            power[lane] = power[lane] - (rounded[lane] - base)
            fraction: Scalar = const(POWER[-1], F32)
            for coefficient in (*reversed(POWER[:-1]), 1.0):
                fraction = fraction * power[lane] + coefficient
            mantissa[lane] = fraction + float(TWO)
        self.k.tile(Shift(), self.weight[0], mantissa[0], rounded[0])

    @contextmanager
    def each_weight(self, b: Dim) -> Generator[Dim]:
        """Loop over the vectors of a block. Set `weight` to the weights of the vector's tokens."""
        with self.k.serial("u", VECTORS) as u:
            self.weigh(lambda lane: self.own(BLOCK * b + LANES * u + lane))
            yield u

    @contextmanager
    def sums(self) -> Generator[Dim]:
        """Loop over the blocks. Set `sum` to the weight of each block, and `total` to the weight of the row. The loop body, which the
        caller writes, must add the weights of the block to `lanes`."""
        self.total[0] = 0
        self.stale[0] = False
        with self.k.serial("b", self.blocks) as b:
            self.sum[self.g, b] = 0
        with self.live() as b:
            self.clear(self.lanes)
            yield b
            self.fold_lanes(self.lanes, plus)
            self.sum[self.g, b] = self.lanes[0]
            self.total[0] = self.total[0] + self.lanes[0]

    def sum_weights(self) -> None:
        """Compute the weight of each block and the total, unless they are up to date."""
        with self.k.when(self.stale[0]), self.sums() as b, self.each_weight(b), self.k.vector(LANES) as lane:
            self.lanes[lane] = self.lanes[lane] + self.weight[lane]
