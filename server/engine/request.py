"""What the engine knows about a request and about each of its choices."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from server.constraints.matcher import Matcher
from server.engine.sampler import RowState
from server.engine.scheduling.cache_pool import Held
from server.messages import Embed, FinishReason, Submit, TokenLogprob


class Stage(Enum):
    """Changed by the scheduler alone."""

    WAITING = "waiting"  # for its constraint to be compiled, or for a slot
    PARKED = "parked"  # until its matcher answers
    RUNNING = "running"  # it has a slot of the batch
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A Submit and its choices. `leader` computes the prompt, those in `followers` are forked from it when it has. A text to embed is a
    prompt that draws nothing."""

    submit: Submit
    arrival: int
    embed: Embed | None = None
    sequences: list[Sequence] = field(default_factory=lambda: list[Sequence]())
    leader: Sequence | None = None
    followers: list[Sequence] = field(default_factory=lambda: list[Sequence]())
    ender_ids: frozenset[int] = frozenset()  # they end a choice, once min_tokens are drawn
    num_cached: int | None = None  # what the first prefill of any choice found in the prefix cache

    @property
    def is_finished(self) -> bool:
        return all(seq.stage is Stage.FINISHED for seq in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. In counts of tokens, at any time:

        num_reused <= num_computed <= num_tokens == num_known + num_awaited     num_prompt <= num_known <= max_len

    reused: taken from the prefix cache or from the leader when it last began to run; computed: in the KV cache, or in a step handed
    to the device, which works in order; known: `token_ids`; awaited: rows being computed whose token is not drawn yet.
    """

    request: Request
    choice: int
    token_ids: list[int]
    held: Held
    row: RowState
    max_len: int  # tokens at which it ends for length
    stage: Stage = Stage.WAITING
    slot: int = -1  # its row in the batch's tables while RUNNING
    matcher: Matcher | None = None  # None: every token may come next, always
    num_reused: int = 0
    num_computed: int = 0
    num_awaited: int = 0
    rank: tuple[int, int, int] = (0, 0, 0)
    prompt_logprobs: list[TokenLogprob | None] | None = None  # None: not asked for, or delivered
    prompt_vectors: list[NDArray[np.float32]] | None = None  # of a text to embed token by token; None: not asked for
    unsent_ids: list[int] = field(default_factory=list[int])  # drawn while its matcher chooses
    unsent_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Log-probabilities of its prompt are wanted that are not there yet."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt

    @property
    def num_rows_known(self) -> int | None:
        """The row of each token of the prompt is wanted, and those of so many are there. None: only the last token's row is wanted. The row
        of token i gives the log-probability of token i + 1, or the vector of token i."""
        if self.prompt_logprobs is not None and self.wants_prompt_logprobs:
            return len(self.prompt_logprobs) - 1
        return None if self.prompt_vectors is None else len(self.prompt_vectors)

    @property
    def choosing(self) -> Matcher | None:
        """Its matcher, while that decides what the last tokens are for; they may be taken back."""
        return self.matcher if self.matcher is not None and self.matcher.is_choosing else None

    @property
    def is_late(self) -> bool:
        """Its matcher was asked, and has not answered yet."""
        return self.matcher is not None and self.matcher.is_late

    @property
    def fairness_key(self) -> str:
        return self.request.submit.fairness_key

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
        return len(self.token_ids) + self.num_awaited - self.num_computed

    @property
    def num_reusable(self) -> int:
        """How much of the beginning may come from the cache: every token whose row is wanted must run, and the last one always."""
        return self.num_known - 1 if self.num_rows_known is None else self.num_rows_known

    def append(self, token_id: int) -> FinishReason | None:
        """Why it ends with this token, if it does; a stop token is no part of it."""
        if token_id in self.request.ender_ids and self.num_known - self.num_prompt >= self.request.submit.params.min_tokens:
            self.stop_token_id = token_id
            return FinishReason.STOP
        self.token_ids.append(token_id)
        self.row.advance(token_id)
        if self.matcher is not None:
            self.matcher.advance([token_id])
        return self.ending

    def drop(self, num_tokens: int) -> None:
        """Take the last tokens off. Nobody was told of them."""
        del self.token_ids[self.num_known - num_tokens :]
        self.unsent_ids = self.unsent_ids[: len(self.unsent_ids) - num_tokens]
        self.unsent_logprobs = self.unsent_logprobs[: len(self.unsent_ids)]

    @property
    def ending(self) -> FinishReason | None:
        """Why it ends with the tokens it has, as far as that is known."""
        if self.is_late:
            return None
        if self.matcher is not None and self.matcher.is_complete:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_known >= self.max_len else None

    def follow(self) -> tuple[list[int], FinishReason | None]:
        """Append what the matcher forces, without running the model. Only where drawing could give nothing else: with
        log-probabilities wanted, logits changed or a stop token in the way, the model's step decides."""
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
        assert 0 <= self.num_reused <= self.num_computed <= self.num_tokens, self
        assert self.num_prompt <= self.num_known <= self.max_len, self
        assert all(held.num_tokens >= self.num_computed for held in self.held.lists), self
