"""Emit the code of a product by `wgmma`, which every thread of the block runs.

`wgmma` reads weights of 16 bits from shared memory. Weights of 8 or 4 bits are converted in registers to bf16, which represents them
exactly, and `wgmma` reads them from the registers. While it runs, the next weights are converted in other registers: those of a step, or
of half a step where accumulators leave no more registers. The sum of each group is multiplied by the group's scale, and groups are added
in order.

If parts of the block take turns, all but the first pass their sums and scales through shared memory. The first part adds these sums in the
next turn, before the sums of its own groups, which come later along k. One pair of the block's barriers signals that the sums of a turn are
stored, and another pair signals that they were added; one barrier of a pair is for even turns, the other for odd turns.

One statement of inline assembly starts a group of `wgmma` instructions and waits for those of the previous group. So no other instruction
uses the registers of these instructions in between; if one did, the assembler would insert a wait after each `wgmma`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.block_code import EIGHT, LANES, SHARED, WARPS
from compiler.machine.intrinsics.block_product import NARROW, SIXTEEN
from compiler.machine.intrinsics.wgmma import CONSUMERS, ROW_BYTES, WARPGROUPS, Sharing, Wgmma
from compiler.machine.intrinsics.wgmma_stages import CHUNK, MULTIPLIED, Stages

# Descriptors of operands in shared memory, without addresses. They state two distances in units of 16 bytes: from a brick of weights to the
# next brick along k, and from 8 columns or rows to the next 8. Rows are swizzled within 128 bytes.
COLUMNS = 8 << 16 | 64 << 32
ROWS = 1 << 62 | 1 << 16  # the second distance follows from the tile
COLUMN_STEP, ROW_STEP = 2 * 8, 2  # distances, in these units, from one instruction to the next, which is 16 elements further along k
PASSED, ADDED = MULTIPLIED + 1, MULTIPLIED + 3  # numbers of the block's barriers for even turns; those for odd turns are one higher


class WgmmaCode(Stages):
    """Emits the code of a product by `wgmma`."""

    def __init__(self, op: Wgmma, code: Code, pointers: Sequence[str], dims: Sequence[int | str]) -> None:
        """Find the part of the tile that this warpgroup multiplies, and the steps at which groups of weights begin and end. `pointers` and
        `dims` are those of the tile `op`."""
        super().__init__(op, code, pointers, dims)
        split = {
            Sharing.COLUMNS: (op.columns // WARPGROUPS, 0, 0),
            Sharing.ROWS: (0, op.warp_rows, 0),
            Sharing.TURNS: (0, 0, op.fold // WARPGROUPS),
            Sharing.HALF_TURNS: (0, 0, op.fold // WARPGROUPS),
            Sharing.NOTHING: (0, 0, 0),
        }
        self.second_column, self.second_row, self.second_fold = split[op.sharing]  # where the part of the second warpgroup begins
        self.places = self._places() if op.has_scales else []
        # With HALF_TURNS, the first half of an instruction's rows are the tile's rows in a step of one quarter of the stage, and the second
        # half are the same rows in a step of the next quarter (`Wgmma.multiplied_rows`).
        between = op.warp_folds * op.row_bytes if op.sharing is Sharing.HALF_TURNS else EIGHT * ROW_BYTES
        self.rows_layout = ROWS | between // CHUNK << 32
        self.instructions = op.step // SIXTEEN  # number of instructions of a step
        steps = int(self.group_steps) if self.in_groups and self.group_steps.isdigit() else 0
        self.restarts = steps if steps and op.fold % steps == 0 else 0  # steps of a group; 0: where groups begin in a stage varies
        if op.turns:
            self.taker = self._of_first_lane(f"udiv i64 {self.thread}, {op.adders}") if op.is_thin else self.warpgroup
            self.adds = code.op(f"icmp eq i64 {self.taker}, 0")  # whether this thread adds the sums of all takers
            self.is_upper = code.op(f"icmp uge i64 {self.warp}, {WARPS // 2}")
            self.ends = range(op.warp_folds // op.turns - 1, op.warp_folds, op.warp_folds // op.turns)  # the last step of each group

    def run(self) -> None:
        """Emit the code: one warp produces, and the others consume (wgmma_stages.py)."""
        self.open_stages()
        self.fill_early()
        self.code.either(self.produces, self.produce, self._consume)

    def _consume(self) -> None:
        """Multiply the stages, in turns if the tile takes turns. When all stages are multiplied, the threads that hold sums of the result
        store them in c."""
        code, op = self.code, self.op
        if op.turns:
            self._take_turns()
        elif op.multipliers < CONSUMERS:
            with code.when(code.op(f"icmp ult i64 {self.warpgroup}, {op.multipliers // (WARPS * LANES)}")):
                self._multiply_stages()
        else:
            self._multiply_stages()
        self.close_stages()
        if op.hides_thread:  # find the thread's place again, so that no register holds it during the products
            self.find_thread()
            self.warp = code.op(f"urem i64 {self.warp}, {WARPS}")
        # The number of the warpgroup is computed again, too.
        self.warpgroup = code.op(f"udiv i64 {self.thread}, {WARPS * LANES}")
        storing = CONSUMERS if op.sharing in (Sharing.COLUMNS, Sharing.ROWS) else op.adders
        with code.when(code.op(f"icmp ult i64 {self.thread}, {storing}")):
            column = self.plus(self.times(self.warp, SIXTEEN), self._second(self.second_column))
            self.store(column, NARROW, self._second(self.second_row))

    def _second(self, distance: int) -> str:
        """Return `distance` in the second warpgroup, and 0 in the first one. `distance` leads from the part of the first warpgroup to the
        part of the second one."""
        return self.times(self.warpgroup, distance) if distance else "0"

    # --- products ------------------------------------------------------------------------------------------------------

    def _multiply_stages(self) -> None:
        """Multiply all stages without turns, and release each stage when its products are complete."""
        code, op = self.code, self.op
        if op.has_scales:
            self.read_scales(self.places, "0")
        with code.loop("0", self.turns) as turn:
            self._multiply(self.await_stage(turn), turn)
            if op.overlaps:
                with code.when(code.op(f"icmp ne i64 {turn}, 0")):
                    self.release_stage(code.op(f"sub i64 {turn}, 1"))
            else:
                self.release_stage(turn)
        if op.overlaps:
            self._wait_for_products()
        self.end_sums()

    def _multiply(self, slot: str, turn: str) -> None:
        """Start the products of a stage. The last group of instructions may still run afterwards if weights are read from shared memory."""
        op, (stage, rows) = self.op, self._operands(slot)
        if not op.has_scales:
            self._start(range(self.per_warp), range(op.fold), [("r", self.low_descriptor(stage, COLUMNS))], rows, 1)
            return
        order = [(fold, part) for fold in range(op.fold) for part in range(self.per_warp)]
        starts = [(*place, first) for place in order for first in range(0, self.instructions, op.at_once)]
        for (fold, part, first), weights in zip(starts, self._all_weights(stage, order), strict=True):
            if part == first == 0:
                step = self.plus(self.times(turn, op.fold), str(fold))
                self.begin_group(step, self.places, self._wait_for_products if fold else lambda: None)
            is_last = (fold, part, first) == starts[-1]
            self._start(range(part, part + 1), range(fold, fold + 1), weights, rows, 0 if is_last else 1, begin=first)

    def _operands(self, slot: str) -> tuple[str, str]:
        """Return the address of the weights in a stage, and the descriptor of the rows, that this warpgroup multiplies."""
        op, stage = self.op, self.stage(slot)
        weights = self.panel_at(self.second_column // op.panel_columns, self.second_fold)
        rows = self.second_row * ROW_BYTES + self.second_fold * op.row_bytes
        first_row = self.gep(SHARED, stage, self.plus(self._second(rows), str(op.weight_bytes)))
        return self.gep(SHARED, stage, self._second(weights)), self.low_descriptor(first_row, ROWS)

    def _all_weights(self, stage: str, order: Sequence[tuple[int, int]]) -> Iterator[list[tuple[str, str]]]:
        """Yield the registers of converted weights for the steps and parts of a stage in `order`: those of `at_once` instructions at a
        time. Weights are converted when they are needed, so that few registers hold weights."""
        op = self.op
        is_crowded = op.at_once < self.instructions
        pieces = chain.from_iterable(self._pieces(stage, part, fold) for fold, part in order)
        words = self._joined(pieces)
        read = next(words, None)
        while read is not None:
            weights = [("r", register) for register in self._converted(read)]
            if op.fold > 1 and not is_crowded:
                read = next(words, None)  # read the next words before these weights are multiplied
                yield weights
            else:
                yield weights
                read = next(words, None)

    def _joined(self, pieces: Iterator[list[str]]) -> Iterator[list[str]]:
        """Join or cut pieces into the words of `at_once` instructions."""
        count, held = self.op.at_once * self.op.bits // 4, list[str]()
        for piece in pieces:
            held += piece
            while len(held) >= count:
                yield held[:count]
                held = held[count:]

    def _start(
        self,
        parts: range,
        folds: range,
        weights: Sequence[tuple[str, str]],
        rows: str,
        running: int,
        others: Sequence[str] = (),
        *,
        begin: int = 0,
    ) -> None:
        """Start the instructions for the steps `folds` of a stage and for some parts of 64 columns each, as one group. Then wait until at
        most `running` groups run. `weights` are the descriptor of all parts, or the registers of one part: those of the step's instructions
        from number `begin` on. `others` are sums of earlier instructions, which can be used after the wait."""
        op = self.op
        instructions = range(begin, begin + op.at_once) if op.has_scales else range(self.instructions)
        per_part = len(self.sums) // self.per_warp
        sums = [*self.sums[parts.start * per_part : parts.stop * per_part], *others]
        first = 2 * len(sums)
        # p says whether products are added to the sums. It is false for the first products of a group.
        restarts = bool(self.restarts) and begin == 0 and folds.start % self.restarts == 0
        lines = [".reg .b64 a, b; .reg .b32 low; .reg .pred p; wgmma.fence.sync.aligned;"]
        for fold in folds:
            for i in instructions:
                adds = not restarts or (fold, i) != (folds.start, begin)
                lines.append(f"setp.{'eq' if adds else 'ne'}.u32 p, 1, 1;")
                lines.append(_descriptor("b", f"${first + len(weights)}", fold * op.row_bytes // CHUNK + i * ROW_STEP, self.rows_layout))
                for number, part in enumerate(parts):
                    result = ", ".join(f"${number * per_part + n}" for n in range(per_part))
                    if op.has_scales:
                        left, transposed = f"{{{', '.join(f'${first + (i - begin) * 4 + n}' for n in range(4))}}}", "0"
                    else:
                        place = self.panel_at(self._panel_of(part), fold) // CHUNK
                        lines.append(_descriptor("a", f"${first}", place + i * COLUMN_STEP, COLUMNS))
                        left, transposed = "a", "0, 0"
                    kind = f"m64n{op.multiplied_rows}k16.f32.bf16.bf16"
                    lines.append(f"wgmma.mma_async.sync.aligned.{kind} {{{result}}}, {left}, b, p, 1, 1, {transposed};")
        lines.append(f"wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned {running};")
        self._with_sums(sums, f"{{ {' '.join(lines)} }}", [*weights, ("r", rows)])

    def _panel_of(self, part: int) -> int:
        """Return the number, within a stage, of the first panel of the first warpgroup's part `part`."""
        matrix, number = divmod(part, self.op.per_warp)
        return (matrix * self.op.columns + number * NARROW) // self.op.panel_columns

    def _wait_for_products(self) -> None:
        """Wait until all instructions have added their products to the sums."""
        self._with_sums(self.sums, "wgmma.wait_group.sync.aligned 0;")

    def _with_sums(self, sums: Sequence[str], text: str, operands: Sequence[tuple[str, str]] = ()) -> None:
        """Emit assembly that changes accumulators. The accumulators are the first operands of the assembly, once as results and once as
        inputs."""
        code, count = self.code, len(sums)
        results = f"{{{', '.join(['float'] * count)}}}"
        constraints = ",".join([*["=f"] * count, *map(str, range(count)), *(kind for kind, _ in operands), "~{memory}"])
        given = [*(f"float {x}" for x in self.load_floats(sums)), *(f"i32 {x}" for _, x in operands)]
        made = code.op(f'call {results} asm sideeffect "{text}", "{constraints}"({", ".join(given)}) convergent')
        self.store_floats([code.op(f"extractvalue {results} {made}, {i}") for i in range(count)], sums)

    def group_sums(self) -> list[str]:
        """Return the sums of a group. In a thin tile, the upper two warps of a warpgroup use the second half of each instruction's sums."""
        if not self.op.is_thin:
            return super().group_sums()
        values, half = self.load_floats(self.sums), len(self.sums) // self.per_warp // 2
        pairs = [(values[at + i], values[at + half + i]) for at in range(0, len(values), 2 * half) for i in range(half)]
        return [self.code.op(f"select i1 {self.is_upper}, float {upper}, float {lower}") for lower, upper in pairs]

    def clear_sums(self) -> None:
        """Begin new sums, unless the first products of the next group overwrite the old ones."""
        if not self.restarts:
            super().clear_sums()

    # --- weights of few bits -------------------------------------------------------------------------------------------

    def _pieces(self, stage: str, part: int, fold: int) -> Iterator[list[str]]:
        """Read this lane's weights of the warp's 16 columns in the given part and step of a stage, four words at a time."""
        op, code = self.op, self.code
        high, low = code.op(f"lshr i64 {self.warp}, 1"), code.op(f"and i64 {self.warp}, 1")
        panel = self.times(high, (op.warp_folds if op.is_thin else op.fold) * op.panel_bytes)
        own = self.plus(self.plus(panel, self.times(low, LANES * CHUNK)), self.times(self.lane, CHUNK))
        base = self.gep(SHARED, stage, self.plus(own, str(self.panel_at(self._panel_of(part), fold))))
        for piece in range(op.bits // 4):
            yield self.words(SHARED, base, str(piece * 2 * LANES * CHUNK), 4)

    def _converted(self, words: Sequence[str]) -> list[str]:
        """Return the registers with the weights of some words, four for each instruction."""
        return self.eight_bits(words) if self.op.bits == 8 else [x for word in words for x in self.four_bits(word)]

    def _places(self) -> list[tuple[str, str]]:
        """Return, for each 16 columns that this warp multiplies, the index of their panel, and the index of this lane's first column within
        the panel."""
        op, code = self.op, self.code
        half = op.columns // op.panel_columns // 2
        own = self.plus(self.times(code.op(f"and i64 {self.warp}, 1"), SIXTEEN), self.group)
        high = "0" if op.is_thin else code.op(f"lshr i64 {self.warp}, 1")
        first = self.plus(high, self._second(self.second_column // op.panel_columns))
        found: list[tuple[str, str]] = []
        for p in range(op.per_warp):
            panel = self.plus(first, str(p * NARROW // op.panel_columns))
            if op.apart:
                second = code.op(f"icmp uge i64 {panel}, {half}")
                panel = code.op(f"add i64 {panel}, {code.op(f'select i1 {second}, i64 {op.apart - half}, i64 0')}")
            found.append((self.clamped(panel), own))
        return found

    # --- turns -----------------------------------------------------------------------------------------------------------

    def _take_turns(self) -> None:
        """Let each taker multiply its part of each stage. The first taker adds the sums of its own groups, and those that the others passed
        in the turn before. The scales of a group are read one turn before they are used."""
        code, op = self.code, self.op
        passes = code.op(f"xor i1 {self.adds}, true")
        scales = [self.new_scales() for _ in self.ends]
        # With few rows, there are registers for two sets of sums: a group ends while the products of the next one run.
        sets = [self.sums]
        if op.warp_rows == EIGHT:
            sets.append([code.alloca("float") for _ in self.sums])
            self.store_floats(["0.0"] * len(self.sums), sets[1])
        for number, read in enumerate(scales):
            self._read_group("0", number, read)
        with code.loop("0", self.turns) as turn:
            stage, rows = self._operands(self.await_stage(turn))
            with code.when(code.op(f"and i1 {self.adds}, {code.op(f'icmp ne i64 {turn}, 0')}")):
                self._add_passed(code.op(f"sub i64 {turn}, 1"))
            with code.when(code.op(f"and i1 {passes}, {code.op(f'icmp sge i64 {turn}, 2')}")):
                self._block_barrier("sync", ADDED, turn)
            order = [(fold, part) for fold in range(op.warp_folds) for part in range(self.per_warp)]
            ended: int | None = None  # the group whose sums are still to be added
            for (fold, part), weights in zip(order, self._all_weights(stage, order), strict=True):
                group = fold // (self.ends[0] + 1)
                self.sums = sets[group % len(sets)]
                ends, is_last = fold in self.ends and part + 1 == self.per_warp, (fold, part) == order[-1]
                others = [] if ended is None else sets[ended % len(sets)]
                running = 0 if is_last or (ends and len(sets) == 1) else 1
                self._start(range(part, part + 1), range(fold, fold + 1), weights, rows, running, others)
                if ended is not None:
                    self._end_group(ended, turn, sets, scales)
                ended = group if ends else None
                if ended is not None and running == 0:
                    self._end_group(ended, turn, sets, scales)
                    ended = None
            self.release_stage(turn)
            with code.when(passes):
                self._block_barrier("arrive", PASSED, turn)
        with code.when(self.adds):
            self._add_passed(code.op(f"sub i64 {self.turns}, 1"))

    def _end_group(self, number: int, turn: str, sets: Sequence[list[str]], scales: Sequence[list[str]]) -> None:
        """Add the sums of a group of a turn, or pass them to the first taker. Then begin to read the scales of the same group of the
        next turn."""
        code = self.code
        using, self.sums, self.read = self.sums, sets[number % len(sets)], scales[number]
        code.either(self.adds, self.add_group, partial(self._pass, number, turn))
        self._read_group(code.op(f"add i64 {turn}, 1"), number, scales[number])
        self.sums = using

    def _read_group(self, turn: str, number: int, into: Sequence[str]) -> None:
        """Begin to read the scales of this taker's group `number` in a turn, or of the last group if there is no such turn. A turn has
        `op.turns` groups for each taker. The index of the group is computed in 32 bits, because that is faster than in 64."""
        code, op = self.code, self.op
        first, turn = (code.op(f"trunc i64 {x} to i32") for x in (self.times(self.taker, op.turns), turn))
        group = code.op(f"add i32 {code.op(f'mul i32 {turn}, {op.takers * op.turns}')}, {code.op(f'add i32 {first}, {number}')}")
        last = code.op(f"sub i32 {code.op(f'trunc i64 {self.divided(self.steps, int(self.group_steps))} to i32')}, 1")
        self.read = list(into)
        self.read_scales(self.places, code.op(f"zext i32 {code.op(f'call i32 @llvm.smin.i32(i32 {group}, i32 {last})')} to i64"))

    def _pass(self, number: int, turn: str) -> None:
        """Pass the sums and the scales of a group of this turn to the first taker, and begin new sums."""
        values = [*self.group_sums(), *self.factors()]
        thread = self.code.op(f"sub i64 {self.thread}, {self.op.adders}")
        for value, place in zip(values, self._passed(thread, number, turn), strict=True):
            self.code.do(f"store float {value}, {SHARED} {place}, align 4")
        self.clear_sums()

    def _add_passed(self, turn: str) -> None:
        """Add the sums that the other takers passed in a turn. Then signal that these sums are added: two turns later, the other takers
        wait for this signal before they overwrite the sums. Do not signal if no such turn follows."""
        code, op = self.code, self.op
        self._block_barrier("sync", PASSED, turn)
        for taker in range(op.takers - 1):
            thread = self.plus(self.thread, str(taker * op.adders))
            for number in range(op.turns):
                values = [code.op(f"load float, {SHARED} {place}, align 4") for place in self._passed(thread, number, turn)]
                self.add_scaled(values[: len(self.totals)], values[len(self.totals) :])
        with code.when(code.op(f"icmp slt i64 {code.op(f'add i64 {turn}, 2')}, {self.turns}")):
            self._block_barrier("arrive", ADDED, turn)

    def _block_barrier(self, action: str, first: int, turn: str) -> None:
        """Arrive at a barrier of the block for even or for odd turns; with `sync`, also wait until both warpgroups have arrived."""
        code = self.code
        is_odd = code.op(f"and i32 {code.op(f'trunc i64 {turn} to i32')}, 1")
        number = code.op(f"add i32 {is_odd}, {first}")
        self.assembly(f"bar.{action} $0, {CONSUMERS};", [("r", number)])

    def _passed(self, thread: str, number: int, turn: str) -> list[str]:
        """Return the addresses at which a thread's values of a group are passed. Even and odd turns use different memory."""
        op, code = self.op, self.code
        count, line = len(self.totals) + 2 * self.per_warp, op.line_bytes
        half = self.times(code.op(f"and i64 {turn}, 1"), op.passed_bytes // 2)
        base = self.gep(SHARED, self.shared, self.plus(self.plus(half, self.times(thread, 4)), str(op.passed_at + number * count * line)))
        return [self.gep(SHARED, base, str(i * line)) for i in range(count)]


def _descriptor(name: str, lower: str, distance: int, layout: int) -> str:
    """Return assembly that makes the descriptor of the operand that is `distance` after the operand whose descriptor has the lower half
    `lower`. The address is in the lower half, and the upper half is constant."""
    return f"add.u32 low, {lower}, {distance}; mov.b64 {name}, {{low, {layout >> 32}}};"
