"""Emit the code of attention by `wgmma`, which every thread of the block runs.

In each row of scores, a thread has two neighbouring keys of every 8 (wgmma_attend_rows.py), so four lanes share a row. To sum the weights
of a row, sixteen sums first add up the weights of keys that are 16 apart, in order; a thread has four of these sums. Then the sums that are
8, 4, 2 and 1 apart are added.

One statement of inline assembly starts a chain of `wgmma` instructions, and another one waits for it. No instruction in between uses the
registers of the chain; if one did, the assembler would insert a wait after each `wgmma`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from compiler.ir.loops.functions import Fn
from compiler.llvm.ex2 import ex2
from compiler.llvm.ssa import multiply_add
from compiler.machine.intrinsics.block_code import EIGHT, SHARED
from compiler.machine.intrinsics.mma_pages import SPLIT
from compiler.machine.intrinsics.wgmma_attend import LINE_BYTES
from compiler.machine.intrinsics.wgmma_attend_pages import CHUNK, KEYS, PAGES, VALUES
from compiler.machine.intrinsics.wgmma_attend_rows import LOWEST, PAIR, Rows
from runtime.cache_groups import PAGE_SIZE as PAGE

AT_ONCE = 2  # maximum number of parts of values whose products have started and not been awaited
SWIZZLES = {128: 1, 64: 2, 32: 3}  # the number of the layout in a descriptor, by the number of bytes within which chunks are swizzled


@dataclass(frozen=True, slots=True)
class Right:
    """An operand in shared memory: the right one of a product, or the queries. The distances `leading` and `stride` are in units of 16
    bytes, as in its descriptor."""

    place: str
    leading: int
    stride: int
    swizzle: int

    def at(self, low: str, distance: int, register: str) -> str:
        """Return assembly that writes to `register` the descriptor of the part that begins at `distance`. Only the lower half of a
        descriptor depends on the place; `low` is the lower half at distance 0."""
        high = self.stride | self.swizzle << 30
        return f"add.u32 low, {low}, {distance}; mov.b32 high, {high}; mov.b64 {register}, {{low, high}};"


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction of a product."""

    before: str  # assembly that runs before it
    left: str  # its left operand
    distance: int  # the distance of its right operand, see `Right.at`


