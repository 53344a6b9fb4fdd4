"""The records of a region's launches on one card: the words that its kernels read, with addresses and integers.

Every kernel has the address of its record as a parameter. The record holds the address of the word in which a kernel
names itself (`last_launch.py`; 0 if kernels do not), the addresses of the kernel's buffers, its integers, and, if its blocks share
counters, the address of the counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.device.base import Launch
from runtime.device.cuda import driver
from runtime.device.cuda.card import Card
from runtime.device.cuda.driver import Parameters
from runtime.device.cuda.last_launch import LastLaunch
from runtime.device.cuda.memory import Block
from runtime.errors import InvalidProgram
from runtime.executable import OWN

WORD = 8  # bytes
COUNTER = 4
# Number of bases that `Records` adds to those of the region: address 0 (for integers), the word of last_launch.py, and the counters.
FURTHER = 3
Grid = Callable[[int], int]  # returns the number of blocks that have work, given the address of a launch's integers


class Loaded(Protocol):
    """The code of an executable."""

    def function(self, symbol: str, shared_bytes: int) -> int:
        """Return the kernel with this name. Its launches request `shared_bytes` of shared memory."""
        ...

    def grid(self, symbol: str) -> Grid:
        """Return the function of the host with this name, which computes a number of blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the cards that run a program together, with the code that it has loaded."""

    card: Card
    last: LastLaunch
    code: Loaded


@dataclass(frozen=True, slots=True)
class _Launched:
    """A launch with everything that the driver needs for it."""

    kernel: str
    function: int
    threads: int
    shared_bytes: int
    parameters: Parameters
    overlaps: bool  # whether this launch may begin before the previous launch has ended
    grid: Grid
    dims: int  # host address of the launch's integers


class Records:
    """The records of a region on one card, in pinned memory of the host and in memory of the card."""

    def __init__(self, rank: Rank, number: int, bases: NDArray[np.int64], launches: Sequence[Launch], function: str) -> None:
        """`bases` has the address of each base (`Bases` in runtime/device/base.py) on each rank: [ranks, `Bases.count` + FURTHER].
        `number` is the row of this rank."""
        card = rank.card
        self.card, self._last, self._code, self._function = card, rank.last, rank.code, function
        self._bases = bases.reshape(-1)
        num_ranks, width = bases.shape
        own = number * width
        zero, marker, counters = range(own + width - FURTHER, own + width)
        # For each word: the place of its base in `bases`, and the heap slot whose value is added; -1: nothing is added.
        words: list[tuple[int, int]] = []
        for x in launches:
            rows = _rows(x, number, num_ranks, function)
            words.append((marker, -1))
            words += [(row * width + base, slot) for row, (base, slot) in zip(rows, x.buffers, strict=True)]
            words += [*((zero, slot) for slot in x.dims), *([(counters, -1)] if x.num_counters else [])]
        self._base_of = np.array([base for base, _ in words], np.intp)
        slots = np.array([slot for _, slot in words], np.intp)
        self._added = np.flatnonzero(slots >= 0)
        self._slots = slots[self._added]
        self._words = card.pinned(self, len(words))
        # Launches run one after another, and each resets its counters to zero, so all launches share the same counters.
        num_counters = max(x.num_counters for x in launches)
        self._block = Block(card, len(words) * WORD + num_counters * COUNTER, "records")
        self._bases[[marker, counters]] = self._last.address or 0, self._block.address + len(words) * WORD
        self._launched = list(self._of(launches, num_ranks))
        self._copied = card.event(self)  # event after which the card has read the words

    def _of(self, launches: Sequence[Launch], num_ranks: int) -> Iterator[_Launched]:
        """Yield the launches with everything that the driver needs for them, and store their descriptions for messages about faults."""
        at, host, tells = 0, self._words.ctypes.data, self._last.tells
        after_waits = _after_waits(launches, num_ranks)
        for number, launch in enumerate(launches):
            function, grid = self._code.function(launch.body, launch.shared_bytes), self._code.grid(launch.grid)
            dims = at + 1 + len(launch.buffers)
            record = self._block.address + at * WORD
            self._last.know(record, f"kernel {launch.kernel}, launch {number} of {len(launches)} of {self._function}")
            parameters, numbers = Parameters(record, tells=tells), host + dims * WORD
            # A kernel that names itself (last_launch.py) must not overlap another one.
            overlaps = launch.overlaps and number > 0 and not tells and number not in after_waits
            yield _Launched(launch.kernel, function, launch.threads, launch.shared_bytes, parameters, overlaps, grid, numbers)
            at = dims + len(launch.dims) + (launch.num_counters > 0)

    def write(self, heap: NDArray[np.int64]) -> None:
        """Write the records to pinned memory, after the card has read the records of the last run."""
        self.card.await_event(self._copied)
        np.take(self._bases, self._base_of, out=self._words[: len(self._base_of)])
        self._words[self._added] += heap[self._slots]

    def copy(self) -> None:
        """Copy the records to the card."""
        self.card.copy_pinned(self._block.address, self._words)
        self.card.record(self._copied)
        self._last.num_runs += 1

    def kernel(self, number: int) -> str:
        """Return the name of the kernel of a launch."""
        return self._launched[number].kernel

    def blocks(self, most: int) -> tuple[int, ...]:
        """Return the number of blocks of each launch for the integers in the records, at least 1 and at most `most`."""
        return tuple(min(max(1, launched.grid(launched.dims)), most) for launched in self._launched)

    def launch(self, number: int, blocks: int, *, is_captured: bool) -> None:
        """Launch the kernel of launch `number` in `blocks` blocks. With `is_captured` the launch becomes part of a graph. A launch outside
        of a graph begins after the previous launch has ended."""
        launched, stream = self._launched[number], self.card.stream.handle
        sizes, about, overlaps = (
            (blocks, launched.threads, launched.shared_bytes),
            f"kernel {launched.kernel}",
            is_captured and launched.overlaps,
        )
        driver.launch(launched.function, *sizes, launched.parameters, stream, about, overlaps=overlaps)


def _after_waits(launches: Sequence[Launch], num_ranks: int) -> set[int]:
    """Return the numbers of the launches before which the cards wait for each other."""
    return {number + after for number, launch in enumerate(launches) if launch.ranks and num_ranks > 1 for after in (0, 1)}


def _rows(launch: Launch, number: int, num_ranks: int, function: str) -> Sequence[int]:
    """Return the rank in whose memory each buffer of a launch is. Raise InvalidProgram if the kernel is for another number of GPUs."""
    if not launch.ranks:
        return [number] * len(launch.buffers)
    if (wanted := max(launch.ranks) + 1) != num_ranks:
        text = f"kernel {launch.kernel} is for {wanted} GPUs, and the program runs on {num_ranks}"
        raise InvalidProgram(f"{function}: {text}; compile it for this number of GPUs")
    return [number if rank == OWN else rank for rank in launch.ranks]
