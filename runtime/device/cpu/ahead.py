"""The weights that a thread prefetches while it waits for other threads (team.ll): the beginning of its own part of the next product's
weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

MOST_BYTES = 256 << 10  # most bytes of a product's weights that a thread prefetches: a fraction of a second-level cache
SLICE = 32 << 10  # bytes after which prefetching returns to the first weight of a product


class _Piece(NamedTuple):
    """A range of a weight that a thread prefetches. Each thread has the same range within its own part of the weight."""

    base: int  # number of the weight: see `Bases` in runtime/device/base.py
    share: int  # bytes of the weight that one thread reads
    begin: int  # offset of the piece in this share
    num_bytes: int


class Ahead:
    """The ranges of memory that threads prefetch during a launch list. Constants count as weights."""

    def __init__(self, weights: Sequence[Sequence[tuple[int, int]]], readers: int) -> None:
        """`weights` lists, for each record, the weights that it reads, as (base, bytes). `readers` is the number of threads, each of which
        reads its own part, or 0 if threads share parts: then nothing is prefetched."""
        pieces = [list(_first_pieces(some, readers)) for some in weights]
        self._pieces = np.array([piece for some in pieces for piece in some], np.int64).reshape(-1, len(_Piece._fields))
        self.ranges = np.zeros((readers, len(self._pieces), 2), np.int64)  # (address, bytes)
        self.ranges[..., 1] = self._pieces[:, 3]
        self.following = self._following([len(some) for some in pieces])

    def _following(self, counts: Sequence[int]) -> list[range]:
        """Return, for each record, the numbers of the ranges of the next product, or an empty range after the last product. `counts` has
        the number of ranges of each record, which is 0 if the record prefetches nothing."""
        found: list[range] = []
        end, following = sum(counts), range(0)
        for count in reversed(counts):
            found.append(following)
            following = range(end - count, end) if count else following
            end -= count
        return found[::-1]

    def place(self, base: int, address: int) -> None:
        """Set the address of a weight, whose number is `base`."""
        chosen = np.flatnonzero(self._pieces[:, 0] == base)
        _, share, begin, _ = self._pieces[chosen].T
        self.ranges[:, chosen, 0] = address + np.arange(len(self.ranges))[:, None] * share + begin


def _first_pieces(weights: Sequence[tuple[int, int]], readers: int) -> Iterator[_Piece]:
    """Yield the pieces that a thread reads first, if the weights of a record are large, and if each thread reads a part of its own
    (`readers` is not 0). The thread reads all weights of a product at the same time, so each SLICE bytes consist of a piece of each weight,
    in proportion to the weight's size."""
    total = sum(num_bytes for _, num_bytes in weights)
    if not readers or total < readers * MOST_BYTES:
        return
    for slice_begin in range(0, MOST_BYTES, SLICE):
        for base, num_bytes in weights:
            begin, end = (num_bytes * at // total for at in (slice_begin, slice_begin + SLICE))
            if begin < end:
                yield _Piece(base, num_bytes // readers, begin, end - begin)
