"""Models that embed, over a session: encoders, which see whole texts, and decoders, whose last token has seen its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.encoder import ENTRY as ENCODE
from runtime.session import Session
from runtime.step import PAGE_SIZE, EmbedLimits

Texts = Sequence[Sequence[int]]
Vectors = NDArray[np.float32]
Forward = Callable[..., Vectors]  # tokens, positions, slots, seq_ids, page_tables, rows -> hidden states of the rows


class EncoderModel:
    """All texts in one step."""

    def __init__(self, session: Session, limits: EmbedLimits) -> None:
        self._session = session
        self.limits = limits

    def run(self, token_lists: Texts) -> Vectors:
        lengths = [len(tokens) for tokens in token_lists]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        text_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        positions = np.arange(starts[-1], dtype=np.int32) - starts[text_ids]
        tokens = np.fromiter((token for tokens in token_lists for token in tokens), np.int32, int(starts[-1]))
        return self._session.call(ENCODE, tokens, positions, text_ids, starts)


class DecoderModel:
    """Texts one behind the other, in steps of as many tokens as a step takes; the cache is a place to work in, empty at every call."""

    def __init__(self, forward: Forward, limits: EmbedLimits, *, step_tokens: int, first_page: int = 1) -> None:
        """From `first_page` on, pages are free to use."""
        self._forward = forward
        self.limits = limits
        self._step_tokens = step_tokens
        self._first_page = first_page

    def run(self, token_lists: Texts) -> Vectors:
        lengths = np.array([len(tokens) for tokens in token_lists], np.int32)
        ends = np.cumsum(lengths)
        text_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        positions = (np.arange(len(text_ids)) - (ends - lengths)[text_ids]).astype(np.int32)
        tokens = np.fromiter((token for tokens in token_lists for token in tokens), np.int32, len(text_ids))
        assert len(tokens) <= self.limits.max_tokens, (len(tokens), self.limits)  # there are pages for so many
        tables = _tables(-(-lengths // PAGE_SIZE), self._first_page)
        slots = tables[text_ids, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        vectors = np.empty((len(lengths), self.limits.embedding_size), np.float32)
        for first in range(0, len(tokens), self._step_tokens):
            part = slice(first, first + self._step_tokens)
            ending = np.flatnonzero((ends > first) & (ends <= part.stop))  # texts whose last token is in this step
            rows = (ends[ending] - 1 - first).astype(np.int32)
            vectors[ending] = self._forward(tokens[part], positions[part], slots[part], text_ids[part], tables, rows)
        return vectors


def _tables(num_pages: NDArray[np.int32], first_page: int) -> NDArray[np.int32]:
    """Pages in order, text by text: [texts, most pages of a text]."""
    first = first_page + np.cumsum(num_pages) - num_pages
    place = np.arange(num_pages.max(initial=0))
    return np.where(place < num_pages[:, None], first[:, None] + place, 0).astype(np.int32)
