"""The queue of sequences whose next chunk reads excerpts of images or recordings that are not encoded yet, or whose audio is not heard yet.

The engine encodes in parts, between its steps, so that streams do not wait for a whole excerpt. A sequence keeps its slot and its pages
while it waits here, and other sequences run. What has begun goes on, unless a sequence of a better priority waits. Otherwise API keys take
turns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import ceil

import numpy as np

from server.engine.request import PlacedExcerpt, Sequence, among
from server.engine.scheduling.fair_queue import FairQueue
from server.engine.scheduling.pace import Pace
from server.engine.step_model import Excerpts, Heard, StepLimits
from server.messages import Excerpt


@dataclass(slots=True, eq=False)
class Encoding:
    """What a sequence waits for."""

    seq: Sequence
    work: Excerpts | Heard  # excerpts are encoded together
    cost: int  # prompt tokens that take about as long
    is_done: bool = False  # all parts have run


class EncodingQueue:
    def __init__(self, limits: StepLimits, pace: Pace, is_encoded: Callable[[bytes], bool]) -> None:
        """`is_encoded` tells whether the rows with a key are there."""
        self._limits = limits
        self._pace = pace
        self._is_encoded = is_encoded
        self._waiting: dict[Sequence, Encoding] = {}
        self._queue: FairQueue[Sequence] = FairQueue()
        self._begun: Encoding | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._waiting

    @property
    def first_priority(self) -> int | None:
        """The priority of the next sequence; None: none waits."""
        return self._queue.first_priority

    # --- what a chunk needs ------------------------------------------------------------------------------------------------

    def affordable(self, seq: Sequence, count: int, budget: int) -> int:
        """Return how many of the next `count` tokens of a prompt to plan, so that encoding their excerpts together takes at most as long as
        `budget` tokens. A chunk may always have one excerpt that is not encoded yet."""
        cost = 0
        for placed in self._missing(seq, count):
            is_first, cost = not cost, cost + self._cost((placed.excerpt,))
            if not is_first and cost > budget:
                return placed.start - seq.num_computed
        return count

    def must_wait(self, seq: Sequence, count: int) -> bool:
        """Return whether the next `count` tokens of a prompt read excerpts that are not encoded yet, or audio that is not heard yet."""
        return self.hears(seq) or bool(self._missing(seq, count))

    def hears(self, seq: Sequence) -> bool:
        """Return whether the next tokens of a prompt are its first ones, and its audio is not heard yet."""
        return seq.request.submit.audio is not None and seq.num_computed == 0 and not seq.has_heard

    def push(self, seq: Sequence, count: int) -> None:
        """Let a sequence wait for what its next `count` tokens read. If it hears, it has pages for these tokens."""
        audio = seq.request.submit.audio
        if audio is not None and self.hears(seq):
            heard = Heard(np.frombuffer(audio.samples, "<f4"), audio.loudest, seq.held.lists[-1].pages[0])
            encoding = Encoding(seq, heard, self._limits.hearing_cost)
        else:
            excerpts = {placed.key: placed.excerpt for placed in self._missing(seq, count)}
            encoding = Encoding(seq, excerpts, self._cost(excerpts.values()))
        self._waiting[seq] = encoding
        self._queue.push(seq)

    def _missing(self, seq: Sequence, count: int) -> list[PlacedExcerpt]:
        """Return the excerpts that the next `count` tokens read, and that are not encoded yet."""
        excerpts, start = seq.request.excerpts, seq.num_computed
        if not excerpts or start >= excerpts[-1].stop:
            return []
        return [placed for placed in among(excerpts, start, start + count) if not self._is_encoded(placed.key)]

    def _cost(self, excerpts: Collection[Excerpt]) -> int:
        """Return the cost of encoding excerpts, in prompt tokens."""
        cost = 0
        for limits in self._limits.excerpts:
            num_tokens = sum(excerpt.num_tokens for excerpt in excerpts if isinstance(excerpt, limits.kind))
            cost += ceil(self._pace.excerpt_tokens(limits.medium, limits.cost) * limits.share(num_tokens))
        return cost

    # --- the queue ---------------------------------------------------------------------------------------------------------

    def remove(self, seq: Sequence) -> None:
        del self._waiting[seq]
        self._queue.remove(seq)

    def take_done(self) -> list[Sequence]:
        """Remove and return the sequences for which all is encoded. Several may have waited for the same excerpt."""
        done = [encoding for encoding in self._waiting.values() if encoding.is_done or self._are_encoded(encoding.work)]
        for encoding in done:
            self.remove(encoding.seq)
            encoding.seq.has_heard = isinstance(encoding.work, Heard)
        return [encoding.seq for encoding in done]

    def _are_encoded(self, work: Excerpts | Heard) -> bool:
        return not isinstance(work, Heard) and all(map(self._is_encoded, work))

    def next(self) -> Encoding | None:
        """Return what to encode next."""
        head = self._queue.head()
        if head is None:
            return None
        begun = self._begun
        if begun is None or self._waiting.get(begun.seq) is not begun or head.rank[0] < begun.seq.rank[0]:
            self._begun = begun = self._waiting[head]
            self._queue.charge(head.fairness_key, begun.cost)
        return begun
