"""Encode excerpts of images or recordings in parts, between which the engine runs steps. The rows of an excerpt are the vectors that take
the places of its tokens; those of the most recently used excerpts are kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.parts import InParts, OneAtATime
from server.engine.step_model import Excerpts, ExcerptTokens
from server.messages import Excerpt

KEPT_BYTES = 64 << 20  # most bytes of rows kept for resumed sequences and other requests; spared rows (`spare`) may take more
Rows = NDArray[np.float32]


class ExcerptEncoder(ABC):
    """Encodes excerpts. A row has `row_size` elements. The rows of an excerpt are the same bits whenever they are computed, so it does not
    matter which are kept."""

    def __init__(self, row_size: int) -> None:
        self._row_size = row_size
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()  # least recently used first
        self._spared: frozenset[bytes] = frozenset()
        self._begun = OneAtATime[bool]()

    @abstractmethod
    def rows_of(self, excerpts: Sequence[Any]) -> InParts[list[Rows]]:
        """Encode excerpts that `together` has yielded as one group. Yield between two parts of the work. Return the rows of each excerpt,
        in the order of its tokens."""

    def together(self, excerpts: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Yield the excerpts, in order, in groups that one call of the program encodes. The rows of a group are kept once it is encoded."""
        return ((excerpt,) for excerpt in excerpts)

    def spare(self, keys: Collection[bytes]) -> None:
        """From now on, keep the rows with these keys, whatever their number of bytes. Rows that only an earlier call named may be dropped
        again."""
        self._spared = frozenset(keys)

    def is_encoded(self, key: bytes) -> bool:
        """Return whether the rows of an excerpt are kept. Another thread may ask while this one encodes."""
        return key in self._kept

    def encode(self, excerpts: Excerpts) -> bool:
        """Run the next part of the encoding of the excerpts whose rows are not kept. If the encoding of other excerpts has begun, abandon
        it; rows that are finished stay. Return whether the rows of all the given excerpts are kept."""
        return self._begun.advance(tuple(excerpts), lambda: self._encoded(excerpts)) is not None

    def _encoded(self, excerpts: Excerpts) -> InParts[bool]:
        """Encode those of the excerpts whose rows are not kept, group by group, and keep their rows. Return True."""
        missing = {key: excerpt for key, excerpt in excerpts.items() if key not in self._kept}
        keys = iter(missing)
        for some in self.together(tuple(missing.values())):
            rows = yield from self.rows_of(some)
            self._kept |= zip(islice(keys, len(some)), rows, strict=True)
            self._trim(excerpts)
        return True

    def look(self, seen: Sequence[ExcerptTokens]) -> tuple[NDArray[Any], ...]:
        """Return, for a step, the indices of the tokens that belong to excerpts, [tokens], and the rows that take their places,
        [tokens, row_size]. Rows that are not kept are computed now."""
        if not seen:
            return np.empty(0, np.int32), np.empty((0, self._row_size), np.float32)
        unknown: dict[bytes, Excerpt] = {one.key: one.excerpt for one in seen if one.key not in self._kept}
        found = {one.key: self._kept[one.key] for one in seen if one.key not in unknown}
        while unknown and not self.encode(unknown):
            pass
        found |= {key: self._kept[key] for key in unknown}
        self._trim(found)
        at = np.concatenate([np.arange(one.at, one.at + one.count, dtype=np.int32) for one in seen])
        return at, np.concatenate([found[one.key][one.row : one.row + one.count] for one in seen])

    def _trim(self, used: Collection[bytes]) -> None:
        """Count the excerpts with the keys `used` as used now. Then, as long as the rows take more than KEPT_BYTES, drop the rows of the
        least recently used excerpts, except those that are spared or in `used`."""
        spared = {*self._spared, *used}
        for key in dict.fromkeys(used):
            if key in self._kept:
                self._kept.move_to_end(key)
        num_bytes = sum(rows.nbytes for rows in self._kept.values())
        for key in [key for key in self._kept if key not in spared]:
            if num_bytes <= KEPT_BYTES:
                return
            num_bytes -= self._kept.pop(key).nbytes


class BothEncoders(ExcerptEncoder):
    """Encodes crops of images and clips of recordings, each with the encoder of its kind. No model with both encoders has images whose
    tokens attend to later tokens, so `look` returns no positions of last tokens (`Seer.look`)."""

    def __init__(self, row_size: int, encoders: Mapping[type[Excerpt], ExcerptEncoder]) -> None:
        super().__init__(row_size)
        self.encoders = encoders

    def together(self, excerpts: Sequence[Excerpt]) -> Iterator[Sequence[Excerpt]]:
        for kind, some in groupby(excerpts, type):
            yield from self.encoders[kind].together(tuple(some))

    def rows_of(self, excerpts: Sequence[Excerpt]) -> InParts[list[Rows]]:
        return self.encoders[type(excerpts[0])].rows_of(excerpts)
