"""Encoders, over a session."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from compiler.frontend.encoder import ENTRY as ENCODE
from runtime.session import Session
from runtime.step import EmbedLimits

Texts = Sequence[Sequence[int]]
Vectors = NDArray[np.float32]


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
