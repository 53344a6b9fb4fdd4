"""Apply Whisper's rules for time stamps. A transcript begins with a stamp. After each segment stand two stamps: the end of this segment and
the beginning of the next. After the last segment stands only its end. The times of stamps never decrease. A stamp is drawn where all stamps
together are more probable than every other token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from server.constraints.matcher import Mask, Matcher
from server.constraints.process.wire import num_mask_words
from server.messages import Stamps


class StampMatcher(Matcher):
    """Follows the transcript of one window of audio."""

    reads_logits = True

    def __init__(self, stamps: Stamps, vocab_size: int, token_ids: Sequence[int] = ()) -> None:
        self._stamps = stamps
        self._num_words = num_mask_words(vocab_size)
        self._vocab_size = vocab_size
        self._token_ids: list[int] = []
        self._latest = stamps.first  # the last stamp of the transcript; before it has one, the stamp 0.00
        self.advance(token_ids)

    def mask(self) -> Mask:
        """Return the mask of the next token by the rules that need no logits."""
        allowed = self._allowed()
        bits = np.zeros(self._num_words * 32, np.bool_)
        bits[: len(allowed)] = allowed
        return np.packbits(bits, bitorder="little").view(np.int32)

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._token_ids.append(token_id)
            if self._is_stamp(token_id):
                self._latest = token_id

    def restrict(self, mask: Mask, logits: NDArray[np.float32]) -> Mask:
        """Return a mask that allows only stamps if all allowed stamps together are more probable than every other allowed token. Otherwise
        return `mask` unchanged."""
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits)].astype(np.bool_)
        first = self._stamps.first
        stamps, others = logits[first:][allowed[first:]], logits[:first][allowed[:first]]
        if not len(stamps) or not len(others):
            return mask
        top = float(stamps.max())
        if top + np.log(np.exp(stamps.astype(np.float64) - top).sum()) <= float(others.max()):
            return mask
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        bits[:first] = 0
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _allowed(self) -> NDArray[np.bool_]:
        """Return for each token whether the rules allow it next. The first token is a stamp, at most `most_first` stamps after 0.00. After
        a stamp that begins a segment, no stamp may follow. After a stamp that ends a segment, no text may follow, and the next stamp must
        have the same time or a later one. After text, a stamp must have a later time than the last stamp."""
        stamps, drawn = self._stamps, self._token_ids
        allowed = np.ones(self._vocab_size, np.bool_)
        if not drawn:
            allowed[: stamps.first] = False
            allowed[stamps.first + stamps.most_first + 1 :] = False
            return allowed
        ends, began = self._is_stamp(drawn[-1]), len(drawn) < 2 or self._is_stamp(drawn[-2])
        if ends and began:
            allowed[stamps.first :] = False
        elif ends:
            allowed[: stamps.end] = False
        least = self._latest if ends and not began else self._latest + 1
        allowed[stamps.first : least] = False
        return allowed

    def _is_stamp(self, token_id: int) -> bool:
        """Return whether a token is a time stamp."""
        return token_id >= self._stamps.first
