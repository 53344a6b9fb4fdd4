"""The interface between the engine and a model.

A step of a causal model is ragged: a batch says which tokens run, where each cache group stores them, and which rows of logits or hidden
states are requested. A batch has `t` tokens of `s` sequences, prefill and decode mixed; the tokens of one sequence are contiguous. An
encoder's step takes whole texts and keeps nothing between steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import ClassVar, NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.cache_groups import PAGE_SIZE
from runtime.hops import tokens_of
from runtime.parts import InParts
from runtime.sampling import Logprobs, SampleBatch, Sampled
from runtime.spectrogram import AROUND, HOP
from server.messages import Clip, Crop, Excerpt

# Rows of logits [r, vocab] on the device. Opaque: only the model that made them reads them. Valid until the model's next step.
Logits = NewType("Logits", object)

NO_ROWS: NDArray[np.int32] = np.empty(0, np.int32)
SAMPLE_BYTES = 4  # bytes of a sample of audio
EXAMPLE_EDGE = 16  # edge, in squares, of the crop whose encoding is measured; it is smaller if crops have fewer squares


@dataclass(frozen=True, slots=True)
class Places:
    """The pages of one cache group in a step."""

    slots: NDArray[np.int32]  # [t] where each token's key and value are stored: page * page_size + offset
    page_tables: NDArray[np.int32]  # [s, p] pages in order of position; 0 for pages that were given back, and after the last page


Excerpts = Mapping[bytes, Excerpt]  # excerpts by their keys: see `ExcerptTokens.key`


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """Audio that a model hears before the first step of a sequence."""

    # samples of at most `StepLimits.num_hops` hops, and the AROUND samples beside them (runtime/spectrogram.py)
    samples: NDArray[np.float32]
    loudest: float  # the largest energy of the whole recording
    page: int  # the sequence's page in the last cache group, which gets the keys and values of the audio


@dataclass(frozen=True, slots=True)
class ExcerptTokens:
    """The tokens of an excerpt of an image or of a recording that are in a step: `count` tokens from index `at` of the step on. They read
    the rows of the excerpt from index `row` on."""

    excerpt: Excerpt
    key: bytes  # excerpts with equal keys are equal, and may share their encoded rows
    at: int
    row: int
    count: int
    last: int = 0  # position of the last token of the excerpt in its sequence


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The arrays of a step, with `t` tokens of `s` sequences."""

    tokens: NDArray[np.int32]  # [t]
    positions: NDArray[np.int32]  # [t] position of each token in its sequence
    query_starts: NDArray[np.int32]  # [s + 1] first token of each sequence; the last entry is t
    seq_ids: NDArray[np.int32]  # [t] number of each token's sequence in this step, ascending
    context_lens: NDArray[np.int32]  # [s] tokens of the sequence after this step
    places: tuple[Places, ...]  # one per cache group
    logit_rows: NDArray[np.int32]  # [r] tokens whose logits are requested, ascending
    hidden_rows: NDArray[np.int32] = field(default_factory=lambda: NO_ROWS)  # [h] tokens whose hidden states are requested, ascending
    seen: tuple[ExcerptTokens, ...] = ()  # the excerpts that have tokens in this step, ascending
    # [t, 3] coordinates of each token, if the model reads three; None: the model reads one, or each of the three equals the token's
    # position
    axes: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The limits of a cache group: see `runtime.cache_groups`."""

    num_pages: int  # page 0 is never allocated: unused entries of page tables refer to it
    window: int | None = None  # tokens that a token attends to, itself included; None: itself and all before it
    keeps_states: bool = False  # a page has the state after its last token, so a sequence can continue only after full pages
    page_size: int = PAGE_SIZE  # tokens per page: a multiple of PAGE_SIZE
    page_bytes: int = 0  # bytes of a page as `read_page` returns it; 0: pages cannot be read or written

    def most_pages(self, max_tokens: int) -> int | None:
        """Return the largest number of pages that a sequence holds at a time if at most `max_tokens` of its tokens run in a step. Return
        None if the number grows with the sequence."""
        return None if self.window is None else (self.window + max_tokens + self.page_size - 3) // self.page_size + 1


@dataclass(frozen=True, slots=True)
class SeeingLimits:
    """The crops of images that a model sees. A crop is one square or, if images keep their size, a rectangle of up to `most_squares`
    squares of one size."""

    # `medium`, `parts` and `reads` are words for messages; `medium` also names the measured cost of an encoding (`pace.Measured`)
    kind: ClassVar[type[Excerpt]] = Crop
    medium: ClassVar[str] = "image"
    parts: ClassVar[str] = "crops of images"
    reads: ClassVar[str] = "sees images"
    square_bytes: int  # bytes of a square's pixels
    edge_tokens: int  # a square has this many rows and this many columns of tokens in the prompt
    token: int  # id of the token whose places in the prompt read the encoder's rows
    cost: int  # prompt tokens that take about as long as encoding `example`: an estimate, used until that encoding is measured
    most_squares: int = 1  # largest number of squares of a crop
    three_axes: bool = False  # tokens of images have three coordinates, by which the model rotates queries and keys
    both_ways: bool = False  # the tokens of a crop attend to each other in both directions, so all of them are in one step
    has_breaks: bool = False  # another token stands between two rows of tokens of a crop

    @property
    def example(self) -> Crop:
        """A black crop whose encoding is measured."""
        edge = self._example_edge
        return Crop.of(bytes(self.square_bytes * edge**2), edge * self.edge_tokens, edge * self.edge_tokens)

    def share(self, num_tokens: int) -> float:
        """Return the cost of encoding crops with this number of tokens in all, as a share of the cost of `example`."""
        return num_tokens / (self._example_edge * self.edge_tokens) ** 2

    @property
    def _example_edge(self) -> int:
        """The edge of `example` in squares."""
        return min(EXAMPLE_EDGE, isqrt(self.most_squares))

    def fault(self, crop: Excerpt) -> str:
        """Return why the model cannot see a crop, or "" if it can."""
        assert isinstance(crop, Crop), crop
        rows, columns = (count / self.edge_tokens for count in (crop.rows, crop.columns))
        if not (rows.is_integer() and columns.is_integer() and min(rows, columns) >= 1 and rows * columns <= self.most_squares):
            most = f"multiples of {self.edge_tokens}, at most {self.most_squares * self.edge_tokens**2} tokens"
            return f"a crop has {crop.rows} rows and {crop.columns} columns of tokens; expected {most}"
        wanted = int(rows * columns) * self.square_bytes
        return "" if len(crop.pixels) == wanted else f"a crop has {len(crop.pixels)} bytes; expected {wanted}"


@dataclass(frozen=True, slots=True)
class ListeningLimits:
    """The clips of recordings that a model hears in conversations. The class variables have the same meaning as in `SeeingLimits`."""

    kind: ClassVar[type[Excerpt]] = Clip
    medium: ClassVar[str] = "audio"
    parts: ClassVar[str] = "clips of recordings"
    reads: ClassVar[str] = "hears audio"
    three_axes: ClassVar[bool] = False
    both_ways: ClassVar[bool] = False
    has_breaks: ClassVar[bool] = False
    num_hops: int  # hops, 10 ms each, of a window: as much audio as the encoder reads at once
    frames_each: int  # number of frames per token; a frame is two hops
    token: int  # id of the token whose places in the prompt read the encoder's rows
    cost: int  # prompt tokens that take about as long as encoding `example`: an estimate, used until that encoding is measured
    ends: bool  # a clip may have fewer hops than a window
    piece_hops: int = 0  # hops of a piece, if the encoder reads pieces separately (see `runtime/hops.py`); 0: it reads whole windows

    @property
    def example(self) -> Clip:
        """A silent clip whose encoding is measured."""
        return Clip.of(b"", 0.0, self.num_hops, self.num_tokens(self.num_hops))

    def num_tokens(self, num_hops: int) -> int:
        """Return how many tokens of the prompt a clip of `num_hops` hops takes."""
        return tokens_of(num_hops, self.frames_each, self.piece_hops)

    def share(self, num_tokens: int) -> float:
        """Return the cost of encoding clips with this number of tokens in all, as a share of the cost of `example`."""
        return num_tokens / self.num_tokens(self.num_hops)

    def fault(self, clip: Excerpt) -> str:
        """Return why the model cannot hear a clip, or "" if it can."""
        assert isinstance(clip, Clip), clip
        if not 1 <= clip.num_hops <= self.num_hops or (clip.num_hops < self.num_hops and not self.ends):
            wanted = f"1 to {self.num_hops}" if self.ends else self.num_hops
            return f"a clip has {clip.num_hops} hops; expected {wanted}"
        if not 1 <= clip.num_tokens == self.num_tokens(clip.num_hops):
            return f"a clip of {clip.num_hops} hops has {clip.num_tokens} tokens; expected {self.num_tokens(clip.num_hops)}, and at least 1"
        most = SAMPLE_BYTES * (HOP * self.num_hops + AROUND)
        if len(clip.samples) % SAMPLE_BYTES or len(clip.samples) > most:
            return f"a clip has {len(clip.samples)} bytes; expected samples of {SAMPLE_BYTES} bytes, at most {most} bytes"
        return ""


ExcerptLimits = SeeingLimits | ListeningLimits


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of one step: num_rows <= max_seqs for logits and hidden states together, num_seqs <= max_seqs, num_tokens <= max_tokens. A
    sequence has at most max_context tokens."""

    vocab_size: int
    max_context: int
    max_tokens: int
    max_seqs: int
    groups: tuple[GroupLimits, ...]
    embedding_size: int = 0  # elements of a hidden state; 0: the model gives no hidden states
    generates: bool = True  # False: the model gives no logits
    num_hops: int = 0  # most hops, 10 ms each, of the audio that a sequence transcribes; 0: the model does not transcribe
    hearing_cost: int = 0  # an estimate: prompt tokens that take about as long as hearing a window of audio
    excerpts: tuple[ExcerptLimits, ...] = ()  # limits of crops of images, of clips, or of both; empty: the model reads neither

    @property
    def three_axes(self) -> bool:
        """Whether tokens have three coordinates, by which the model rotates queries and keys."""
        return any(limits.three_axes for limits in self.excerpts)

    @property
    def both_ways(self) -> bool:
        """Whether the tokens of some excerpts attend to each other in both directions."""
        return any(limits.both_ways for limits in self.excerpts)

    @property
    def capacity(self) -> int:
        """The largest number of tokens in one sequence that fits into the cache and the model's positions."""
        short = (group for group in self.groups if (most := group.most_pages(self.max_tokens)) is None or most > group.num_pages - 1)
        return min((self.max_context, *((group.num_pages - 1) * group.page_size for group in short)))


