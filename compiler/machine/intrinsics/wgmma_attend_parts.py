"""Emit attention by `wgmma` to keys and values of which shared memory has room for one stage only. The stage is cut into parts.

A part is 64 elements of all keys, or of all values, of a split. It has an mbarrier of its own, and a warpgroup waits for a part just before
it multiplies the part. A part is filled for the next turn as soon as both warpgroups have multiplied it. So most parts are on their way
while others are multiplied.

Heads of more than 128 elements: the second warpgroup multiplies each part last, and copies it for the next turn right after that.

Latents: values are the beginnings of keys, so one copy serves both products. Both warpgroups compute the scores and weights of the same 64
rows, and each multiplies half of every value. So neither needs weights of the other, and the means of each fit in registers. The warpgroups
do not take turns, because the next keys need the memory of this turn's values, which both must have multiplied before. After both have
multiplied the keys, each warpgroup copies the parts whose values it alone multiplies. Values that no row sees are not all replaced by
zeros, because a chunk that is copied has 8 keys: zeros replace keys after the last one that a row sees. If a key before the first one that
a row sees is not finite, the mean is not finite; then `broken` is set, and the rows are computed again by other code.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from compiler.machine.intrinsics.block_code import EIGHT, GLOBAL, SHARED
from compiler.machine.intrinsics.mma_pages import SPLIT
from compiler.machine.intrinsics.wgmma_attend import LINE_BYTES, PART
from compiler.machine.intrinsics.wgmma_attend_code import SWIZZLES, AttendCode, Right
from compiler.machine.intrinsics.wgmma_attend_pages import BARRIER_BYTES, CHUNK, KEYS, PAGES, VALUES, WARPGROUP
from runtime.cache_groups import PAGE_SIZE as PAGE

LINE_PAGES = LINE_BYTES // (2 * PAGE)  # number of pages whose keys share a line


class PartCode(AttendCode):
    """Emits attention for heads of more than 128 elements."""

    def own_warpgroup(self) -> str:
        """Compute the number of this thread's warpgroup again, so that no register holds it meanwhile."""
        return self.code.op(f"udiv i64 {self.thread_again()}, {WARPGROUP}")

    def find_pages(self, turn: str) -> list[str]:
        """Load the number of one page of a turn. Every eighth lane has the same page."""
        page = self.code.op(f"and i64 {self.thread_again()}, {PAGES - 1}")
        with self._near_bounds():
            return [self.page_at(self.add(self.first_of(turn, PAGES), self.short(page)))]

    def copy_turn(self, turn: str, pages: Sequence[str]) -> None:
        """Copy all keys and values of the first turn: the first warpgroup copies keys, the second one values."""
        for part in range(self.op.parts):
            with self.code.when(self.code.op(f"icmp slt i64 {turn}, {self.splits}")):
                self.code.either(
                    self.is_second,
                    lambda part=part: self._copy_values_part(turn, part, pages),
                    lambda part=part: self.copy_keys_part(turn, part, pages),
                )

    def _score(self, turn: str) -> None:
        """Multiply the keys of a turn part by part, and let the other warpgroup multiply. Meanwhile, the second warpgroup begins to copy
        keys for the next turn."""
        following, last = self.plus(turn, "1"), self.op.parts - 1
        dots = self._multiply_keys(turn)
        pages = self.find_pages(following)
        for part in range(last):
            self.assembly(f"wgmma.wait_group.sync.aligned {last - part};")
            self._copy_as_second(KEYS, following, part, pages)
        self.store_floats(self._await_product(dots, 0), self.scores)
        self._let_other()
        self._copy_as_second(KEYS, following, last, pages)

    def _multiply_keys(self, turn: str) -> list[str]:
        """Return this thread's products of queries and keys. Await each part of the keys just before it is multiplied."""
        dots: list[str] = []
        for part in range(self.op.parts):
            self.await_half(KEYS, turn, part)
            dots = self._multiply_elements(self.half_of(KEYS, turn), range(part * PART, (part + 1) * PART, PAGE), dots)
        return dots

    def _await_values(self, turn: str) -> None:
        """Wait for all parts of the values: waits between their products would take registers."""
        for part in range(self.op.parts):
            self.await_half(VALUES, turn, part)

    def _before(self, means: Sequence[str]) -> list[str]:
        """Return the earlier means, times their factors. The assembler may compute them later."""
        return list(means)

    def _await_next_keys(self, turn: str) -> None:
        """Do nothing: each part of the keys is awaited just before it is multiplied."""

    def _multiplied_values(self, following: str, end: int) -> None:
        """If a part of the values has been multiplied, copy it for the turn `following` in the second warpgroup."""
        if end % PART == 0:
            self._copy_as_second(VALUES, following, end // PART - 1, self.find_pages(following))

    def _copy_as_second(self, half: int, turn: str, part: int, pages: Sequence[str]) -> None:
        """In the second warpgroup, wait until its warps no longer read the memory of a part, and copy the part for a turn. Do nothing if
        there is no such turn."""
        code = self.code
        with code.when(code.op(f"and i1 {self.is_second}, {code.op(f'icmp slt i64 {turn}, {self.splits}')}")):
            self.meet()
            (self.copy_keys_part, self._copy_values_part)[half](turn, part, pages)

    @contextmanager
    def _near_bounds(self) -> Generator[None]:
        """Inside the `with`, compute again the numbers that depend on the bounds of positions, so that they take no registers elsewhere."""
        bounds = self.low, self.high, self.begin
        self.low, self.high = (self.code.op(f'call i32 asm sideeffect "", "=r,0"(i32 {x})') for x in bounds[:2])
        self.begin = self.code.op(f"udiv i32 {self.low}, {SPLIT}")
        yield
        self.low, self.high, self.begin = bounds

    # --- copies of a part: each thread copies one chunk of each page -----------------------------------------------------

    def copy_keys_part(self, turn: str, part: int, pages: Sequence[str], first: str = "0") -> None:
        """Copy part number `first` + `part` of the keys of a turn. A line has 64 keys of one element; a chunk has 8 of them."""
        code, to = self.code, self.half_of(KEYS, turn)
        own = code.op(f"and i64 {self.thread_again()}, {WARPGROUP - 1}")
        element, half = code.op(f"lshr i64 {own}, 1"), code.op(f"and i64 {own}, 1")
        swapped = code.op(f"xor i64 {half}, {code.op(f'and i64 {element}, {EIGHT - 1}')}")
        line = self.gep(SHARED, to, self.plus(self.times(element, LINE_BYTES), self.times(first, PART * LINE_BYTES)))
        columns = [self.times(code.op(f"xor i64 {swapped}, {2 * column}"), CHUNK) for column in range(LINE_PAGES)]
        places = [self.gep(SHARED, line, column) for column in columns]
        source = self.gep(GLOBAL, self.pools[KEYS], self.plus(self.times(own, CHUNK), self.times(first, PART * 2 * CHUNK)))
        left = self._keys_left(turn, half)
        for n, page in enumerate(self._page_places(source, pages, part * PART * 2 * CHUNK)):
            block, column = divmod(n, LINE_PAGES)
            at = block * self.op.size * LINE_BYTES + part * PART * LINE_BYTES
            self.copy(self.gep(SHARED, places[column], str(at)), page, read=self._read_bytes(left, n))
        self._announce(self.barrier_of(KEYS, turn, part), first)

    def _keys_left(self, turn: str, half: str) -> str | None:
        """Return None: keys that no row sees need not be replaced by zeros, because their scores are masked. For latents, return the number
        of keys from the first key of a thread's first chunk to the last one that some row sees; it may be negative."""
        return None

    def _read_bytes(self, left: str | None, page: int) -> str | None:
        """Return how many bytes of the chunk of a page are read, or None for all. `left` is the result of `_keys_left`."""
        return None

    def _copy_values_part(self, turn: str, part: int, pages: Sequence[str]) -> None:
        """Copy a part of the values of a turn. A line has 64 elements of one value; a chunk has 8 of them."""
        op, code, to = self.op, self.code, self.half_of(VALUES, turn)
        own = code.op(f"and i64 {self.thread_again()}, {WARPGROUP - 1}")
        key, column = code.op(f"lshr i64 {own}, 3"), code.op(f"and i64 {own}, {EIGHT - 1}")
        swapped = code.op(f"xor i64 {column}, {code.op(f'and i64 {key}, {EIGHT - 1}')}")
        place = self.gep(SHARED, to, self.plus(self.times(key, LINE_BYTES), self.times(swapped, CHUNK)))
        source = self.gep(GLOBAL, self.pools[VALUES], self.plus(self.times(key, op.size * 2), self.times(column, CHUNK)))
        with self._near_bounds():
            position = self.add(self.first_of(turn, SPLIT), self.short(key))
            distance, most = (code.op(f"sub i32 {x}, {self.low}") for x in (position, self.high))
        for n, page in enumerate(self._page_places(source, pages, part * PART * 2)):
            is_seen = code.op(f"icmp ult i32 {self.add(distance, str(n * PAGE))}, {most}")
            to = self.gep(SHARED, place, str(part * SPLIT * LINE_BYTES + n * PAGE * LINE_BYTES))
            self.copy(to, page, read=code.op(f"select i1 {is_seen}, i32 {CHUNK}, i32 0"))
        self._announce(self.barrier_of(VALUES, turn, part), "0")

    def _page_places(self, source: str, pages: Sequence[str], at: int) -> list[str]:
        """Return an address in each page of the turn. `source` is an address in page 0 of the cache: find the same place in the other page,
        and add `at` bytes."""
        code, (own,), found = self.code, pages, list[str]()
        for n in range(PAGES):
            held = code.op(f"call i32 @llvm.nvvm.shfl.sync.idx.i32(i32 -1, i32 {own}, i32 {n}, i32 31)")
            distance = self.times(code.op(f"mul i64 {code.op(f'zext i32 {held} to i64')}, {self.stride}"), 2)
            found.append(self.gep(GLOBAL, self.gep(GLOBAL, source, distance), str(at)))
        return found

    def _announce(self, barrier: str, first: str) -> None:
        """Let an mbarrier, `first` mbarriers after the given one, count the arrival of this thread's copies."""
        place = self.add(barrier, self.short(self.times(first, BARRIER_BYTES)))
        self.assembly("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", [("r", place)])


class LatentCode(PartCode):
    """Emits attention for latents: keys whose beginnings are the values."""

    def copy_turn(self, turn: str, pages: Sequence[str]) -> None:
        """Copy all keys of the first turn: each warpgroup copies the same parts as for later turns."""
        with self.code.when(self.code.op(f"icmp slt i64 {turn}, {self.splits}")):
            for part in range(self._value_parts):
                self._copy_own(turn, part, pages)
            self._copy_rest(turn, pages)

    def _score(self, turn: str) -> None:
        """Multiply the keys of a turn, and wait until the other warpgroup has done the same. Then copy the parts of keys that contain no
        values, for the next turn."""
        following = self.plus(turn, "1")
        self.store_floats(self._await_product(self._multiply_keys(turn), 0), self.scores)
        self.barrier()
        pages = self.find_pages(following)
        with self.code.when(self.code.op(f"icmp slt i64 {following}, {self.splits}")):
            self._copy_rest(following, pages)

    def _await_values(self, turn: str) -> None:
        """Do nothing: the values have arrived with the keys."""

    def _multiply_values(self, weights: Sequence[str], turn: str, part: range) -> list[str]:
        """Return the products of weights and some elements of this warpgroup's half of the values. Along the summed axis, 64 keys are
        adjacent."""
        op = self.op
        own = self.plus(self.times(self.own_warpgroup(), op.columns * LINE_BYTES), str(part.start * LINE_BYTES))
        right = Right(self.gep(SHARED, self.half_of(KEYS, turn), own), 1, EIGHT * LINE_BYTES // CHUNK, SWIZZLES[LINE_BYTES])
        places = [page // LINE_PAGES * op.size * LINE_BYTES + page % LINE_PAGES * PAGE * 2 for page in range(PAGES)]
        return self._multiply_weights(weights, right, [place // CHUNK for place in places], len(part), "0")

    def _multiplied_values(self, following: str, end: int) -> None:
        if end % PART == 0:
            with self.code.when(self.code.op(f"icmp slt i64 {following}, {self.splits}")):
                self.meet()
                self._copy_own(following, end // PART - 1, self.find_pages(following))

    @property
    def _value_parts(self) -> int:
        """The number of parts whose values a warpgroup multiplies."""
        return self.op.columns // PART

    def _copy_own(self, turn: str, part: int, pages: Sequence[str]) -> None:
        """Copy one of the parts whose values this warpgroup multiplies."""
        self.copy_keys_part(turn, part, pages, self.times(self.own_warpgroup(), self._value_parts))

    def _copy_rest(self, turn: str, pages: Sequence[str]) -> None:
        """In the first warpgroup, copy the parts without values."""
        with self.code.when(self.code.op(f"xor i1 {self.is_second}, true")):
            for part in range(2 * self._value_parts, self.op.parts):
                self.copy_keys_part(turn, part, pages)

    def _keys_left(self, turn: str, half: str) -> str | None:
        first = self.add(self.first_of(turn, SPLIT), self.short(self.times(half, EIGHT)))
        return self.code.op(f"sub i32 {self.high}, {first}")

    def _read_bytes(self, left: str | None, page: int) -> str | None:
        code = self.code
        count = code.op(f"call i32 @llvm.smax.i32(i32 {self.add(str(left), str(-page * PAGE))}, i32 0)")
        return code.op(f"shl i32 {code.op(f'call i32 @llvm.smin.i32(i32 {count}, i32 {EIGHT})')}, 1")

    # --- the warpgroups do not take turns --------------------------------------------------------------------------------

    def _await_turn(self, sums: Sequence[str] = ()) -> None: ...

    def _let_other(self) -> None: ...
