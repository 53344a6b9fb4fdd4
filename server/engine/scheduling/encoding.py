"""The queue of sequences whose next chunk reads excerpts of images or recordings that are not encoded yet, or whose audio is not heard yet.

The engine encodes in parts, between its steps, so that decoding sequences do not wait for a whole excerpt. A sequence keeps its slot and
its pages while it waits in this queue, and other sequences run. An encoding that has begun goes on until it is done, unless a sequence of a
better priority waits: the model then drops the parts that have run, and they run again later. An encoding whose parts were dropped gets the
better priority, so this happens to it at most once for each priority. Among encodings that have not begun and have the same priority, API
keys take turns.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator
from math import ceil

import numpy as np

from server.engine.request import PlacedExcerpt, Sequence, among, num_before
from server.engine.scheduling.fair_queue import FairQueue
from server.engine.scheduling.pace import Pace
from server.engine.scheduling.plan import Encoding, Plan
from server.engine.step_model import Excerpts, Heard, StepLimits
from server.messages import Excerpt


class EncodingQueue:
    """The sequences that wait for encodings, and the encodings chosen to run next."""

    def __init__(self, limits: StepLimits, pace: Pace, is_encoded: Callable[[bytes], bool]) -> None:
        """`is_encoded` tells whether the model has the encoded rows of the excerpt with a key."""
        self._limits = limits
        self._pace = pace
        self._is_encoded = is_encoded
        self._waiting: dict[Sequence, Encoding] = {}
        self._queue: FairQueue[Sequence] = FairQueue()  # waiting sequences that are not chosen yet
        self._chosen: list[Encoding] = []  # in the order in which they are encoded

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    @property
    def first_priority(self) -> int | None:
        """The best priority among the encodings that wait; None: none waits."""
        found = [encoding.priority for encoding in self._chosen[:1]]
        if (queued := self._queue.first_priority) is not None:
            found.append(queued)
        return min(found, default=None)

    # --- what a chunk needs ------------------------------------------------------------------------------------------------

    def affordable(self, seq: Sequence, count: int, budget: int) -> int:
        """Return how many of the next `count` tokens of a prompt to plan, so that encoding their excerpts takes at most as long in all as
        the prefill of `budget` tokens. The first excerpt of a chunk is planned whatever it costs. An expensive excerpt thus gets a chunk of
        its own, which reads its rows before the next excerpt is encoded."""
        cost = 0
        first = num_before(seq.request.excerpts, seq.num_computed)
        for placed in self.missing(seq, seq.num_computed, seq.num_computed + count):
            cost += self._cost((placed.excerpt,))
            if placed is not seq.request.excerpts[first] and cost > budget:
                return placed.start - seq.num_computed
        return count

    def must_wait(self, seq: Sequence, count: int) -> bool:
        """Return whether the next `count` tokens of a prompt read excerpts that are not encoded yet, or audio that is not heard yet."""
        return self.hears(seq) or bool(self.missing(seq, seq.num_computed, seq.num_computed + count))

    def hears(self, seq: Sequence) -> bool:
        """Return whether the next tokens of a prompt are its first ones, and its audio is not heard yet."""
        return seq.request.submit.audio is not None and seq.num_computed == 0 and not seq.has_heard

    def push(self, seq: Sequence, count: int) -> None:
        """Let a sequence wait for the excerpts that its next `count` tokens read, or for its audio to be heard. In the second case, the
        sequence already holds a page of the last cache group, which stores the keys and values of audio."""
        audio = seq.request.submit.audio
        if audio is not None and self.hears(seq):
            heard = Heard(np.frombuffer(audio.samples, "<f4"), audio.loudest, seq.held.lists[-1].pages[0])
            encoding = Encoding(seq, heard, self._limits.hearing_cost)
        else:
            missing = self.missing(seq, seq.num_computed, seq.num_computed + count)
            excerpts = {placed.key: placed.excerpt for placed in missing}
            encoding = Encoding(seq, excerpts, self._cost(excerpts.values()))
        self._waiting[seq] = encoding
        self._queue.push(seq)

    def missing(self, seq: Sequence, start: int, stop: int) -> list[PlacedExcerpt]:
        """Return the excerpts that the tokens start .. stop - 1 of a sequence read, and that are not encoded yet."""
        return [placed for placed in among(seq.request.excerpts, start, stop) if not self._is_encoded(placed.key)]

    def keys_read(self, plan: Plan, running: Iterable[Sequence]) -> Iterator[bytes]:
        """Yield the keys of the excerpts that the step of a plan reads, or that the next chunk of a running prompt may read."""
        for seq in running:
            item = plan.items.get(seq)
            start = seq.num_computed if item is None else item.start
            yield from (placed.key for placed in among(seq.request.excerpts, start, seq.num_computed + self._limits.max_tokens))

    def _cost(self, excerpts: Collection[Excerpt]) -> int:
        """Return the number of prompt tokens whose prefill takes about as long as encoding `excerpts`."""
        cost = 0
        for limits in self._limits.excerpts:
            num_tokens = sum(excerpt.num_tokens for excerpt in excerpts if isinstance(excerpt, limits.kind))
            cost += ceil(self._pace.excerpt_tokens(limits.medium, limits.cost) * limits.share(num_tokens))
        return cost

    # --- the queue ---------------------------------------------------------------------------------------------------------

    def remove(self, seq: Sequence) -> None:
        """Remove a waiting sequence from the queue."""
        encoding = self._waiting.pop(seq)
        if seq in self._queue:
            self._queue.remove(seq)
        else:
            self._chosen.remove(encoding)

    def take_done(self) -> list[Sequence]:
        """Remove and return the sequences whose encoding is done, and set `has_heard` for those that waited for audio. Several sequences
        may have waited for the same excerpt."""
        done = [encoding for encoding in self._waiting.values() if encoding.is_done or self._are_encoded(encoding.work)]
        for encoding in done:
            self.remove(encoding.seq)
            encoding.seq.has_heard = isinstance(encoding.work, Heard)
        return [encoding.seq for encoding in done]

    def _are_encoded(self, work: Excerpts | Heard) -> bool:
        return not isinstance(work, Heard) and all(map(self._is_encoded, work))

    def limit_s(self, plan: Plan) -> float:
        """Return for how long excerpts may be encoded before the step of a plan. One part always runs, even if the limit is 0."""
        if not plan.encodes_idle:
            return self._pace.encoding_s(plan.num_tokens, plan.num_decode)
        if plan.num_tokens > plan.num_idle:
            return 0.0  # the step has tokens of other sequences, which the encodings of idle sequences may delay by only one part
        # All tokens are of idle sequences. Those that decode may wait long, but a new request must not, so the limit is that of a step
        # without decoding sequences.
        return self._pace.encoding_s(plan.num_tokens, 0)

    def observe(self, plan: Plan, encoding_s: float) -> None:
        """If the encodings before the step of a plan were for idle sequences, charge these for the seconds that the encodings took."""
        if plan.encodes_idle:
            self._pace.charge_idle_further(plan.num_tokens - plan.num_idle, encoding_s)

    def choose(self, plan: Plan, *, allows_idle: bool) -> list[Encoding]:
        """Return the encodings to run before the step of a plan, in order. The first one may be nearly done, so its time is not counted:
        the other encodings together take about as long as the pace allows. API keys are charged for the encodings that are chosen.
        Encodings of idle sequences are returned only if `allows_idle` is set and no other encodings are chosen."""
        limit_s, chosen = self._pace.encoding_s(plan.num_tokens, plan.num_decode), self._chosen
        while (head := self._queue.head()) is not None and not self._is_enough(limit_s, head.rank[0]):
            encoding = self._waiting[head]
            self._leave_out_encoded(encoding)
            self._queue.charge(head.fairness_key, encoding.cost)
            self._queue.remove(head)
            insort(chosen, encoding, key=_priority)
        for encoding in chosen[1:]:
            if encoding.has_begun:  # when the first encoding begins, the model drops the parts of this one that have run
                encoding.priority, encoding.has_begun = chosen[0].priority, False
        chosen.sort(key=_priority)
        live = [encoding for encoding in chosen if not encoding.is_idle]
        return live if live or not allows_idle else [*chosen]

    def _is_enough(self, limit_s: float, priority: int) -> bool:
        """Return whether the chosen encodings of `priority` or a better one, all but the first, take at least `limit_s`. Before costs are
        measured, two such encodings are enough. If there is no such encoding, the result is False."""
        ahead = [encoding for encoding in self._chosen if encoding.priority <= priority]
        further = sum(encoding.cost for encoding in ahead[1:])
        further_s = self._pace.prompt_s(further) if further else 0.0
        return bool(ahead) and (further_s >= limit_s or (further > 0 and not further_s))

    def _leave_out_encoded(self, encoding: Encoding) -> None:
        """Remove from an encoding the excerpts that were encoded for other sequences since it was queued."""
        if not isinstance(encoding.work, Heard):
            encoding.work = {key: excerpt for key, excerpt in encoding.work.items() if not self._is_encoded(key)}
            encoding.cost = self._cost(encoding.work.values())


def _priority(encoding: Encoding) -> int:
    return encoding.priority
