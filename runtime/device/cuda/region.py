"""A region is a list of launches. Their integers and addresses are in one array of words, the records. A run writes the records to pinned
memory, copies them to the card once, and launches one graph.

Every kernel takes the address of its record. The record holds the address of the word for the last launch, the addresses of the kernel's
buffers, its integers, and, if its blocks share counters, the address of the counters. So nothing in a graph changes from run to run. The
blocks of a launch divide its work among themselves, whatever their number, so every graph gives correct results for all sizes; a graph is
fast if it has about as many blocks as there is work. Within a graph, a launch begins before the launch before it has ended, unless a
fault is to name the kernel that began last. `prepare` captures graphs for expected sizes. A region that was not prepared captures
a graph whenever its integers have orders of magnitude that did not occur before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.device.base import Bases, Launch, Placed, TimeTo
from runtime.device.cuda import driver
from runtime.device.cuda.card import Card, Owned
from runtime.device.cuda.clock import Clock
from runtime.device.cuda.driver import Graph, Parameters
from runtime.device.cuda.last_launch import LastLaunch
from runtime.device.cuda.memory import Block, CudaTensor
from runtime.errors import InvalidProgram

WORD = 8  # bytes
COUNTER = 4
LAUNCH_BYTES = 16 << 10  # upper estimate of the bytes of device memory that the driver needs per launch of a graph
# Maximum number of resident blocks of an NVIDIA multiprocessor: additional blocks would only wait. Even: clusters have two blocks.
BLOCKS_PER_UNIT = 32
Magnitudes = NDArray[np.int32]  # per integer of a region: the exponent of the least power of two that exceeds the integer
Grid = Callable[[int], int]  # returns the number of blocks that have work, given the address of a launch's integers


class Loaded(Protocol):
    """The code of an executable."""

    def function(self, symbol: str, shared_bytes: int) -> int: ...

    def grid(self, symbol: str) -> Grid: ...


@dataclass(frozen=True, slots=True)
class _Launched:
    kernel: str
    function: int
    threads: int
    shared_bytes: int
    parameters: Parameters
    overlaps: bool  # whether it may begin before the launch before it has ended
    grid: Grid
    dims: int  # host address of the launch's integers


class CudaRegion:
    def __init__(
        self, card: Card, last: LastLaunch, clock: Clock, code: Loaded, launches: Sequence[Launch], bases: Bases, function: str
    ) -> None:
        self._card, self._last, self._clock, self._code, self._function = card, last, clock, code, function
        self._arena, self._registers = bases.arena, bases.registers
        zero, marker, counters = range(bases.count, bases.count + 3)  # bases that the region adds itself
        self._bases = np.zeros(bases.count + 3, np.int64)
        # For each word: the base to which it is relative, and the heap slot whose value is added; -1: nothing is added.
        words: list[tuple[int, int]] = []
        for x in launches:
            words += [(marker, -1), *x.buffers, *((zero, slot) for slot in x.dims), *([(counters, -1)] if x.num_counters else [])]
        self._base_of = np.array([base for base, _ in words], np.intp)
        slots = np.array([slot for _, slot in words], np.intp)
        self._added = np.flatnonzero(slots >= 0)
        self._slots = slots[self._added]
        self._sizes = np.unique([slot for x in launches for slot in x.dims]).astype(np.intp)
        self._words = card.pinned(self, len(words))
        # Launches run one after another, and each resets its counters to zero, so all launches share the same counters.
        num_counters = max(x.num_counters for x in launches)
        self._block = Block(card, len(words) * WORD + num_counters * COUNTER, "records")
        self._bases[[marker, counters]] = last.address or 0, self._block.address + len(words) * WORD
        self._launches = self._launched(launches)
        self._captured: dict[tuple[int, ...], Graph] = {}  # graphs by the number of blocks of each launch
        card.free_with(self, partial(_close_all, self._captured))
        # `_prepared` has the orders of magnitude for which graphs were captured, with the number of blocks of each launch.
        self._prepared: list[tuple[Magnitudes, tuple[int, ...]]] = []
        self._graphs: dict[bytes, Graph] = {}  # graphs by the bytes of a `Magnitudes` array
        self._copied = card.event(self)  # event after which the card has read the words
        self._events: list[tuple[Owned, Owned]] = []  # for each launch, events around its kernel, made when kernels are first timed

    def _launched(self, launches: Sequence[Launch]) -> list[_Launched]:
        found: list[_Launched] = []
        at, host, tells = 0, self._words.ctypes.data, self._last.tells
        for number, launch in enumerate(launches):
            function, grid = self._code.function(launch.body, launch.shared_bytes), self._code.grid(launch.grid)
            dims = at + 1 + len(launch.buffers)
            record = self._block.address + at * WORD
            self._last.know(record, f"kernel {launch.kernel}, launch {number} of {len(launches)} of {self._function}")
            parameters, numbers = Parameters(record, tells=tells), host + dims * WORD
            overlaps = launch.overlaps and number > 0 and not tells  # a kernel that names itself must be the only one that runs
            found.append(_Launched(launch.kernel, function, launch.threads, launch.shared_bytes, parameters, overlaps, grid, numbers))
            at = dims + len(launch.dims) + (launch.num_counters > 0)
        return found

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    def place(self, base: int, tensor: Any) -> None:
        self._bases[base] = tensor.address

    def prepare(self, heap: Any) -> None:
        with self._card:
            self._write(heap.words)
            blocks = self._blocks()
            self._capture(blocks)
        self._prepared.append((self._magnitudes(heap.words), blocks))
        self._graphs.clear()

    def repeat(self, heap: Any, inputs: Sequence[Any], result: Placed) -> None:
        return None

    def run(self, heap: Any, arena: Any, registers: Sequence[Any], time_to: TimeTo | None = None) -> None:
        for base, register in self._registers:
            tensor = registers[register]
            if not isinstance(tensor, CudaTensor):
                kind = type(tensor).__name__
                raise InvalidProgram(f"{self._function}: register {register} of a launch holds a {kind}, not a tensor of the GPU")
            self._bases[base] = tensor.address
        if self._arena is not None:
            self._bases[self._arena] = arena.address
        with self._card:
            self._run(heap.words, time_to)

    def _run(self, heap: NDArray[np.int64], time_to: TimeTo | None) -> None:
        self._write(heap)
        self._card.copy_pinned(self._block.address, self._words)
        self._card.record(self._copied)
        self._last.num_runs += 1
        if time_to is None:
            graph = self._graph(self._magnitudes(heap))
            with self._clock.running():
                graph.launch(self._card.stream.handle, self._function)
        else:
            self._run_singly(time_to)

    def _write(self, heap: NDArray[np.int64]) -> None:
        """Write the records to pinned memory."""
        self._card.await_event(self._copied)
        np.take(self._bases, self._base_of, out=self._words[: len(self._base_of)])
        self._words[self._added] += heap[self._slots]

    def _magnitudes(self, words: NDArray[np.int64]) -> Magnitudes:
        return np.frexp(words[self._sizes].astype(np.float64))[1]

    def _graph(self, magnitudes: Magnitudes) -> Graph:
        key = magnitudes.tobytes()
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(self._prepared_blocks(magnitudes) or self._blocks())
        return graph

    def _prepared_blocks(self, magnitudes: Magnitudes) -> tuple[int, ...] | None:
        """Choose a prepared graph and return the number of blocks of each of its launches. Choose the smallest graph that was prepared for
        at least these magnitudes, or else the largest graph. Return None if no graph is prepared."""
        enough = [blocks for prepared, blocks in self._prepared if (prepared >= magnitudes).all()]
        if enough:
            return min(enough, key=sum)
        return max((blocks for _, blocks in self._prepared), key=sum, default=None)

    def _capture(self, blocks: tuple[int, ...]) -> Graph:
        graph = self._captured.get(blocks)
        if graph is None:
            with self._card.capturing(), driver.captured(self._card.stream.handle) as found:
                for launched, count in zip(self._launches, blocks, strict=True):
                    self._launch(launched, count, overlaps=launched.overlaps)
            (graph,) = found
            self._captured[blocks] = graph
        return graph

    def _blocks(self) -> tuple[int, ...]:
        """Return the number of blocks of each launch for the integers in the records."""
        most = self._card.num_units * BLOCKS_PER_UNIT
        return tuple(min(max(1, launched.grid(launched.dims)), most) for launched in self._launches)

    def _launch(self, launched: _Launched, blocks: int, *, overlaps: bool = False) -> None:
        sizes, stream = (blocks, launched.threads, launched.shared_bytes), self._card.stream.handle
        driver.launch(launched.function, *sizes, launched.parameters, stream, f"kernel {launched.kernel}", overlaps=overlaps)

    def _run_singly(self, time_to: TimeTo) -> None:
        """Launch the kernels one after another without a graph, with an event before and after each. The host does not wait between them,
        so that a time does not include what the host needs for a launch."""
        events = self._events = self._events or [(self._card.event(self), self._card.event(self)) for _ in self._launches]
        for launched, blocks, (begin, end) in zip(self._launches, self._blocks(), events, strict=True):
            self._card.record(begin)
            self._launch(launched, blocks)
            self._card.record(end)
        self._card.wait()
        for launched, (begin, end) in zip(self._launches, events, strict=True):
            passed_s = self._card.elapsed_s(begin, end)
            assert passed_s is not None, "the card has reached all events"
            time_to(launched.kernel, passed_s)


def _close_all(graphs: Mapping[tuple[int, ...], Graph]) -> None:
    for graph in graphs.values():
        graph.close()
