"""Encode excerpts of images or recordings before a step of the engine. The rows of an excerpt are the vectors that take the places of its
tokens; those of the most recently used excerpts are kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.engine.step_model import Seen
from server.messages import Excerpt

KEPT_BYTES = 64 << 20  # most bytes of rows kept for later chunks, resumed sequences and other requests that have the same excerpt
Rows = NDArray[np.float32]


class ExcerptEncoder(ABC):
    """Encodes excerpts. The rows of an excerpt are the same bits whenever they are computed, so it does not matter which are kept."""

    def __init__(self, row_size: int) -> None:
        self._row_size = row_size
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()  # least recently used first

    @abstractmethod
    def rows_of(self, excerpts: Iterable[Any]) -> Iterable[Rows]:
        """Return the rows of each excerpt, in the order of its tokens."""

    def look(self, seen: Sequence[Seen]) -> tuple[NDArray[Any], ...]:
        """Return, for a step, the indices of the tokens that belong to excerpts, [tokens], and the rows that take their places,
        [tokens, row_size]."""
        if not seen:
            return np.empty(0, np.int32), np.empty((0, self._row_size), np.float32)
        found = {one.key: rows for one in seen if (rows := self._kept.get(one.key)) is not None}
        unknown: dict[bytes, Excerpt] = {one.key: one.excerpt for one in seen if one.key not in found}
        found |= zip(unknown, self.rows_of(unknown.values()), strict=True)
        for key, rows in found.items():
            self._kept[key] = rows
            self._kept.move_to_end(key)
        num_bytes = sum(rows.nbytes for rows in self._kept.values())
        while num_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, rows = self._kept.popitem(last=False)
            num_bytes -= rows.nbytes
        at = np.concatenate([np.arange(one.at, one.at + one.count, dtype=np.int32) for one in seen])
        return at, np.concatenate([found[one.key][one.row : one.row + one.count] for one in seen])


class BothEncoders(ExcerptEncoder):
    """Encodes crops of images and clips of recordings, each with the encoder of its kind."""

    def __init__(self, row_size: int, encoders: Mapping[type[Excerpt], ExcerptEncoder]) -> None:
        super().__init__(row_size)
        self.encoders = encoders

    def rows_of(self, excerpts: Iterable[Excerpt]) -> Iterable[Rows]:
        wanted = list(excerpts)
        by_kind = {
            kind: iter(encoder.rows_of([excerpt for excerpt in wanted if isinstance(excerpt, kind)]))
            for kind, encoder in self.encoders.items()
        }
        return [next(by_kind[type(excerpt)]) for excerpt in wanted]
