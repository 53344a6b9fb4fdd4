"""Emit the copies of attention by `wgmma`: pages pass from global memory through stages, which are buffers in shared memory.

One warpgroup, the producer, fills the stages with the keys and the values of a split; the consumers multiply them. The keys of a stage have
two mbarriers, and so do its values: `full` signals that they have arrived, `free` that all consumers have multiplied them. Every thread of
the producer copies chunks of 16 bytes. Zeros are stored instead of pages, and instead of values, that no row sees.
"""

from __future__ import annotations

from collections.abc import Sequence

from compiler.llvm.ssa import Code
from compiler.machine.intrinsics.block_code import GLOBAL, LANES, SHARED, WARPS, BlockCode
from compiler.machine.intrinsics.mma_pages import SPLIT
from compiler.machine.intrinsics.wgmma_attend import LINE_BYTES, WARPGROUP, WARPGROUPS, WgmmaAttend
from runtime.cache_groups import PAGE_SIZE as PAGE

CHUNK = 16  # bytes
KEYS, VALUES = 0, 1  # halves of a stage
FULL, FREE = 0, 1  # kinds of mbarriers of a half
CONSUMERS = WARPGROUPS * WARPGROUP  # number of threads that multiply
PAGES = SPLIT // PAGE  # number of pages of a split
HALF_ROWS = 64  # number of rows of a warpgroup
BARRIER_BYTES = 8


