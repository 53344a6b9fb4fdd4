"""The accesses of a launch to global memory, kept per piece of a few bytes: who wrote it last, who has read it since, and when a thread
last read it as a constant.

Two accesses of different threads race if one of them is a write, and nothing orders them. Within a block, barriers order accesses, as those
to shared memory (shadow.py). Between blocks, only signals do. A thread gives a signal by a fence for the whole card, followed by an atomic
or a strong store. A thread receives it by an atomic or a strong load of the same word, followed by such a fence. Atomics, stores and loads
of the block's scope (.cta) are no signals between blocks. A signal orders

    what its thread did before the first fence, and what other threads of its block did before the last barrier in front of this fence;
    before what the receiving thread does after the second fence, and what other threads of its block do after their next barrier.

So a fence in front of a barrier does not publish what other threads have written, though hardware may do so.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gpu.ptx.faults import Fault
from tests.gpu.ptx.memory import MANY
from tests.gpu.ptx.native import address, native
from tests.gpu.ptx.program import Array, Index

WARP = 32


@dataclass(slots=True, eq=False)
class Signal:
    """What a word tells threads that read it: until which time accesses are ordered before theirs."""

    blocks: NDArray[np.int32]  # by block of the launch: the accesses of all its threads before this time
    threads: dict[int, int]  # by thread of the launch: its own accesses before this time

    def joined(self, other: Signal) -> Signal:
        threads = {number: max(self.threads.get(number, 0), other.threads.get(number, 0)) for number in self.threads | other.threads}
        return Signal(np.maximum(self.blocks, other.blocks), threads)


class Races:
    """The accesses of the threads of a wave."""

    def __init__(self, wave: Any) -> None:
        self.wave, self.history, self.begin = wave, wave.memory.history, wave.launch.begin
        self.shift = wave.program.global_grain.bit_length() - 1
        if (needed := wave.memory.top >> self.shift) > len(self.history.writer):
            self.history.cover(needed)
        self.signals: dict[int, Signal] = wave.launch.signals
        self.num_blocks = int(np.prod(wave.launch.grid))
        self.block = wave.blocks[wave.slot].astype(np.int32)  # for each thread, the number of its block in the launch
        self.number = self.block * wave.per_block + wave.thread.astype(np.int32)
        self._native, epoch = native(), wave.shadow.epoch
        history = self.history
        arrays = (
            history.writer,
            history.write_time,
            history.reader,
            history.read_time,
            history.constant_time,
            self.number,
            self.block,
            epoch,
        )
        # `struct races` of native.c
        self._struct = (ctypes.c_int64 * 11)(*(each.ctypes.data for each in arrays), self.shift, self.begin, wave.per_block)
        # For each thread: when it executed its last fence for the whole card, and what barriers had ordered before it then.
        self.fenced, self.ordered = (np.zeros(len(wave.threads), np.int32) for _ in range(2))
        self.received: dict[int, Signal] = {}  # by thread: what it has read since its last fence
        self.known: dict[int, list[tuple[int, int, Signal]]] = {}  # by block: what a thread knows since a time

    # --- accesses ----------------------------------------------------------------------------------------------------------

    def _pieces(self, offsets: Array, num_bytes: int) -> Array:
        """Return the indices of the pieces that each access touches: [threads, pieces]."""
        return (offsets >> self.shift)[:, None] + np.arange(max(num_bytes >> self.shift, 1))

    def _accesses(self, threads: Array, offsets: Array, num_bytes: int) -> tuple[Any, ...]:
        """Return the arguments by which native.c finds the pieces that each access touches, and the time. They are addresses, so the caller
        keeps the arrays."""
        return self._struct, address(threads), address(offsets), len(threads), max(num_bytes >> self.shift, 1), self.wave.shadow.time

    def read(self, index: Index, offsets: Array, num_bytes: int, *, constant: bool = False) -> None:
        """Note reads. A read of a constant may return what the memory held before the launch, or what a later write stores."""
        threads = self.wave.threads[index]
        if self._native is not None and self._native.global_read(*self._accesses(threads, offsets, num_bytes), constant):
            return
        history, pieces = self.history, self._pieces(offsets, num_bytes)
        own = np.broadcast_to(self.number[index][:, None], pieces.shape)
        written = history.write_time[pieces]
        if (written >= self.begin).any():
            if constant:
                self._refuse(written >= self.begin, index, history.writer[pieces], "reads as a constant what the launch writes: {}")
            self._check(index, own, history.writer[pieces], written, "reads what {} wrote")
        if constant:
            history.constant_time[pieces] = self.wave.shadow.time
        # Forget readers of the block that a barrier has ordered before this read: what is ordered after it is ordered after them.
        before, times, block = history.reader[pieces], history.read_time[pieces], self.block[index][:, None]
        past = (self._block_of(before) == block) & (times < self.wave.shadow.epoch[index][:, None])
        together = (times >= self.begin) & (before != own) & ~past
        readers = np.where(together, self._together(before, own), own)
        history.reader[pieces], history.read_time[pieces] = readers, self.wave.shadow.time
        if (lost := history.reader[pieces] != readers).any():  # several threads read a piece at once
            at = pieces[lost]
            together = self._together(history.reader[at], readers[lost])
            history.reader[at] = together
            history.reader[at[together == MANY]] = MANY

    def write(self, index: Index, offsets: Array, num_bytes: int) -> None:
        threads = self.wave.threads[index]
        done = 0 if self._native is None else self._native.global_write(*self._accesses(threads, offsets, num_bytes))
        if done == 1:
            return
        history, pieces = self.history, self._pieces(offsets, num_bytes)
        own = np.broadcast_to(self.number[index][:, None], pieces.shape)
        if not done:
            self._overwrite(index, own, pieces)
        self._refuse(history.writer[pieces] != own, index, history.writer[pieces], "writes at the same time as {}")

    def _overwrite(self, index: Index, own: Array, pieces: Array) -> None:
        history = self.history
        for who, times, what in (
            (history.writer, history.write_time, "writes over what {} wrote"),
            (history.reader, history.read_time, "writes over what {} read"),
        ):
            found = times[pieces]
            if (found >= self.begin).any():
                self._check(index, own, who[pieces], found, what)
        self._refuse(history.constant_time[pieces] >= self.begin, index, own, "writes what the launch has read as a constant")
        history.writer[pieces], history.write_time[pieces], history.read_time[pieces] = own, self.wave.shadow.time, 0

    def _together(self, a: Array, b: Array) -> Array:
        """Return who stands for the readers `a` and `b` together."""
        blocks = self._block_of(a)
        return np.where((blocks == self._block_of(b)) & (blocks >= 0), MANY - 1 - blocks, MANY)

    def _block_of(self, who: Array) -> Array:
        """Return the block of a thread, or of several threads of one block; -1 for threads of several blocks."""
        return np.where(who >= 0, who // self.wave.per_block, MANY - 1 - who)

    # --- order -------------------------------------------------------------------------------------------------------------

    def _check(self, index: Index, own: Array, others: Array, times: Array, message: str) -> None:
        """Raise a fault if accesses of `others`, at some times, are not ordered before those of the threads `own` now."""
        wave, threads = self.wave, self.wave.threads[index]
        wrong = (times >= self.begin) & (others != own)
        if not wrong.any():
            return
        rows = np.flatnonzero(wrong.any(1))
        threads, own, others, times, wrong = threads[rows], own[rows], others[rows], times[rows], wrong[rows]
        blocks = self._block_of(others)
        same = blocks == self.block[threads][:, None]
        same_warp = same & (others >= 0) & (others % wave.per_block // WARP == own % wave.per_block // WARP)
        epoch = wave.shadow.epoch[threads][:, None]
        epoch = np.where(same_warp, np.maximum(epoch, wave.shadow.warp_epoch[threads][:, None]), epoch)
        wrong &= ~(same & (times < epoch))
        if wave.cluster > 1:
            near = (blocks // wave.cluster == self.block[threads][:, None] // wave.cluster) & ~same & (blocks >= 0)
            wrong &= ~(near & (times < wave.known.times[threads[:, None], blocks % wave.cluster]))
        if (wrong & ~same).any():
            for block in np.unique(self.block[threads]):
                mine = self.block[threads] == block
                for thread, since, signal in self.known.get(int(block), ()):
                    knows = mine & ((threads == thread) | (wave.shadow.epoch[threads] > since))
                    ordered = (blocks >= 0) & (times < signal.blocks[np.maximum(blocks, 0)])
                    for number, time in signal.threads.items():
                        ordered |= (others == number) & (times < time)
                    wrong &= ~(knows[:, None] & ordered)
        self._refuse(wrong, threads, others, f"a race in global memory: {message}, and nothing orders them")

    def _refuse(self, wrong: Array, index: Index, others: Array, message: str) -> None:
        if wrong.any():
            row, column = (int(n[0]) for n in np.nonzero(wrong))
            other = int(others[row, column])
            block, thread = divmod(other, self.wave.per_block) if other >= 0 else (int(self._block_of(np.array(other))), -1)
            who = f"thread {thread} of block {block}" if thread >= 0 else f"threads of block {block}" if block >= 0 else "several blocks"
            raise Fault(f"{message.format(who)}: {self.wave.name(int(self.wave.threads[index][row]))}")

    # --- signals -----------------------------------------------------------------------------------------------------------

    def fence(self, index: Index) -> None:
        """Apply a fence for the whole card."""
        threads, time = self.wave.threads[index], self.wave.shadow.next_time()
        self.fenced[threads], self.ordered[threads] = time, self.wave.shadow.epoch[threads]
        for thread in self.received.keys() & set(threads.tolist()):
            self.known.setdefault(int(self.block[thread]), []).append((thread, time, self.received.pop(thread)))

    def signal(self, index: Index, offsets: Array, *, reads: bool, writes: bool) -> None:
        """Note atomics (which read and write), or strong loads or stores."""
        for thread, offset in zip(self.wave.threads[index].tolist(), offsets.tolist(), strict=True):
            found = self.signals.get(offset)
            if reads and found is not None:
                before = self.received.get(thread)
                self.received[thread] = found if before is None else before.joined(found)
            if writes:
                given = self._given(thread)
                self.signals[offset] = given if found is None or not reads else found.joined(given)

    def _given(self, thread: int) -> Signal:
        """Return what a thread publishes: what its last fence has ordered, and what it knew of other blocks at that time."""
        block, given = (
            int(self.block[thread]),
            Signal(np.zeros(self.num_blocks, np.int32), {int(self.number[thread]): int(self.fenced[thread])}),
        )
        given.blocks[block] = self.ordered[thread]
        for knows, since, signal in self.known.get(block, ()):
            if knows == thread or self.ordered[thread] > since:
                given = given.joined(signal)
        return given
