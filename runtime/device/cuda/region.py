"""A region is a list of launches. A run writes the records of the launches (`records.py`), copies all of them to the card in one copy, and
launches one graph.

Nothing in a graph changes from run to run, because kernels read addresses and integers from the records. The blocks of a launch divide its
work among themselves, whatever the number of blocks is, so every graph gives correct results for all sizes. A graph is fast if its number
of blocks fits the amount of work. `prepare` captures graphs for expected sizes. A region that was not prepared captures a graph during
a run whose integers have new orders of magnitude, unless it has a graph with the same numbers of blocks.

Within a graph, a launch may begin before the previous launch has ended if its bytecode allows it (`NativeLaunch.overlaps`). Exceptions are
the first launch, a launch before which cards wait for each other (`records.py`), and all launches if a fault must name the kernel that
began last (`last_launch.py`).

Several cards may run a region in lockstep, each with separate records. The graph then has the launches of all cards. Before a launch that
reads memory of other cards, each card waits until all cards have reached the launch; after it, until the launch has ended on all cards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.device.base import Bases, Launch, Placed, TimeTo
from runtime.device.cuda import driver
from runtime.device.cuda.card import Owned
from runtime.device.cuda.clock import Clock
from runtime.device.cuda.driver import Graph
from runtime.device.cuda.lockstep import Lockstep
from runtime.device.cuda.records import FURTHER, Rank, Records
from runtime.errors import InvalidProgram

LAUNCH_BYTES = 16 << 10  # upper estimate of the bytes of device memory that the driver needs per launch of a graph
# Maximum number of blocks that an NVIDIA multiprocessor runs at a time: additional blocks would only wait. The number must be even, because
# a cluster has two blocks.
BLOCKS_PER_UNIT = 32
Magnitudes = NDArray[np.int32]  # per integer of a region: the exponent of the least power of two that exceeds the integer


class CudaRegion:
    """A region on one card or on several, which are its ranks."""

    def __init__(
        self, ranks: Sequence[Rank], clock: Clock, launches: Sequence[Launch], bases: Bases, function: str, tensor_type: type
    ) -> None:
        self._clock, self._function, self._tensor_type = clock, function, tensor_type
        self._arena, self._registers = bases.arena, bases.registers
        self._bases = np.zeros((len(ranks), bases.count + FURTHER), np.int64)  # address of each base on each rank
        self._records = [Records(rank, number, self._bases, launches, function) for number, rank in enumerate(ranks)]
        self._card, self._lockstep = ranks[0].card, Lockstep([rank.card for rank in ranks])
        self._gathers = [bool(launch.ranks) for launch in launches]  # for each launch, whether it reads memory of other cards
        self._sizes = np.unique([slot for x in launches for slot in x.dims]).astype(np.intp)  # heap slots of the launches' integers
        self._captured: dict[tuple[int, ...], Graph] = {}  # graphs by the number of blocks of each launch
        self._card.free_with(self, partial(_close_all, self._captured))
        # `_prepared` has the orders of magnitude for which graphs were captured, with the number of blocks of each launch.
        self._prepared: list[tuple[Magnitudes, tuple[int, ...]]] = []
        self._graphs: dict[bytes, Graph] = {}  # graphs by the bytes of a `Magnitudes` array
        self._events: list[tuple[Owned, Owned]] = []  # for each launch, events around its kernel, made when kernels are first timed

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    def place(self, base: int, tensor: Any) -> None:
        for rank, address in enumerate(tensor.addresses):
            self._bases[rank, base] = address

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
            if not isinstance(tensor, self._tensor_type):
                kind = type(tensor).__name__
                raise InvalidProgram(f"{self._function}: register {register} of a launch holds a {kind}, not a tensor of the GPU")
            self.place(base, tensor)
        if self._arena is not None:
            self.place(self._arena, arena)
        with self._card:
            self._run(heap.words, time_to)

    def in_parts(self, heap: Any, arena: Any, registers: Sequence[Any]) -> Iterator[None]:
        self.run(heap, arena, registers)
        yield from ()

    def _run(self, heap: NDArray[np.int64], time_to: TimeTo | None) -> None:
        """Write and copy the records, and launch the graph for these integers. With `time_to`, launch and time each kernel by itself."""
        self._write(heap)
        for records in self._records:
            with records.card:
                records.copy()
        self._lockstep.join()
        if time_to is None:
            graph = self._graph(self._magnitudes(heap))
            with self._clock.running():
                graph.launch(self._card.stream.handle, self._function)
            self._lockstep.fork()
        else:
            self._run_singly(time_to)

    def _write(self, heap: NDArray[np.int64]) -> None:
        """Write the records of all ranks to pinned memory."""
        for records in self._records:
            with records.card:
                records.write(heap)

    def _magnitudes(self, words: NDArray[np.int64]) -> Magnitudes:
        """Return the orders of magnitude of the region's integers: see `Magnitudes`. `words` are the words of the heap."""
        return np.frexp(words[self._sizes].astype(np.float64))[1]

    def _graph(self, magnitudes: Magnitudes) -> Graph:
        """Return the graph that serves integers of these magnitudes: a prepared one, or one that is captured now."""
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
        """Return the graph whose launches have these numbers of blocks, and capture one if there is none."""
        graph = self._captured.get(blocks)
        if graph is None:
            with ExitStack() as capturing:
                for records in self._records:
                    capturing.enter_context(records.card.capturing())
                with driver.captured(self._card.stream.handle) as found:
                    self._lockstep.fork()
                    for number, count in enumerate(blocks):
                        self._launch(number, count, is_captured=True)
                    self._lockstep.join()
            (graph,) = found
            self._captured[blocks] = graph
        return graph

    def _blocks(self) -> tuple[int, ...]:
        """Return the number of blocks of each launch for the integers in the records, which are the same on all ranks."""
        return self._records[0].blocks(self._card.num_units * BLOCKS_PER_UNIT)

    def _launch(self, number: int, blocks: int, *, is_captured: bool = False) -> None:
        """Launch a kernel on all ranks. If it reads memory of other ranks, all ranks wait for each other before and after the launch."""
        if self._gathers[number]:
            self._lockstep.meet()
        for records in self._records:
            with records.card:
                records.launch(number, blocks, is_captured=is_captured)
        if self._gathers[number]:
            self._lockstep.meet()

    def _run_singly(self, time_to: TimeTo) -> None:
        """Launch the kernels one after another without a graph, with an event before and after each. The host does not wait between two
        kernels, so that the time of a kernel does not include the time that the host needs to launch it."""
        blocks = self._blocks()
        events = self._events = self._events or [(self._card.event(self), self._card.event(self)) for _ in blocks]
        self._lockstep.fork()
        for number, (count, (begin, end)) in enumerate(zip(blocks, events, strict=True)):
            self._card.record(begin)
            self._launch(number, count)
            self._card.record(end)
        self._lockstep.join()
        self._card.wait()
        for number, (begin, end) in enumerate(events):
            passed_s = self._card.elapsed_s(begin, end)
            assert passed_s is not None, "the card has reached all events"
            time_to(self._records[0].kernel(number), passed_s)


def _close_all(graphs: Mapping[tuple[int, ...], Graph]) -> None:
    for graph in graphs.values():
        graph.close()
