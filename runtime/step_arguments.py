"""The arguments of a compiled step for a batch, in the order of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.cache_groups import PAGE_SIZE, CacheGroup

Ints = NDArray[np.int32]


def step_arguments(
    groups: Sequence[CacheGroup], tokens: Ints, positions: Ints, query_starts: Ints, slots: Sequence[Ints], tables: Sequence[Ints]
) -> tuple[Any, ...]:
    """The arguments before the rows. `slots` and `tables` have an entry per cache group."""
    lengths = np.diff(query_starts)
    seq_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    paged = [not group.keeps_states for group in groups]
    held = (places for places, is_paged in zip(slots, paged, strict=True) if is_paged)
    shown = (table for table, is_paged in zip(tables, paged, strict=True) if is_paged)
    arguments = tokens, positions, *held, seq_ids, *shown
    if all(paged):
        return arguments
    saved = _saved(positions, query_starts)
    states = [
        array
        for places, table, is_paged in zip(slots, tables, paged, strict=True)
        if not is_paged
        for array in (_sources(positions[query_starts[:-1]], table), places[saved] // PAGE_SIZE)
    ]
    return *arguments, query_starts, saved, *states


def _saved(positions: Ints, query_starts: Ints) -> Ints:
    """The last token in each page of each sequence."""
    is_saved = positions % PAGE_SIZE == PAGE_SIZE - 1
    is_saved[query_starts[1:] - 1] = True
    return np.flatnonzero(is_saved).astype(np.int32)


def _sources(starts: Ints, table: Ints) -> Ints:
    """The page with the state before the first token of each sequence; 0 at its beginning."""
    pages = table[np.arange(len(starts)), np.maximum(starts - 1, 0) // PAGE_SIZE]
    return np.where(starts > 0, pages, 0).astype(np.int32)
