"""The access history of shared memory, kept per piece of a few bytes: last writer and reader, copies in flight, and reads by the matrix
units.

Only barriers order the accesses of different threads. A thread that passes a barrier starts a new epoch: all accesses that other threads
made before the epoch are ordered before the thread's later accesses. A warp barrier orders only the lanes of the warp. Atomics, and
volatile or acquiring loads, count as barriers, because threads signal by them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gpu.ptx.faults import Fault
from tests.gpu.ptx.native import address, native

NOBODY, SEVERAL, ASYNC = -1, -2, -3
Array = NDArray[Any]


class Shadow:
    def __init__(self, num_bytes: int, grain: int, wave: Any, time: int) -> None:
        """`grain` is the size of a piece in bytes, a power of two. It is at most the size of the narrowest access in the kernel. `time` is
        when the wave begins."""
        self.grain, self.grain_log2, self.wave = grain, grain.bit_length() - 1, wave
        count = num_bytes // grain
        self.writer, self.reader = (np.full(count, NOBODY, np.int32) for _ in range(2))
        self.write_time, self.read_time = (np.zeros(count, np.int32) for _ in range(2))
        # For each piece: number of copies in flight that will write it, and of copies and products in flight that read it.
        self.arriving, self.leaving = (np.zeros(count, np.int16) for _ in range(2))
        # Whether a thread has written the piece, and no fence.proxy.async has made the write visible to asynchronous copies and products.
        self.generic = np.zeros(count, bool)
        self.time = time
        self.epoch, self.warp_epoch = (np.zeros(len(wave.threads), np.int32) for _ in range(2))
        self._native = native()
        history = (self.writer, self.reader, self.write_time, self.read_time, self.arriving, self.leaving, self.generic)
        addresses = [each.ctypes.data for each in (*history, self.epoch, self.warp_epoch, wave.warp)]
        self._struct = (ctypes.c_int64 * 11)(*addresses, self.grain_log2)  # `struct shadow` of native.c

    # --- barriers and fences -----------------------------------------------------------------------------------------------

    def next_time(self) -> int:
        self.time += 1
        return self.time

    def synchronise(self, threads: Any, times: Array | None = None) -> None:
        """Note that what other threads of the block did until `times` (None: until now) is ordered before what these threads do next."""
        self.epoch[threads] = self.next_time() if times is None else np.maximum(self.epoch[threads], times)

    def synchronise_warps(self, threads: Any) -> None:
        self.warp_epoch[threads] = self.next_time()

    def fence(self, threads: Array) -> None:
        """Apply a fence.proxy.async that these threads execute. The fence makes visible their own writes and the writes that barriers
        ordered before the fence."""
        dirty = np.flatnonzero(self.generic)
        if dirty.size == 0:
            return
        fencing = np.zeros(len(self.epoch) + 1, bool)
        fencing[threads] = True
        latest = np.zeros(len(self.wave.blocks), np.int32)
        np.maximum.at(latest, self.wave.slot[threads], self.epoch[threads])
        block = dirty * self.grain // self.wave.shared_stride
        clean = fencing[self.writer[dirty]] | (self.write_time[dirty] < latest[block])
        self.generic[dirty[clean]] = False

    # --- accesses by threads -----------------------------------------------------------------------------------------------

    def _pieces(self, offsets: Array, num_bytes: int) -> Array:
        """Return the indices of the pieces that each access touches: [threads, pieces]."""
        return (offsets >> self.grain_log2)[:, None] + np.arange(max(num_bytes >> self.grain_log2, 1))

    def _apart(self, threads: Array, others: Array, times: Array) -> Array:
        """Return for each piece whether an access by `threads` now would race with the recorded access, which a thread of `others` made at
        the time in `times`. Two accesses race if no barrier orders them."""
        if times.max(initial=0) < self.epoch[threads].min(initial=self.time):
            return np.zeros((), bool)  # all these threads have passed a barrier since the last recorded access
        own = threads[:, None]
        warp = self.wave.warp
        same_warp = (others >= 0) & (warp[np.maximum(others, 0)] == warp[own])
        epoch = np.where(same_warp, np.maximum(self.epoch, self.warp_epoch)[own], self.epoch[own])
        return (others != NOBODY) & (others != own) & (epoch <= times)

    def _in_other_block(self, threads: Array, pieces: Array) -> bool:
        """Return whether pieces belong to another block of the cluster than the thread that accesses them."""
        return self.wave.cluster > 1 and bool((pieces[:, 0] * self.grain // self.wave.shared_stride != self.wave.slot[threads]).any())

    def _refuse(self, wrong: Array, threads: Array, pieces: Array, message: str, others: Array | None = None) -> None:
        if wrong.any():
            row, column = (int(n[0]) for n in np.nonzero(wrong))
            at = int(pieces[row, column]) * self.grain % self.wave.shared_stride
            who = int(others[row, column]) if others is not None else NOBODY
            by = {NOBODY: "", SEVERAL: " of several threads", ASYNC: " of a copy"}.get(who) if who < 0 else f" of {self.wave.name(who)}"
            raise Fault(f"{message.format(by=by)}: shared offset {at}, {self.wave.name(int(threads[row]))}")

    def _accesses(self, threads: Array, offsets: Array, num_bytes: int) -> tuple[Any, ...]:
        """Return the arguments by which native.c finds the pieces that each access touches."""
        return self._struct, address(threads), address(offsets), len(threads), max(num_bytes >> self.grain_log2, 1)

    def read(self, threads: Array, offsets: Array, num_bytes: int) -> None:
        if self._native is not None and self._native.read(*self._accesses(threads, offsets, num_bytes), self.time):
            return
        pieces = self._pieces(offsets, num_bytes)
        self._refuse(self.arriving[pieces] > 0, threads, pieces, "reads what a copy in flight is going to write")
        others = self.writer[pieces]
        self._refuse(
            self._apart(threads, others, self.write_time[pieces]),
            threads,
            pieces,
            "a race: reads what a write{by} left without a barrier",
            others,
        )
        own = np.broadcast_to(threads[:, None], pieces.shape)
        before = self.reader[pieces]
        current = self.read_time[pieces] >= np.maximum(self.epoch, 1)[own]
        foreign = current & (before != NOBODY) & (before != own)
        self.reader[pieces] = np.where(foreign, SEVERAL, own)
        lost = self.reader[pieces] != own
        self.reader[pieces[lost]] = SEVERAL
        self.read_time[pieces] = self.time

    def write(self, threads: Array, offsets: Array, num_bytes: int) -> None:
        self._overwrites(threads, offsets, num_bytes)
        if self._native is not None:
            self._native.written(*self._accesses(threads, offsets, num_bytes), self.time)
            return
        pieces = self._pieces(offsets, num_bytes)
        self.writer[pieces] = threads[:, None]
        self.write_time[pieces] = self.time
        self.reader[pieces] = NOBODY
        self.generic[pieces] = True

    def _overwrites(self, threads: Array, offsets: Array, num_bytes: int) -> None:
        fast = self._native if self.wave.cluster == 1 else None
        if fast is not None and fast.overwrite(*self._accesses(threads, offsets, num_bytes)):
            return
        pieces = self._pieces(offsets, num_bytes)
        self._refuse(self.arriving[pieces] > 0, threads, pieces, "writes where a copy in flight is going to write")
        self._refuse(self.leaving[pieces] > 0, threads, pieces, "writes what a product or a copy in flight still reads")
        far = self._in_other_block(threads, pieces)
        for others, times, what in ((self.writer, self.write_time, "a write"), (self.reader, self.read_time, "a read")):
            other = others[pieces]
            if far:  # a thread knows of another block only what mbarriers and barriers of the cluster have told it
                ranks = self.wave.rank[pieces * self.grain // self.wave.shared_stride]
                wrong = (other != NOBODY) & (self.wave.known.times[threads[:, None], ranks] <= times[pieces])
            else:
                wrong = self._apart(threads, other, times[pieces])
            self._refuse(wrong, threads, pieces, f"a race: writes over {what}{{by}} without a barrier", other)

    # --- accesses by asynchronous copies and products ----------------------------------------------------------------------

    def announce(self, threads: Array, offsets: Array, num_bytes: int, *, asynchronous: bool) -> None:
        """Record that a copy in flight will write these bytes. An asynchronous copy writes through the async proxy."""
        fast = self._native if self.wave.cluster == 1 else None
        if fast is not None and fast.announce(*self._accesses(threads, offsets, num_bytes), asynchronous):
            return
        self._overwrites(threads, offsets, num_bytes)
        pieces = self._pieces(offsets, num_bytes)
        if asynchronous:
            message = "an asynchronous write over what a write{by} left without fence.proxy.async"
            self._refuse(self.generic[pieces], threads, pieces, message, self.writer[pieces])
        np.add.at(self.arriving, pieces, 1)

    def arrive(self, threads: Array, offsets: Array, num_bytes: int, *, asynchronous: bool) -> None:
        if self._native is not None:
            self._native.arrive(*self._accesses(threads, offsets, num_bytes), self.time, asynchronous)
            return
        pieces = self._pieces(offsets, num_bytes)
        np.subtract.at(self.arriving, pieces, 1)
        self.writer[pieces] = ASYNC if asynchronous else threads[:, None]
        self.write_time[pieces] = self.time
        self.reader[pieces] = NOBODY
        self.generic[pieces] = not asynchronous

    def begin_reading(self, thread: int, pieces: Array) -> None:
        """Record that a copy or product in flight, which the thread has started, reads these pieces. No piece is named twice. The caller
        later passes them to `end_reading`."""
        if self._native is not None and self._native.begin_reading(self._struct, thread, address(pieces), len(pieces)):
            return
        columns, who = pieces[:, None], np.full(len(pieces), thread)
        self._refuse(self.arriving[columns] > 0, who, columns, "an asynchronous read of what a copy in flight is going to write")
        others = self.writer[columns]
        self._refuse(
            self._apart(who, others, self.write_time[columns]),
            who,
            columns,
            "a race: an asynchronous read of what a write{by} left without a barrier",
            others,
        )
        message = "an asynchronous read of what a write{by} left without fence.proxy.async"
        self._refuse(self.generic[columns], who, columns, message, others)
        self.leaving[pieces] += 1

    def pieces_of_range(self, offset: int, num_bytes: int) -> Array:
        return np.arange(offset >> self.grain_log2, (offset + num_bytes - 1 >> self.grain_log2) + 1)

    def end_reading(self, pieces: Array) -> None:
        self.leaving[pieces] -= 1
        self.reader[pieces] = SEVERAL
        self.read_time[pieces] = self.time
