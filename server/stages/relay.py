"""Send steps through the stages before the last one.

A step may be cut into parts of its tokens. While a later stage computes one part, an earlier stage computes the next one.

The worker has a connection to each stage. One thread per stage reads the residual streams of the stage as they arrive, and passes them to
the next stage, or to the step. If they were not read while the worker computes a part, a stage that cannot send its next stream would take
the worker's machine for lost.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.engine.step_model import Places, StepBatch
from server.stages.link import Link, StageLost
from server.stages.messages import CopyPage, Run, Stream, Working

WorkingFn = Callable[[float], None]  # called with the CPU seconds that the stages before the last one have used

MOST_PARTS = 8
NOTICES_S = 0.5  # seconds within which a running step notices that a stage is lost


def whole(num_tokens: int) -> int:
    """Return 1, so that no step is cut: for stages that share the same cores."""
    return 1


def fastest(cost_s: Callable[[int], float], num_stages: int) -> Callable[[int], int]:
    """Return a function that says into how many parts to cut a step so that it ends soonest, for stages with cores of their own. `cost_s`
    returns the seconds that a step of so many tokens takes in all stages together; each stage takes about an equal part of that."""

    def num_parts(num_tokens: int) -> int:
        """Return into how many parts to cut a step of this many tokens."""
        counts = [count for count in (1, 2, 4, MOST_PARTS) if count <= max(num_tokens, 1)]
        return min(counts, key=lambda count: cost_s(-(-num_tokens // count)) * (num_stages - 1 + count))

    return num_parts


class Relay:
    """The stages before the last one, in order, and the threads that pass their residual streams on. `num_parts` returns into how many
    parts to cut a step of so many tokens."""

    def __init__(self, links: Sequence[Link], num_parts: Callable[[int], int] = whole, *, shares_cores: bool = True) -> None:
        self.num_parts = num_parts
        self.shares_cores = shares_cores  # all stages run on the same machine
        self.waited_s = 0.0  # time spent in `receive`
        self.on_working: WorkingFn = lambda _cpu_s: None  # called on the thread of a stage, for each Working message of that stage
        self._links = list(links)
        self._cpu_s = [0.0] * len(links)
        self._fault: StageLost | None = None
        self._is_closing = False
        self._num_awaited = 0  # parts of the present step that are not received
        self._arrived: queue.SimpleQueue[NDArray[np.float32] | None] = queue.SimpleQueue()  # None: a stage is lost, as `_fault` says
        self._threads = [threading.Thread(target=self._pass_on, args=(number,), daemon=True) for number in range(len(links))]
        for thread in self._threads:
            thread.start()

    @property
    def num_stages(self) -> int:
        """The number of stages, the last one included."""
        return len(self._links) + 1

    def begin(self, batch: StepBatch) -> list[StepBatch]:
        """Begin a step: cut it into parts, and send the parts to all stages. Return the parts. The caller must call `receive` once for each
        of them. Raise StageLost if a stage is lost."""
        parts = parts_of(batch, self.num_parts(len(batch.tokens)))
        self._num_awaited = len(parts)
        for part in parts:
            slots, tables = [places.slots for places in part.places], [places.page_tables for places in part.places]
            arrays = [part.tokens, part.positions, part.query_starts, part.seq_ids, *slots, *tables]
            for link in reversed(self._links):  # each stage gets the part before the residual stream of the part arrives
                link.send(Run(), arrays)
        return parts

    def receive(self) -> NDArray[np.float32]:
        """Wait for the residual stream [tokens, size] of the next part, and return it. Raise StageLost if it will not arrive."""
        began_s = time.perf_counter()
        if (stream := self._arrived.get()) is None:
            self._arrived.put(None)
            assert self._fault is not None, "a stage is lost"
            raise self._fault
        self._num_awaited -= 1
        self.waited_s += time.perf_counter() - began_s
        return stream

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copy a page of a cache group in all stages before the last one. Raise StageLost if one of them is lost."""
        for link in self._links:
            link.send(CopyPage(group, source, target))

    def watch(self, on_lost: Callable[[StageLost], None]) -> None:
        """From now on, call `on_lost` on another thread when a stage is lost between two steps. A step that runs raises StageLost itself,
        with the reason that the host of the stage gives."""

        def wait(link: Link) -> None:
            """Wait until the connection to a stage ends. Then call `on_lost`, unless a running step raises StageLost."""
            link.wait_for_end()
            time.sleep(NOTICES_S)
            while self._num_awaited and not self._is_closing:
                time.sleep(NOTICES_S)
            if not self._is_closing:
                on_lost(self._fault or link.lost())

        for link in self._links:
            threading.Thread(target=wait, args=(link,), daemon=True).start()

    def close(self) -> None:
        """End all connections, so that the stages end, and wait for those of this machine."""
        self._is_closing = True
        for link in self._links:
            link.shut()
        for thread in self._threads:
            thread.join()
        for link in self._links:
            link.close()

    def _stream(self, number: int) -> NDArray[np.float32]:
        """Return the next residual stream of a stage. Pass the CPU time that the stage reports before it to `on_working`. Raise StageLost
        if the stage ends, or sends anything else."""
        while True:
            message, arrays = self._links[number].receive()
            match message:
                case Stream() if arrays:
                    return arrays[0]
                case Working():
                    self._cpu_s[number] = message.cpu_s
                    self.on_working(sum(self._cpu_s))
                case _:
                    raise StageLost(f"{self._links[number].place} sent {type(message).__name__} in the middle of a step")

    def _pass_on(self, number: int) -> None:
        """Pass each residual stream of a stage to the next stage, or from the last of these stages to `receive`, until a stage is lost.
        Then let `receive` raise StageLost: the thread of an earlier stage ends the connection to the last one, so that the last thread
        ends, too."""
        is_last = number == len(self._links) - 1
        try:
            while True:
                stream = self._stream(number)
                if is_last:
                    self._arrived.put(stream)
                else:
                    self._links[number + 1].send(Stream(), [stream])
        except Exception as error:
            self._fault = self._fault or (error if isinstance(error, StageLost) else StageLost(f"{type(error).__name__}: {error}"))
            if is_last:
                self._arrived.put(None)
            else:
                self._links[-1].shut()