class Pages(BlockCode):
    def __init__(self, op: WgmmaAttend, code: Code, pointers: Sequence[str], dims: Sequence[int | str]) -> None:
        super().__init__(code)
        self.op = op
        self.stride, self.rows, self.low, self.high, self.starts, self.ends = map(str, dims)
        self.c, self.top, self.weights, self.broken, self.queries = (self.in_shared(p) for p in pointers[:5])
        self.keys, self.values, self.tables = (self.in_global(p) for p in pointers[5:8])
        self.first, self.end = (self.in_shared(p) for p in pointers[8:])
        # From here on, `warp` is the number of the warp in its warpgroup, not in its block.
        self.warpgroup, self.warp = code.op(f"udiv i64 {self.warp}, {WARPS}"), code.op(f"urem i64 {self.warp}, {WARPS}")
        self.produces = code.op(f"icmp uge i64 {self.thread}, {CONSUMERS}")
        self.leads = code.op(f"icmp eq i64 {self.lane}, 0")  # one lane of each warp acts for the warp
        self.begin = self.divided(self.low, SPLIT)
        end = self.divided(self.plus(self.high, str(SPLIT - 1)), SPLIT)
        self.splits = code.op(f"sub i64 {end}, {self.begin}")  # in turn t, the producer fills stage t % stages with split `begin` + t

    # --- begin and end ---------------------------------------------------------------------------------------------------

    def open_stages(self) -> None:
        """Initialise the mbarriers, and wait until all threads see them."""
        code, op = self.code, self.op
        has_two = code.op(f"icmp sgt i64 {self.rows}, {HALF_ROWS}")
        count = {FULL: str(WARPGROUP), FREE: code.op(f"select i1 {has_two}, i32 {WARPGROUPS * WARPS}, i32 {WARPS}")}
        with code.when(code.op(f"icmp eq i64 {self.thread}, {CONSUMERS}")):
            for half in (KEYS, VALUES):
                for kind in (FULL, FREE):
                    for stage in range(op.stages):
                        operands = [("r", self._barrier_of(half, kind, str(stage))), ("r", count[kind])]
                        self.assembly("mbarrier.init.shared.b64 [$0], $1;", operands)
            self.assembly("fence.mbarrier_init.release.cluster;")
        self.fence()  # the tensor cores read queries that threads have written
        self.barrier()

    def close_stages(self) -> None:
        """End the mbarriers, after all consumers have multiplied all stages."""
        with self.code.when(self.code.op(f"icmp eq i64 {self.thread}, 0")):
            for half in (KEYS, VALUES):
                for kind in (FULL, FREE):
                    for stage in range(self.op.stages):
                        self.assembly("mbarrier.inval.shared.b64 [$0];", [("r", self._barrier_of(half, kind, str(stage)))])

    # --- the producer ----------------------------------------------------------------------------------------------------

    def produce(self) -> None:
        code = self.code
        own = code.op(f"sub i64 {self.thread}, {CONSUMERS}")
        with code.loop("0", self.splits) as turn:
            slot, uses = self._slot(turn), self._uses(turn)
            pages = self._pages(self.plus(self.begin, turn))
            for half, copy in ((KEYS, self._copy_keys), (VALUES, self._copy_values)):
                with code.when(code.op(f"icmp ne i32 {uses}, 0")):
                    parity = code.op(f"and i32 {code.op(f'sub i32 {uses}, 1')}, 1")
                    self.await_phase(self._barrier_of(half, FREE, slot), parity)
                copy(own, self.plus(self.begin, turn), self.half_of(half, slot), pages)
                self.assembly("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", [("r", self._barrier_of(half, FULL, slot))])

    def _pages(self, split: str) -> list[tuple[str, str]]:
        """Return for each page of a split its distance in bytes from page 0, and how many bytes of its chunks are read: none if no row sees
        a key of the page. Its number may then not exist, so it is that of the nearest page that rows see."""
        code = self.code
        least, most = self.divided(self.low, PAGE), self.divided(self.plus(self.high, "-1"), PAGE)
        found: list[tuple[str, str]] = []
        for page in range(PAGES):
            number = self.plus(self.times(split, PAGES), str(page))
            near = code.op(f"call i64 @llvm.smax.i64(i64 {code.op(f'call i64 @llvm.smin.i64(i64 {number}, i64 {most})')}, i64 {least})")
            held = code.op(f"load i32, {GLOBAL} {self.gep(GLOBAL, self.tables, near, 'i32')}, align 4")
            read = code.op(f"select i1 {code.op(f'icmp eq i64 {near}, {number}')}, i32 {CHUNK}, i32 0")
            found.append((self.times(code.op(f"mul i64 {code.op(f'sext i32 {held} to i64')}, {self.stride}"), 2), read))
        return found

    def _copy_keys(self, own: str, split: str, to: str, pages: Sequence[tuple[str, str]]) -> None:
        """Copy this thread's chunks of keys. Chunk c of a page has the keys c % 2 * 8 .. + 7 of element c / 2."""
        op, code = self.op, self.code
        for number in range(op.key_bytes // CHUNK // WARPGROUP):
            page, chunk = self._position(own, number, PAGE * op.size * 2 // CHUNK)
            at, read = self._of_page(pages, page)
            element = code.op(f"lshr i64 {chunk}, 1")
            line, column = self._within(page, LINE_BYTES // (PAGE * 2))
            column = self.plus(self.times(column, 2), code.op(f"and i64 {chunk}, 1"))
            swapped = code.op(f"xor i64 {column}, {code.op(f'and i64 {element}, 7')}")
            place = self.plus(self.times(line, op.size * LINE_BYTES), self.plus(self.times(element, LINE_BYTES), self.times(swapped, CHUNK)))
            source = self.gep(GLOBAL, self.gep(GLOBAL, self.keys, at), self.times(chunk, CHUNK))
            self.copy(self.gep(SHARED, to, place), source, read=read)

    def _copy_values(self, own: str, split: str, to: str, pages: Sequence[tuple[str, str]]) -> None:
        """Copy this thread's chunks of values: 8 elements of a value each."""
        op, code = self.op, self.code
        of_value, of_part = op.value_size * 2 // CHUNK, op.width // CHUNK
        for number in range(SPLIT * of_value // WARPGROUP):
            key, chunk = self._position(own, number, of_value)
            page, inside = self._within(key, PAGE)
            at, _ = self._of_page(pages, page)
            position = self.plus(self.times(split, SPLIT), key)
            begins, ends = code.op(f"icmp sge i64 {position}, {self.low}"), code.op(f"icmp slt i64 {position}, {self.high}")
            read = code.op(f"select i1 {code.op(f'and i1 {begins}, {ends}')}, i32 {CHUNK}, i32 0")
            part, column = self._within(chunk, of_part)
            row = self.times(key, op.width)
            swap = code.op(f"and i64 {code.op(f'lshr i64 {row}, 7')}, {of_part - 1}")
            swapped = code.op(f"xor i64 {column}, {swap}")
            place = self.plus(self.times(part, SPLIT * op.width), self.plus(row, self.times(swapped, CHUNK)))
            source = self.plus(self.times(inside, op.value_size * 2), self.times(chunk, CHUNK))
            self.copy(self.gep(SHARED, to, place), self.gep(GLOBAL, self.gep(GLOBAL, self.values, at), source), read=read)

    def _position(self, own: str, number: int, period: int) -> tuple[str, str]:
        """Return the quotient and the remainder of the index of a thread's chunk, `number` * 128 + own, divided by `period`."""
        if period % WARPGROUP == 0:
            quotient, rest = divmod(number * WARPGROUP, period)
            return str(quotient), self.plus(own, str(rest))
        if WARPGROUP % period == 0:
            first, rest = self._within(own, period)
            return self.plus(first, str(number * WARPGROUP // period)), rest
        return self._within(self.plus(own, str(number * WARPGROUP)), period)

    def _within(self, a: str, b: int) -> tuple[str, str]:
        """Return a / b and a % b."""
        if a.isdigit():
            return str(int(a) // b), str(int(a) % b)
        return self.code.op(f"udiv i64 {a}, {b}"), self.code.op(f"urem i64 {a}, {b}")

    def _of_page(self, pages: Sequence[tuple[str, str]], page: str) -> tuple[str, str]:
        """Return what `_pages` found of a page whose number in the split may differ between threads."""
        if page.isdigit():
            return pages[int(page)]
        at, read = pages[0]
        for number, (other_at, other_read) in enumerate(pages[1:], 1):
            is_it = self.code.op(f"icmp eq i64 {page}, {number}")
            at = self.code.op(f"select i1 {is_it}, i64 {other_at}, i64 {at}")
            read = self.code.op(f"select i1 {is_it}, i32 {other_read}, i32 {read}")
        return at, read

    # --- the consumers ---------------------------------------------------------------------------------------------------

    def await_half(self, half: int, turn: str) -> str:
        """Wait until the keys or the values of a turn have arrived. Return their address."""
        slot = self._slot(turn)
        self.await_phase(self._barrier_of(half, FULL, slot), self.code.op(f"and i32 {self._uses(turn)}, 1"))
        self.fence()  # the tensor cores read what the producer has copied
        return self.half_of(half, slot)

    def release_half(self, half: int, turn: str) -> None:
        """Signal that this warp has multiplied the keys or the values of a turn. Do not signal if their stage is not filled again."""
        code = self.code
        is_filled = code.op(f"icmp slt i64 {code.op(f'add i64 {turn}, {self.op.stages}')}, {self.splits}")
        with code.when(code.op(f"and i1 {self.leads}, {is_filled}")):
            self.assembly("mbarrier.arrive.shared::cta.b64 _, [$0];", [("r", self._barrier_of(half, FREE, self._slot(turn)))])

    # --- stages and their mbarriers --------------------------------------------------------------------------------------

    def half_of(self, half: int, slot: str) -> str:
        at = self.plus(self.times(slot, self.op.stage_bytes), str(half * self.op.key_bytes))
        return self.gep(SHARED, self.c, at)

    def _slot(self, turn: str) -> str:
        """Return the number of the stage of a turn. Division of 32 bits is faster than of 64."""
        short = self.code.op(f"trunc i64 {turn} to i32")
        return self.code.op(f"zext i32 {self.code.op(f'urem i32 {short}, {self.op.stages}')} to i64")

    def _uses(self, turn: str) -> str:
        """Return how many earlier turns used the same stage."""
        return self.code.op(f"udiv i32 {self.code.op(f'trunc i64 {turn} to i32')}, {self.op.stages}")

    def _barrier_of(self, half: int, kind: int, slot: str) -> str:
        """Return the address of an mbarrier."""
        number = (2 * half + kind) * self.op.stages
        at = self.plus(self.times(slot, BARRIER_BYTES), str(self.op.barriers_at + number * BARRIER_BYTES))
        return self.number_of(self.gep(SHARED, self.c, at))