class StepModel(Protocol):
    """A model that runs ragged steps on a KV cache: it generates text, gives hidden states, or both."""

    @property
    def limits(self) -> StepLimits: ...

    def run(self, batch: StepBatch) -> Logits:
        """Append keys and values of all tokens, and return the logits [r, vocab] of the requested rows. A row depends only on its own
        sequence. Excerpts that are not encoded yet are encoded first."""
        ...

    def is_encoded(self, key: bytes) -> bool:
        """Return whether the encoded rows of an excerpt are kept, so that `run` need not encode it. Another thread may call this while the
        model runs."""
        ...

    def spare(self, keys: Collection[bytes]) -> None:
        """Until the next call of `spare`, keep the rows of excerpts with these keys once they are encoded. Rows of other excerpts may be
        dropped at any time."""
        ...

    def encode(self, work: Excerpts | Heard) -> bool:
        """Run the next part of `work`: encode a part of those excerpts that are not encoded yet, or hear a part of the audio. If other work
        has begun, drop its parts, but keep the excerpts that are encoded completely. Return whether this was the last part of `work`. Steps
        may run between two parts."""
        ...

    def sample(self, logits: Logits, batch: SampleBatch) -> Sampled:
        """Draw tokens from the logits of the last step: see `runtime.sampling`."""
        ...

    def logprobs(self, logits: Logits, rows: NDArray[np.int32], tokens: NDArray[np.int32], tops: NDArray[np.int32]) -> Logprobs:
        """Return log-probabilities of `tokens`. Token i is scored by row `rows[i]` of the logits, with `tops[i]` alternatives."""
        ...

    def download(self, logits: Logits) -> NDArray[np.float32]:
        """Copy the logits to the host [r, vocab]: for matchers that read logits, and to check or compare models. Tokens are drawn with
        `sample`."""
        ...

    def hidden(self) -> NDArray[np.float32]:
        """Return the hidden states of the last step's `hidden_rows` after the last norm [h, embedding_size]. A row depends only on its own
        sequence."""
        ...

    def copy_page(self, group: int, source: int, target: int) -> None:
        """Copy one page in every layer of a cache group (for copy-on-write)."""
        ...

    def read_page(self, group: int, page: int) -> bytes:
        """Return the bytes of a page in every layer of a cache group."""
        ...

    def write_page(self, group: int, page: int, data: bytes | memoryview) -> None:
        """Set a page to the bytes that `read_page` of a model with the same fingerprint has returned."""
        ...


@dataclass(frozen=True, slots=True)
class EmbedLimits:
    """The limits of one step: at most max_seqs texts, each of at most max_context tokens, with at most max_tokens tokens together.
    max_tokens is at least max_context."""

    vocab_size: int
    embedding_size: int  # elements of a vector, or number of classes
    max_context: int
    max_tokens: int
    max_seqs: int
    seeing: SeeingLimits | None = None  # None: the model embeds no images


class EmbedModel(Protocol):
    """An encoder, which embeds or classifies whole texts, and may embed images."""

    @property
    def limits(self) -> EmbedLimits: ...

    def run(self, token_lists: Sequence[Sequence[int]], seconds: Sequence[int | None]) -> NDArray[np.float32]:
        """Return one pooled vector per text [n, embedding_size], not normalised, or one number per class. A row depends only on its own
        text. `seconds` has, for each text, the index where the second text of a pair begins, or None."""
        ...

    def see(self, crops: Sequence[Crop]) -> InParts[NDArray[np.float32]]:
        """Compute in parts one vector per image [n, embedding_size], not normalised. A row depends only on its own image. `run` may be
        called between two parts, but `see` may not."""
        ...