def parts_of(batch: StepBatch, num_parts: int) -> list[StepBatch]:
    """Cut a step into `num_parts` parts with about the same number of tokens, or into fewer if there are fewer tokens."""
    num_tokens = len(batch.tokens)
    ends = [num_tokens * i // num_parts for i in range(num_parts + 1)]
    return [_cut(batch, *ends[i : i + 2]) for i in range(num_parts) if ends[i] < ends[i + 1]] if num_parts > 1 else [batch]


def _cut(batch: StepBatch, begin: int, end: int) -> StepBatch:
    """Return the part of a step with the tokens begin .. end - 1."""
    first, last = int(batch.seq_ids[begin]), int(batch.seq_ids[end - 1])
    context_lens = batch.context_lens[first : last + 1].copy()
    context_lens[-1] = batch.positions[end - 1] + 1
    return StepBatch(
        tokens=batch.tokens[begin:end],
        positions=batch.positions[begin:end],
        query_starts=np.clip(batch.query_starts[first : last + 2], begin, end) - np.int32(begin),
        seq_ids=batch.seq_ids[begin:end] - np.int32(first),
        context_lens=context_lens,
        places=tuple(Places(of.slots[begin:end], of.page_tables[first : last + 1]) for of in batch.places),
        logit_rows=_within(batch.logit_rows, begin, end),
        hidden_rows=_within(batch.hidden_rows, begin, end),
    )


def _within(rows: NDArray[Any], begin: int, end: int) -> NDArray[Any]:
    """Return the rows among begin .. end - 1, counted from `begin`."""
    return rows[(rows >= begin) & (rows < end)] - np.int32(begin)
