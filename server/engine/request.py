"""The engine's records of a request and of each of its choices."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from server.constraints.matcher import Matcher
from server.engine.sampler import RowState
from server.engine.scheduling.cache_pool import Held
from server.messages import IDLE, Embed, Excerpt, FinishReason, Submit, TokenLogprob

TURN = 32  # least number of tokens that a sequence generates before a fresh sequence of its key may take its slot: see `Sequence.had_turn`


class Stage(Enum):
    """The stage of a sequence. Only the scheduler changes it. If a request is submitted again because a worker was lost, the choices that
    this worker had finished are FINISHED from the start."""

    WAITING = "waiting"  # waits for its constraint to be compiled, for pages of another server, for the leader's prefill, or for a slot
    PARKED = "parked"  # skips steps until its matcher answers
    RUNNING = "running"  # has a slot of the batch
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, eq=False)
class PlacedExcerpt:
    """An excerpt of an image or of a recording, and the positions of the prompt that read its rows."""

    excerpt: Excerpt
    key: bytes  # key under which its encoded rows are shared: the request's salt and the excerpt's digest
    start: int
    stop: int
    origin: int  # coordinate of its first token: see `server/engine/axes.py`
    stride: int  # positions from a row of its tokens to the next

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the runs of the excerpt's tokens among the positions start .. stop - 1: the first position, the number of tokens, and the
        first row of the excerpt that they read."""
        if self.stride == self.excerpt.columns:
            first, last = max(self.start, start), min(self.stop, stop)
            if first < last:
                yield first, last - first, first - self.start
            return
        for row in range(max(start - self.start, 0) // self.stride, self.excerpt.rows):
            begin = self.start + row * self.stride
            first, last = max(begin, start), min(begin + self.excerpt.columns, stop)
            if first < last:
                yield first, last - first, row * self.excerpt.columns + first - begin
            elif begin >= stop:
                return

    @property
    def offset(self) -> int:
        """The number that is added to the positions of the tokens after this excerpt, up to the next one, to get their coordinates."""
        return self.origin + max(self.excerpt.rows, self.excerpt.columns) - self.stop


def among(excerpts: Values[PlacedExcerpt], start: int, stop: int) -> Iterator[PlacedExcerpt]:
    """Yield, in order, the excerpts that extend into the positions start .. stop - 1. The range of positions may be empty. A binary search
    finds the first excerpt, because a prompt may have hundreds of excerpts."""
    for index in range(num_before(excerpts, start), len(excerpts)):
        if excerpts[index].start >= stop or start >= stop:
            return
        yield excerpts[index]


def num_before(excerpts: Values[PlacedExcerpt], start: int) -> int:
    """Return how many excerpts end at or before a position."""
    return bisect_right(excerpts, start, key=lambda placed: placed.stop)


@dataclass(slots=True, eq=False)
class Request:
    """A Submit and its choices. `leader` computes the prompt. Then each of `followers` is forked from `leader` or, if that is not possible,
    begins with published pages. A text to embed is a request whose only sequence draws no tokens."""

    submit: Submit
    arrival: int  # number of requests that arrived before it
    embed: Embed | None = None  # the text to embed; None: the request generates
    sequences: list[Sequence] = field(default_factory=lambda: list[Sequence]())  # its choices; empty once the request has ended
    leader: Sequence | None = None  # None: the request is not scheduled yet, every choice has generated tokens already, or it has ended
    followers: list[Sequence] = field(default_factory=lambda: list[Sequence]())  # choices that wait for the leader's prompt
    excerpts: tuple[PlacedExcerpt, ...] = ()  # excerpts of the prompt's images or recordings, in order of position
    ender_ids: frozenset[int] = frozenset()  # tokens that end a choice once it has generated min_tokens tokens
    num_cached: int | None = None  # prompt tokens that the first admitted choice found in the prefix cache; None: none is admitted yet

    @property
    def is_finished(self) -> bool:
        return all(seq.stage is Stage.FINISHED for seq in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. Its counts of tokens are always related as follows:

        num_reused <= num_computed <= num_tokens == num_known + num_awaited     num_prompt <= num_known <= max_len

    reused: taken from the prefix cache or from the leader when the sequence was last admitted; computed: their keys and values are in the
    KV cache, or a launched step or the open plan computes them (the device runs steps in order); known: in `token_ids`; awaited: not drawn
    yet, but their rows are being computed, or are in the open plan.
    """

    request: Request
    choice: int  # its number among the choices of the request
    token_ids: list[int]
    held: Held  # its pages
    row: RowState  # the sampler's state
    max_len: int  # number of tokens, those of the prompt included, at which the choice ends with FinishReason.LENGTH
    stage: Stage = Stage.WAITING
    slot: int = -1  # its row in the page tables of the batch while RUNNING, otherwise -1
    matcher: Matcher | None = None  # None: every token is always allowed
    num_reused: int = 0
    num_computed: int = 0
    num_awaited: int = 0
    has_heard: bool = False  # its pages have the keys and values of the request's audio
    rank: tuple[int, int, int] = (0, 0, 0)  # priority, arrival, choice: lower is earlier
    prompt_logprobs: list[TokenLogprob | None] | None = None  # None: not requested, or sent already
    prompt_vectors: list[NDArray[np.float32]] | None = None  # vectors of the text's tokens so far; None: not requested for each token
    unsent_ids: list[int] = field(default_factory=list[int])  # drawn or forced, but held back while the matcher selects a tool
    unsent_logprobs: tuple[TokenLogprob, ...] = ()  # log-probabilities of `unsent_ids`, if requested
    finish_reason: FinishReason | None = None  # None: the choice has not ended, or its request has failed
    stop_token_id: int | None = None  # the token that ended the choice, which is not in `token_ids`; None: no such token

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while log-probabilities of the prompt are requested and not complete."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt

    @property
    def num_rows_known(self) -> int | None:
        """If the rows of all prompt tokens are requested: how many of these rows were computed already. None if only the row of the last
        token is requested, or once the log-probabilities of the prompt are complete. Row i gives the log-probability of token i + 1, or the
        vector of token i."""
        if self.prompt_logprobs is not None and self.wants_prompt_logprobs:
            return len(self.prompt_logprobs) - 1
        return None if self.prompt_vectors is None else len(self.prompt_vectors)

    @property
    def is_idle(self) -> bool:
        """Whether the sequence belongs to a batch job (priority IDLE), which uses only the capacity of steps that other sequences leave."""
        return self.rank[0] == IDLE

    @property
    def choosing(self) -> Matcher | None:
        """The matcher while it selects a tool, and so may take back the last tokens; otherwise None."""
        return self.matcher if self.matcher is not None and self.matcher.is_choosing else None

    @property
    def is_late(self) -> bool:
        """True while the matcher waits for an answer of the process that runs its grammar."""
        return self.matcher is not None and self.matcher.is_late

    @property
    def fairness_key(self) -> str:
        return self.request.submit.fairness_key

    @property
    def had_turn(self) -> bool:
        """True once the sequence has generated the tokens of its turn: fresh sequences of its key may then take its slot (`Scheduler`). A
        turn is TURN tokens or, if that is more, as many tokens as the prompt has. So computing the sequence again costs at most two tokens
        for each token that it has generated."""
        return self.num_known - self.num_prompt >= max(TURN, self.num_prompt)

    @property
    def num_prompt(self) -> int:
        return len(self.request.submit.prompt_ids)

    @property
    def num_known(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_awaited

    @property
    def num_to_compute(self) -> int:
        """The number of tokens that are not computed yet, awaited ones included."""
        return len(self.token_ids) + self.num_awaited - self.num_computed

    @property
    def num_reusable(self) -> int:
        """The largest number of tokens that may come from the prefix cache. The model must compute a token whose row is requested, and the
        last token."""
        return self.num_known - 1 if self.num_rows_known is None else self.num_rows_known

    def append(self, token_id: int) -> FinishReason | None:
        """Append a drawn or forced token. Return the reason if the choice ends with this token. Return None if the choice continues, or if
        the matcher is late, so that this is not known yet. A stop token is recorded, but not appended."""
        if token_id in self.request.ender_ids and self.num_known - self.num_prompt >= self.request.submit.params.min_tokens:
            self.stop_token_id = token_id
            return FinishReason.STOP
        self.token_ids.append(token_id)
        self.row.advance(token_id)
        if self.matcher is not None:
            self.matcher.advance([token_id])
            return self.ending
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_len else None

    def drop(self, num_tokens: int) -> None:
        """Remove the last `num_tokens` tokens, none of which was sent to the client. The caller corrects the sampler's state, the pages and
        the counts."""
        del self.token_ids[self.num_known - num_tokens :]
        self.unsent_ids = self.unsent_ids[: len(self.unsent_ids) - num_tokens]
        self.unsent_logprobs = self.unsent_logprobs[: len(self.unsent_ids)]

    @property
    def ending(self) -> FinishReason | None:
        """The reason why the choice ends after its current tokens, or None while it continues or its matcher is late."""
        if self.is_late:
            return None
        if self.matcher is not None and self.matcher.is_complete:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_known >= self.max_len else None

    def follow(self) -> tuple[list[int], FinishReason | None]:
        """Append the tokens that the matcher forces, without a step of the model. Return these tokens, and the reason if the choice ends
        with one of them. Append nothing if the request asks for log-probabilities or changes logits, because a step of the model is needed
        then. For the same reason, stop before a forced stop token."""
        joined: list[int] = []
        if self.matcher is None or not self.row.is_plain or self.row.params.logprobs is not None or self.prompt_logprobs is not None:
            return joined, None
        for token_id in self.matcher.forced():
            if token_id in self.request.ender_ids:
                break
            joined.append(token_id)
            reason = self.append(token_id)
            if reason is not None:
                return joined, reason
        return joined, None

    def check(self) -> None:
        """Assert that the counts of tokens are related as the class's docstring states, and that the sequence has pages for its computed
        tokens."""
        assert 0 <= self.num_reused <= self.num_computed <= self.num_tokens, self
        assert self.num_prompt <= self.num_known <= self.max_len, self
        assert all(held.num_tokens >= self.num_computed for held in self.held.lists), self
