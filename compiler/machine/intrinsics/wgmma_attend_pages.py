"""Emit the copies of attention by `wgmma`: pages pass from global memory through stages, which are buffers in shared memory.

The first warpgroup copies keys, the second one values, in chunks of 16 bytes. An mbarrier signals that the keys of a stage have arrived,
another one that its values have. No thread signals that a stage may be filled again: the warpgroups take turns (wgmma_attend_code.py), and
fill a stage when both have multiplied its previous contents. After the first warpgroup has multiplied the keys of turn t, both have
multiplied those of turn t - 1, so it copies keys for turn t + 1 to the stage of turn t - 1. After the second one has multiplied the keys of
turn t, both have multiplied the values of turn t - 1, so it copies values for turn t + 1. Instead of values that no row sees, zeros are
stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.block_code import EIGHT, GLOBAL, LANES, SHARED, WARPS, BlockCode
from compiler.machine.intrinsics.mma_pages import SPLIT
from compiler.machine.intrinsics.wgmma_attend import KEPT_BYTES, LINE_BYTES, WgmmaAttend
from runtime.cache_groups import PAGE_SIZE as PAGE

CHUNK = 16  # bytes
KEYS, VALUES = 0, 1  # halves of a stage
PAGES = SPLIT // PAGE  # number of pages of a split
WARPGROUP = WARPS * LANES
BARRIER_BYTES = 8
# The offsets in bytes of the numbers that threads read again (`Pages.kept`), and the types of those that are pointers.
KEPT = {"out": 0, "first": 8, "end": 12, "starts": 16, "ends": 20, "begin": 24, "rows": 28}
POINTERS = {"out": GLOBAL, "first": SHARED, "end": SHARED}
FIRST_BARRIER = 5  # number of the barrier at which the first warpgroup's warps meet, after the barriers of the block and of turns


@dataclass(frozen=True, slots=True)
class Number:
    """The number `name` + `const`, where `name` is a value from 0 to `bound` - 1. Constants are kept apart so that threads compute as few
    addresses as possible."""

    b: BlockCode
    name: str
    bound: int
    const: int

    def within(self, period: int) -> tuple[Number, Number]:
        """Return the quotient and the remainder of a division by `period`. No instruction is written if `bound` shows that the constant
        alone determines the quotient."""
        b, (quotient, rest) = self.b, divmod(self.const, period)
        if rest + self.bound <= period:
            return Number(b, "0", 1, quotient), Number(b, self.name, self.bound, rest)
        if rest:
            return Number(b, self.text(), self.const + self.bound, 0).within(period)
        divided, left = (b.code.op(f"{operation} i64 {self.name}, {period}") for operation in ("udiv", "urem"))
        return Number(b, divided, -(-self.bound // period), quotient), Number(b, left, period, 0)

    def text(self) -> str:
        """Return the number as an operand of LLVM IR."""
        return self.b.plus(self.name, str(self.const))


class Pages(BlockCode):
    """Emits the copies of pages to shared memory, and the waits for them."""

    def __init__(self, op: WgmmaAttend, code: Code, pointers: Sequence[str], dims: Sequence[int | str]) -> None:
        """Find the positions that the rows see, and the splits with these positions. Store the numbers of KEPT in shared memory. `pointers`
        and `dims` are those of the tile `op`."""
        super().__init__(code)
        self.op = op
        self.stride, self.token_heads, self.rows = (str(x) for x in dims)
        self.stages, self.top, self.weights, self.broken = (self.in_shared(p) for p in pointers[1:5])
        self.out, self.queries, *self.pools, self.tables = (self.in_global(pointers[i]) for i in (0, 5, 6, 7, 8))
        self.first, self.end = (self.in_shared(p) for p in pointers[9:])
        # Rows see keys from `low` to `high` - 1 only, and each row sees all keys from `starts` to `ends` - 1. Positions fit 32 bits.
        (self.low, self.starts), (self.ends, self.high) = self._extremes(self.first), self._extremes(self.end)
        # From here on, `warp` is the number of the warp in its warpgroup, not in its block.
        self.warpgroup, self.warp = code.op(f"udiv i64 {self.warp}, {WARPS}"), code.op(f"urem i64 {self.warp}, {WARPS}")
        self.is_second = code.op(f"icmp ne i64 {self.warpgroup}, 0")
        self.own = code.op(f"and i64 {self.thread}, {WARPGROUP - 1}")  # the number of the thread in its warpgroup
        self.begin = code.op(f"udiv i32 {self.low}, {SPLIT}")
        end = code.op(f"udiv i32 {self.add(self.high, str(SPLIT - 1))}, {SPLIT}")
        splits = code.op(f"call i32 @llvm.smax.i32(i32 {code.op(f'sub i32 {end}, {self.begin}')}, i32 0)")  # 0: rows see no keys at all
        self.splits = code.op(f"zext i32 {splits} to i64")  # turn t computes split `begin` + t, in stage t % stages
        self._keep()

    def _extremes(self, positions: str) -> list[str]:
        """Return the least and the largest of the positions of all tokens of the rows, over the lanes of a warp."""
        code, found = self.code, list[str]()
        last = code.op(f"udiv i64 {code.op(f'sub i64 {self.rows}, 1')}, {self.op.heads}")
        places = [self.plus(self.lane, str(first)) for first in range(0, -(-self.op.block_rows // self.op.heads), LANES)]
        tokens = [code.op(f"call i64 @llvm.smin.i64(i64 {place}, i64 {last})") for place in places]
        loaded = [code.op(f"load i32, {SHARED} {self.gep(SHARED, positions, token, 'i32')}, align 4") for token in tokens]
        for which in ("min", "max"):
            own = reduce(lambda a, b: code.op(f"call i32 @llvm.s{which}.i32(i32 {a}, i32 {b})"), loaded)
            found.append(self.over_warp(which, own))
        return found

    def _keep(self) -> None:
        """Let one thread store numbers that are seldom read. All threads read them again where they need them, so that no register holds
        them meanwhile. The first barrier of the block comes before the first such read."""
        code, places = self.code, (self.out, self.first, self.end)
        numbers = [
            code.op(f"ptrtoint {kind} {x} to i{bits}") for x, kind, bits in zip(places, (GLOBAL, SHARED, SHARED), (64, 32, 32), strict=True)
        ]
        kept = [("i64", numbers[0]), *(("i32", x) for x in (*numbers[1:], self.starts, self.ends, self.begin, self.short(self.rows)))]
        assert sum(int(kind[1:]) // 8 for kind, _ in kept) <= KEPT_BYTES
        with code.when(code.op(f"icmp eq i64 {self.thread}, 0")):
            for (kind, value), at in zip(kept, KEPT.values(), strict=True):
                place = self.gep(SHARED, self.stages, str(self.op.kept_at + at))
                code.do(f"store {kind} {value}, {SHARED} {place}, align {int(kind[1:]) // 8}")

    def kept(self, name: str) -> str:
        """Read the number `name` of KEPT again, which one thread has stored."""
        kind, place = "i64" if name == "out" else "i32", self.gep(SHARED, self.stages, str(self.op.kept_at + KEPT[name]))
        found = self.code.op(f"load volatile {kind}, {SHARED} {place}, align {int(kind[1:]) // 8}")
        if name not in POINTERS:
            return found
        return self.code.op(f"inttoptr {kind} {found} to {POINTERS[name]}")

    def thread_again(self) -> str:
        """Read the number of the thread once more. Values that are computed from it then take no registers before this place."""
        thread = self.code.op('call i32 asm sideeffect "mov.u32 $0, %tid.x;", "=r"()')
        return self.code.op(f"zext i32 {thread} to i64")

    def own_warpgroup(self) -> str:
        """Return the number of this thread's warpgroup."""
        return self.warpgroup

    def short(self, value: str) -> str:
        """Return a number in 32 bits."""
        return value if value.isdigit() else self.code.op(f"trunc i64 {value} to i32")

    def add(self, a: str, b: str) -> str:
        return self.code.op(f"add i32 {a}, {b}")

    def first_of(self, turn: str, of_split: int, begin: str = "") -> str:
        """Return the first position of a turn's split, or its first page: the number of the split times `of_split`, the number of positions
        or pages of a split. `begin` is the number of the first turn's split, if it was read again; without it, use `self.begin`."""
        return self.code.op(f"mul i32 {self.add(begin or self.begin, self.short(turn))}, {of_split}")

    # --- begin and end ---------------------------------------------------------------------------------------------------

    def open_stages(self) -> None:
        """Initialise the mbarriers, and wait until all threads see them."""
        self._each_barrier(f"mbarrier.init.shared.b64 [$0], {WARPGROUP};")
        self.fence()  # the tensor cores read queries that threads have written
        self.barrier()

    def close_stages(self) -> None:
        """Wait until both warpgroups have multiplied all stages, and end the mbarriers."""
        self.barrier()
        self._each_barrier("mbarrier.inval.shared.b64 [$0];")

    def _each_barrier(self, text: str) -> None:
        """Emit an instruction for the mbarriers: thread i runs it for mbarrier i."""
        code, thread = self.code, self.thread_again()
        with code.when(code.op(f"icmp ult i64 {thread}, {self.op.num_barriers}")):
            place = self.plus(self.times(thread, BARRIER_BYTES), str(self.op.barriers_at))
            self.assembly(text, [("r", self.number_of(self.gep(SHARED, self.stages, place)))])

    def meet(self) -> None:
        """Wait for all warps of this warpgroup. A warp waits only for the products of its own rows, but the memory that is overwritten next
        has an operand of all warps."""
        number = self.short(self.plus(self.own_warpgroup(), str(FIRST_BARRIER)))
        self.assembly(f"bar.sync $0, {WARPGROUP};", [("r", number)])

    # --- copies ----------------------------------------------------------------------------------------------------------

    def find_pages(self, turn: str) -> list[str]:
        """Load the number of the page of each chunk that this thread copies for a turn."""
        first = self.first_of(turn, PAGES)
        loaded: dict[str, str] = {}
        found: list[str] = []
        for chunk in self._chunks(self.own):
            page = chunk.within(self._per_page)[0].text()
            if page not in loaded:
                loaded[page] = self.page_at(self.add(first, self.short(page)))
            found.append(loaded[page])
        return found

    def page_at(self, number: str) -> str:
        """Load the number of a page of the sequence. A page of which no row sees a key may not exist; then return the number of the nearest
        page that rows see."""
        code = self.code
        least, most = (code.op(f"udiv i32 {position}, {PAGE}") for position in (self.low, self.add(self.high, "-1")))
        near = code.op(f"call i32 @llvm.smax.i32(i32 {code.op(f'call i32 @llvm.smin.i32(i32 {number}, i32 {most})')}, i32 {least})")
        place = self.gep(GLOBAL, self.tables, code.op(f"sext i32 {near} to i64"), "i32")
        return code.op(f"load i32, {GLOBAL} {place}, align 4")

    def copy_turn(self, turn: str, pages: Sequence[str]) -> None:
        """Copy pages for a turn: the first warpgroup copies keys, the second one values. `pages` is the result of `find_pages`. Do nothing
        after the last turn."""
        code = self.code
        with code.when(code.op(f"icmp slt i64 {turn}, {self.splits}")):
            code.either(self.is_second, lambda: self._copy_half(VALUES, turn, pages), lambda: self._copy_half(KEYS, turn, pages))

    def _copy_half(self, half: int, turn: str, pages: Sequence[str]) -> None:
        """Copy the keys or the values of a turn, and let the mbarrier count their arrival."""
        code, to = self.code, self.half_of(half, turn)
        own = code.op(f"and i64 {self.thread_again()}, {WARPGROUP - 1}")
        for chunk, held in zip(self._chunks(own), pages, strict=True):
            _, inside = chunk.within(self._per_page)
            first = self.gep(GLOBAL, self.pools[half], self.times(inside.name, CHUNK))
            page = self.gep(GLOBAL, first, self.times(code.op(f"mul i64 {code.op(f'zext i32 {held} to i64')}, {self.stride}"), 2))
            source = self.gep(GLOBAL, page, str(inside.const * CHUNK))
            (self._copy_keys, self._copy_values)[half](chunk, source, to, turn)
        self.assembly("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", [("r", self.barrier_of(half, turn))])

    def _chunks(self, own: str) -> list[Number]:
        """Return the indices, within the keys or the values of a split, of the chunks that the thread with the number `own` copies."""
        return [Number(self, own, WARPGROUP, n * WARPGROUP) for n in range(PAGES * self._per_page // WARPGROUP)]

    @property
    def _per_page(self) -> int:
        """The number of chunks of a page."""
        return PAGE * self.op.size * 2 // CHUNK

    def _copy_keys(self, chunk: Number, source: str, to: str, turn: str) -> None:
        """Copy one chunk: 8 keys of one element. Unlike values, keys that no row sees are copied in every `turn`, because their scores are
        masked."""
        op, code = self.op, self.code
        page, inside = chunk.within(self._per_page)
        element, half = inside.within(2)
        block, column = page.within(LINE_BYTES // (2 * CHUNK))
        swapped = code.op(f"xor i64 {code.op(f'xor i64 {half.text()}, {self.times(column.text(), 2)}')}, {element.within(EIGHT)[1].text()}")
        place = self.plus(self.times(block.name, op.size * LINE_BYTES), self.times(element.name, LINE_BYTES))
        own = self.gep(SHARED, to, self.plus(place, self.times(swapped, CHUNK)))
        self.copy(self.gep(SHARED, own, str(block.const * op.size * LINE_BYTES + element.const * LINE_BYTES)), source)

    def _copy_values(self, chunk: Number, source: str, to: str, turn: str) -> None:
        """Copy one chunk: 8 elements of one value. If no row sees the value's key in this turn's split, write zeros instead."""
        op, code = self.op, self.code
        key, column = chunk.within(op.size * 2 // CHUNK)
        position = self.add(self.first_of(turn, SPLIT), self.short(key.text()))
        distance, most = (code.op(f"sub i32 {x}, {self.low}") for x in (position, self.high))
        is_seen = code.op(f"icmp ult i32 {distance}, {most}")
        part, column = column.within(op.width // CHUNK)
        swap = key.within(LINE_BYTES // op.width)[0].within(op.width // CHUNK)[1]
        swapped = code.op(f"xor i64 {column.text()}, {swap.text()}")
        place = self.plus(self.times(part.name, SPLIT * op.width), self.times(key.name, op.width))
        own = self.gep(SHARED, to, self.plus(place, self.times(swapped, CHUNK)))
        to = self.gep(SHARED, own, str(part.const * SPLIT * op.width + key.const * op.width))
        self.copy(to, source, read=code.op(f"select i1 {is_seen}, i32 {CHUNK}, i32 0"))

    # --- stages and their mbarriers --------------------------------------------------------------------------------------

    def await_half(self, half: int, turn: str, part: int = 0) -> None:
        """Wait until the keys or the values of a turn, or part number `part` of them, have arrived."""
        code = self.code
        uses = code.op(f"udiv i32 {code.op(f'trunc i64 {turn} to i32')}, {self.op.stages}")  # number of earlier turns with the same stage
        self.await_phase(self.barrier_of(half, turn, part), code.op(f"and i32 {uses}, 1"))
        self.fence()  # the tensor cores read pages that threads have copied

    def half_of(self, half: int, turn: str) -> str:
        """Return the address of the keys or the values of a turn."""
        at = self.plus(self.times(self._slot(turn), self.op.stage_bytes), str(half * self.op.half_bytes))
        return self.gep(SHARED, self.stages, at)

    def _slot(self, turn: str) -> str:
        """Return the number of the stage of a turn."""
        return str(int(turn) % self.op.stages) if turn.isdigit() else self.code.op(f"urem i64 {turn}, {self.op.stages}")

    def barrier_of(self, half: int, turn: str, part: int = 0) -> str:
        """Return the address of the mbarrier of the keys or the values of a turn's stage, or of a part of them."""
        first = half * self.op.stages * self.op.parts + part
        at = self.plus(self.times(self._slot(turn), self.op.parts * BARRIER_BYTES), str(self.op.barriers_at + first * BARRIER_BYTES))
        return self.number_of(self.gep(SHARED, self.stages, at))