class AttendCode(Rows):
    """Emits attention if two stages fit in shared memory. Subclasses override the methods that differ with one stage
    (wgmma_attend_parts.py)."""

    def run(self) -> None:
        """Emit the code of the tile. In each turn, a warpgroup computes the scores of a split, and joins the split to the earlier ones. The
        warpgroups take turns to multiply, and the first one begins."""
        code = self.code
        pages = self.find_pages("0")
        self._load_queries()
        self.open_stages()
        self.copy_turn("0", pages)
        self._begin()
        with code.when(self.is_second):
            self._let_other()
        with code.when(code.op(f"icmp ne i64 {self.splits}, 0")):
            self.await_half(KEYS, "0")
        self._await_turn()
        with code.loop("0", self.splits) as turn:
            self._score(turn)
            self._join_split(turn)
        with code.when(code.op(f"xor i1 {self.is_second}, true")):
            self._let_other()
        self.close_stages()
        self._store()

    def _begin(self) -> None:
        """Begin the means with 0, and the state of each row with its largest score and sum of weights before the first key."""
        code, (rows, _) = self.code, self._own_rows()
        self.store_floats(["0.0"] * len(self.means), self.means)
        for places, source in zip(self.state, (self.top, self.weights), strict=True):
            values = [code.op(f"load float, {SHARED} {self.gep(SHARED, source, row, 'float')}, align 4") for row in rows]
            self.store_floats(values, places)

    def _score(self, turn: str) -> None:
        """Multiply the keys of a turn, and let the other warpgroup multiply. Then begin to copy pages for the next turn."""
        dots, following = self._multiply_keys(turn), self.plus(turn, "1")
        pages = self.find_pages(following)
        self.store_floats(self._await_product(dots, 0), self.scores)
        self._let_other()
        self.meet()  # the second warpgroup overwrites values that its warps multiplied before these keys
        self.copy_turn(following, pages)

    def _join_split(self, turn: str) -> None:
        """Turn the scores of a split into weights, multiply the values, and join the means to those of earlier splits. Meanwhile, wait for
        the keys of the next split, which are multiplied in the same turn of this warpgroup."""
        code, start, following = self.code, self.first_of(turn, SPLIT, self.kept("begin")), self.plus(turn, "1")
        begins = code.op(f"icmp slt i32 {start}, {self.kept('starts')}")
        ends = code.op(f"icmp slt i32 {self.kept('ends')}, {self.add(start, str(SPLIT))}")
        is_edge = code.op(f"or i1 {begins}, {ends}")  # whether a row does not see all keys
        if self.op.softcap:
            self.store_floats([self._capped(x) for x in self.load_floats(self.scores)], self.scores)
        with code.when(is_edge):
            self._mask(start)
        factors, weights = self._weigh()
        self._await_values(turn)
        self._await_turn(self.load_floats(self.state[1]))
        step = self.op.value_part
        parts = [range(first, min(first + step, self.op.columns)) for first in range(0, self.op.columns, step)]
        started = [self._multiply_values(weights, turn, part) for part in parts[:AT_ONCE]]
        # Each line of arithmetic runs while the tensor cores multiply, not when they wait for this warpgroup.
        before = self._before([code.op(f"fmul float {x}, {factors[n // 2 % 2][0]}") for n, x in enumerate(self.load_floats(self.means))])
        for number, part in enumerate(parts):
            running = len(started) - 1 - number
            if running == 0:
                self._await_next_keys(following)
            found = self._await_product(started[number], running)
            with code.when(is_edge):
                self._check(found)
            own = slice(part.start // 2, part.stop // 2)
            joined = [self._sum_of(x, y, factors[n // 2 % 2][1]) for n, (x, y) in enumerate(zip(found, before[own], strict=True))]
            self.store_floats(self._after("", joined), self.means[own])
            if len(started) < len(parts):
                started.append(self._multiply_values(weights, turn, parts[len(started)]))
            self._multiplied_values(following, part.stop)

    def _before(self, means: Sequence[str]) -> list[str]:
        """Return the earlier means, times their factors, and make the assembler compute them here, not later."""
        return self._after("", means)

    def _await_values(self, turn: str) -> None:
        """Wait for the first values that are multiplied."""
        self.await_half(VALUES, turn)

    def _await_next_keys(self, turn: str) -> None:
        """Wait for the keys of the next turn, while values are multiplied."""
        with self.code.when(self.code.op(f"icmp slt i64 {turn}, {self.splits}")):
            self.await_half(KEYS, turn)

    def _multiplied_values(self, following: str, end: int) -> None:
        """Do nothing. This is called when this warpgroup has multiplied its values up to element `end`. If stages are cut into parts
        (wgmma_attend_parts.py), the part that ends there is then copied for the turn `following`."""

    # --- turns -----------------------------------------------------------------------------------------------------------

    def _await_turn(self, sums: Sequence[str] = ()) -> None:
        """Wait until the other warpgroup lets this one multiply. The number of the barrier depends on whether `sums`, the sums of the rows'
        weights, are negative, although they never are. Otherwise the assembler would compute weights after the barrier, while the other
        warpgroup waits."""
        code, number = self.code, self.own_warpgroup()
        for x in sums:
            is_negative = code.op(f"fcmp olt float {x}, 0.0")
            number = code.op(f"add i64 {number}, {code.op(f'zext i1 {is_negative} to i64')}")
        self._turn("sync", number)

    def _let_other(self) -> None:
        """Let the other warpgroup multiply."""
        self._turn("arrive", self.code.op(f"xor i64 {self.own_warpgroup()}, 1"))

    def _turn(self, action: str, warpgroup: str) -> None:
        """Arrive at the barrier of a warpgroup's turn; with `sync`, also wait until the other warpgroup has arrived."""
        number = self.code.op(f"add i32 {self.code.op(f'trunc i64 {warpgroup} to i32')}, 1")  # the number of a barrier of the block
        self.assembly(f"bar.{action} $0, {self.op.threads};", [("r", number)])

    # --- products --------------------------------------------------------------------------------------------------------

    def _multiply_keys(self, turn: str) -> list[str]:
        """Return this thread's products of queries and keys."""
        return self._multiply_elements(self.half_of(KEYS, turn), range(0, self.op.size, PAGE))

    def _multiply_elements(self, keys: str, elements: range, sums: Sequence[str] = ()) -> list[str]:
        """Return the products of some elements of queries and keys, 16 at a time, added to `sums`."""
        size = self.op.size
        left = Right(self._own_queries(), EIGHT, size, 0)
        right = Right(keys, size * LINE_BYTES // CHUNK, EIGHT * LINE_BYTES // CHUNK, SWIZZLES[LINE_BYTES])
        makes = [(left.at("$A0", first // PAGE * 2 * EIGHT, "a"), first * LINE_BYTES // CHUNK) for first in elements]
        steps = [Step(make, "a", distance) for make, distance in makes]
        return self._multiply(SPLIT, steps, [self.low_descriptor(left.place, left.leading << 16)], right, "0, 1", sums)

    def _multiply_values(self, weights: Sequence[str], turn: str, part: range) -> list[str]:
        """Return this thread's products of weights and some elements of values."""
        width = self.op.width
        line, inside = divmod(part.start * 2, width)
        place = self.gep(SHARED, self.half_of(VALUES, turn), str(line * SPLIT * width + inside))
        right = Right(place, SPLIT * width // CHUNK, EIGHT * width // CHUNK, SWIZZLES[width])
        return self._multiply_weights(weights, right, [page * PAGE * width // CHUNK for page in range(PAGES)], len(part), "1")

    def _multiply_weights(self, weights: Sequence[str], right: Right, distances: Sequence[int], columns: int, transposed: str) -> list[str]:
        """Return the products of weights and an operand, whose pages are at `distances` from its beginning."""
        registers = [f"{{{', '.join(f'$A{4 * page + i}' for i in range(4))}}}" for page in range(PAGES)]
        steps = [Step("", given, distance) for given, distance in zip(registers, distances, strict=True)]
        return self._multiply(columns, steps, weights, right, transposed)

    def _multiply(
        self, columns: int, steps: Sequence[Step], left: Sequence[str], right: Right, transposed: str, sums: Sequence[str] = ()
    ) -> list[str]:
        """Start to multiply 64 rows by `columns` columns, and to add the products to `sums`. Return the registers to which the result will
        be written. `left` are words that the steps name by `$A` and a number."""
        code, count = self.code, columns // 2
        result, first = ", ".join(f"${n}" for n in range(count)), count + len(sums)  # operands of the result; number of the first word
        lines = [".reg .b32 low, high; .reg .b64 a, b; .reg .pred add, set; setp.eq.u32 add, 1, 1; setp.eq.u32 set, 0, 1;"]
        lines.append("wgmma.fence.sync.aligned;")
        for number, step in enumerate(steps):
            lines.append(f"{step.before} {right.at(f'${first + len(left)}', step.distance, 'b')}")
            kind, mode = f"m64n{columns}k16.f32.bf16.bf16", "add" if number or sums else "set"
            lines.append(f"wgmma.mma_async.sync.aligned.{kind} {{{result}}}, {step.left}, b, {mode}, 1, 1, {transposed};")
        lines.append("wgmma.commit_group.sync.aligned;")
        text = re.sub(r"\$A(\d+)", lambda m: f"${first + int(m[1])}", " ".join(lines))
        results = f"{{{', '.join(['float'] * count)}}}"
        constraints = ",".join([*["=f"] * count, *map(str, range(len(sums))), *["r"] * (len(left) + 1), "~{memory}"])
        words = (*left, self.low_descriptor(right.place, right.leading << 16))
        given = ", ".join([*(f"float {x}" for x in sums), *(f"i32 {word}" for word in words)])
        made = code.op(f'call {results} asm sideeffect "{{ {text} }}", "{constraints}"({given}) convergent')
        return [code.op(f"extractvalue {results} {made}, {n}") for n in range(count)]

    def _await_product(self, started: Sequence[str], running: int) -> list[str]:
        """Wait for a product, while at most `running` later ones still run. Return its result."""
        return self._after(f"wgmma.wait_group.sync.aligned {running};", started)

    def _after(self, text: str, values: Sequence[str]) -> list[str]:
        """Emit assembly that has the values as inputs and as results, and return the results. So the values are computed before the
        assembly, and instructions that use the results run after it."""
        code, count = self.code, len(values)
        results = f"{{{', '.join(['float'] * count)}}}"
        constraints = ",".join([*["=f"] * count, *map(str, range(count)), "~{memory}"])
        given = ", ".join(f"float {x}" for x in values)
        made = code.op(f'call {results} asm sideeffect "{text}", "{constraints}"({given}) convergent')
        return [code.op(f"extractvalue {results} {made}, {n}") for n in range(count)]

    # --- scores and weights ----------------------------------------------------------------------------------------------

    def _capped(self, product: str) -> str:
        """Return the capped score of a product of a query and a key, computed as in the schedule by `mma.sync`."""
        code, softcap = self.code, self._literal(self.op.softcap)
        score = code.op(f"fmul float {product}, {self._literal(self.op.scale)}")
        return code.op(f"fmul float {code.call_math(Fn.TANH, [code.op(f'fdiv float {score}, {softcap}')])}, {softcap}")

    def _mask(self, start: str) -> None:
        """Replace the scores of keys that a row does not see by -inf. A row after the last row sees the same keys as the last row."""
        code, seen = self.code, list[str]()
        last = code.op(f"sub i64 {self._num_rows()}, 1")
        rows, quad = self._own_rows()
        bounds = [self.kept(name) for name in ("first", "end")]
        origin = self.add(start, self.short(self.times(quad, 2)))  # position of the thread's first key
        for row in rows:
            token = self.divided(code.op(f"call i64 @llvm.smin.i64(i64 {row}, i64 {last})"), self.op.heads)
            places = (self.gep(SHARED, x, token, "i32") for x in bounds)
            before = [self._keys_before(code.op(f"sub i32 {code.op(f'load i32, {SHARED} {x}, align 4')}, {origin}")) for x in places]
            seen.append(code.op(f"xor i32 {code.op(f'and i32 {before[0]}, {before[1]}')}, {before[1]}"))
        masked: list[str] = []
        for number, score in enumerate(self.load_floats(self.scores)):
            bit = 1 << number // 4 * 2 + number % 2
            is_seen = code.op(f"icmp ne i32 {code.op(f'and i32 {seen[number // 2 % 2]}, {bit}')}, 0")
            masked.append(code.op(f"select i1 {is_seen}, float {score}, float {LOWEST}"))
        self.store_floats(masked, self.scores)

    def _keys_before(self, end: str) -> str:
        """Return a word with a bit for each key of a row that the thread has. The bit is set if the key's position, counted from the
        thread's first key, is less than `end`. The thread has two neighbouring keys of every 8."""
        code = self.code
        near = code.op(f"call i32 @llvm.smin.i32(i32 {code.op(f'call i32 @llvm.smax.i32(i32 {end}, i32 0)')}, i32 {SPLIT})")
        rest = code.op(f"call i32 @llvm.umin.i32(i32 {code.op(f'and i32 {near}, {EIGHT - 1}')}, i32 2)")
        whole = code.op(f"lshr i32 {near}, 3")
        count = code.op(f"add i32 {code.op(f'shl i32 {whole}, 1')}, {rest}")
        bits = code.op(f"shl i64 1, {code.op(f'zext i32 {count} to i64')}")
        return code.op(f"trunc i64 {code.op(f'sub i64 {bits}, 1')} to i32")

    def _weigh(self) -> tuple[list[tuple[str, str]], list[str]]:
        """Compute the weights of a split, and join their sums to those of earlier splits. Return, for each row, the factor of the earlier
        means and the factor of the split's means. Also return the weights, as left operands of the next product."""
        code, scores = self.code, self.load_floats(self.scores)
        unit = self._literal(self.op.unit)
        largest = [self._top([x for n, x in enumerate(scores) if n // 2 % 2 == row]) for row in PAIR]
        tops = [code.op(f"fmul float {x}, {unit}") for x in largest]
        lowered = [code.op(f"fneg float {self._finite(top)}") for top in tops]
        words: list[str] = []
        sums: list[list[list[str]]] = [[[] for _ in range(4)] for _ in PAIR]  # for each row, the weights of keys that are 16 apart
        for number in range(0, len(scores), 2):
            row, eight = number // 2 % 2, number // 4 % 2
            pair = [ex2(code, multiply_add(code, scores[number + e], unit, lowered[row], "float", 1)) for e in PAIR]
            words.append(self._rounded(pair))
            for e, rounded in enumerate((f"shl i32 {words[-1]}, 16", f"and i32 {words[-1]}, -65536")):
                lane = sums[row][2 * eight + e]
                lane.append(code.op(f"bitcast i32 {code.op(rounded)} to float"))
                if len(lane) == 2:
                    lane[:] = [self._sum(*lane)]
        return [self._join_row(row, tops[row], self._sum_of_lanes([x for (x,) in sums[row]])) for row in PAIR], words

    def _top(self, scores: Sequence[str]) -> str:
        """Return the largest of a row's scores, which are divided among four lanes."""
        top = self._folded(scores, self._larger)
        for distance in (1, 2):
            top = self._larger(top, self._from_lane(top, distance))
        return top

    def _sum_of_lanes(self, lanes: Sequence[str]) -> str:
        """Add up the sixteen sums of a row. This thread has four of them: two neighbours, and the two that are 8 further."""
        pair = [self._sum(lanes[e], lanes[2 + e]) for e in PAIR]
        for distance in (2, 1):
            pair = [self._sum(x, self._from_lane(x, distance)) for x in pair]
        return self._sum(*pair)

    def _join_row(self, row: int, top: str, found: str) -> tuple[str, str]:
        """Join the sum of a split's weights to that of earlier splits. Return the factors of the earlier means and of the split's means."""
        code = self.code
        places = self.state[0][row], self.state[1][row]
        before, weights = self.load_floats(places)
        larger = self._larger(before, top)
        ground = self._finite(larger)
        earlier, later = (ex2(code, code.op(f"fsub float {x}, {ground}")) for x in (before, top))
        self.store_floats([larger, self._sum_of(found, code.op(f"fmul float {weights}, {earlier}"), later)], places)
        return earlier, later

    def _sum_of(self, found: str, before: str, factor: str) -> str:
        """Return `found` times `factor`, plus `before`."""
        return multiply_add(self.code, found, factor, before, "float", 1)

    def _check(self, found: Sequence[str]) -> None:
        """Set `broken` if a mean is not finite. x - x is 0 only for finite x."""
        code = self.code
        total = self._folded([code.op(f"fsub float {x}, {x}") for x in found], self._sum)
        with code.when(code.op(f"fcmp une float {total}, 0.0")):
            code.op(f"atomicrmw or {SHARED} {self.broken}, i32 1 monotonic, align 4")
