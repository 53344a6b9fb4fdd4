"""What the engine needs of a model. One ragged step of a causal model: which tokens run, where each cache group keeps what it keeps of
them, which rows are wanted. `t` tokens of `s` sequences; the tokens of one sequence stand together, prefill and decode mixed.
Beside it, one step of an encoder, which sees whole texts and keeps nothing between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.cache_groups import PAGE_SIZE
from runtime.sampling import Logprobs, SampleBatch, Sampled

# Rows of logits [r, vocab] where the device left them. Opaque: only the model that made them reads them. Valid until its next step.
Logits = NewType("Logits", object)

NO_ROWS: NDArray[np.int32] = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Places:
    """The pages of one cache group in a step."""

    slots: NDArray[np.int32]  # [t] where its key and value go: page * page_size + offset
    page_tables: NDArray[np.int32]  # [s, p] pages in order of position; entries behind the window or beyond the context are 0


@dataclass(frozen=True, slots=True)
class StepBatch:
    tokens: NDArray[np.int32]  # [t]
    positions: NDArray[np.int32]  # [t] position of each token in its sequence
    query_starts: NDArray[np.int32]  # [s + 1] first token of each sequence; the last entry is t
    context_lens: NDArray[np.int32]  # [s] tokens of the sequence after this step
    places: tuple[Places, ...]  # of each cache group
    logit_rows: NDArray[np.int32]  # [r] tokens whose logits are wanted, ascending
    hidden_rows: NDArray[np.int32] = field(default_factory=lambda: NO_ROWS)  # [h] tokens whose hidden states are wanted, ascending


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Of a cache group: see `runtime.cache_groups`."""

    num_pages: int  # page 0 is never handed out: padding points at it
    window: int | None = None  # tokens that a token reads, itself included; None: all before it
    keeps_states: bool = False  # a page has the state behind its last token, so a sequence goes on behind full pages alone
    page_size: int = PAGE_SIZE  # tokens: a multiple of PAGE_SIZE

    def most_pages(self, max_tokens: int) -> int | None:
        """What a sequence needs at a time while at most so many of its tokens run in a step. None: the longer it is, the more."""
        return None if self.window is None else (self.window + max_tokens + self.page_size - 3) // self.page_size + 1


@dataclass(frozen=True, slots=True)
class StepLimits:
    """num_rows <= max_seqs for logits and hidden states together, num_seqs <= max_seqs and num_tokens <= max_tokens in one step; a
    sequence holds at most max_context tokens."""

    vocab_size: int
    max_context: int
    max_tokens: int
    max_seqs: int
    groups: tuple[GroupLimits, ...]
    embedding_size: int = 0  # of a hidden state; 0: it gives none
    generates: bool = True  # False: it gives no logits

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that the cache holds, and the model has positions for."""
        short = (group for group in self.groups if (most := group.most_pages(self.max_tokens)) is None or most > group.num_pages - 1)
        return min((self.max_context, *((group.num_pages - 1) * group.page_size for group in short)))


class StepModel(Protocol):
    @property
    def limits(self) -> StepLimits: ...

    def run(self, batch: StepBatch) -> Logits:
        """Append keys and values of all tokens, compute logits [r, vocab] of the rows wanted. A row depends on nothing but its own
        sequence."""
        ...

    def sample(self, logits: Logits, batch: SampleBatch) -> Sampled:
        """Tokens from the logits of the last step, as the batch asks: see `runtime.sampling`."""
        ...

    def logprobs(self, logits: Logits, rows: NDArray[np.int32], tokens: NDArray[np.int32], tops: NDArray[np.int32]) -> Logprobs:
        """Log-probabilities of given tokens. Each belongs to a row of the logits; `tops` says how many alternatives are reported."""
        ...

    def download(self, logits: Logits) -> NDArray[np.float32]:
        """A copy on the host, [r, vocab], to check or to compare models by. An engine needs none: it draws by `sample`."""
        ...

    def hidden(self) -> NDArray[np.float32]:
        """Of the last step: what the last norm gave for its `hidden_rows` [h, embedding_size]. Neither do they depend on more."""
        ...

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copy-on-write: duplicate one page in every layer of a cache group."""
        ...


@dataclass(frozen=True, slots=True)
class EmbedLimits:
    """A text holds at most max_context tokens, all texts of one step at most max_tokens >= max_context together."""

    embedding_size: int  # or the number of classes
    max_context: int
    max_tokens: int
    max_seqs: int


class EmbedModel(Protocol):
    @property
    def limits(self) -> EmbedLimits: ...

    def run(self, token_lists: Sequence[Sequence[int]], seconds: Sequence[int | None]) -> NDArray[np.float32]:
        """One pooled vector per text [n, embedding_size], not normalised, or the numbers of its classes. A row depends on nothing but its
        own text. `seconds` tells where the second text of a pair begins."""
        ...
