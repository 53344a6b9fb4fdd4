"""Make the arguments of a compiled step for a batch, in the order of the step's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.cache_groups import CacheGroup, HeardGroup

Ints = NDArray[np.int32]


def step_arguments(
    groups: Sequence[CacheGroup],
    tokens: NDArray[Any],
    positions: Ints,
    query_starts: Ints,
    seq_ids: Ints,
    slots: Sequence[Ints],
    tables: Sequence[Ints],
) -> tuple[Any, ...]:
    """Return all arguments of the step before its parameter `logit_rows`. `slots` and `tables` have one entry per cache group. If another
    process computes the first layers, `tokens` is the residual stream of the tokens, [t, size]."""
    if not all(group.layers for group in groups):
        here = [i for i, group in enumerate(groups) if group.layers]
        groups, slots, tables = [groups[i] for i in here], [slots[i] for i in here], [tables[i] for i in here]
    if groups and isinstance(groups[-1], HeardGroup):
        others = step_arguments(groups[:-1], tokens, positions, query_starts, seq_ids, slots[:-1], tables[:-1])
        return *others, tables[-1][:, 0]
    paged = [not group.keeps_states for group in groups]
    held = (places for places, is_paged in zip(slots, paged, strict=True) if is_paged)
    shown = (table for table, is_paged in zip(tables, paged, strict=True) if is_paged)
    arguments = tokens, positions, *held, seq_ids, *shown
    if all(paged):
        return arguments
    (page_size,) = {group.page_size for group in groups if group.keeps_states}
    saved = _saved(positions, query_starts, page_size)
    states = [
        array
        for places, table, is_paged in zip(slots, tables, paged, strict=True)
        if not is_paged
        for array in (_sources(positions[query_starts[:-1]], table, page_size), places[saved] // page_size)
    ]
    return *arguments, query_starts, saved, *states


def _saved(positions: Ints, query_starts: Ints, page_size: int) -> Ints:
    """Return the indices of the tokens after which the state is stored: the last token of each full page and of each sequence."""
    is_saved = positions % page_size == page_size - 1
    is_saved[query_starts[1:] - 1] = True
    return np.flatnonzero(is_saved).astype(np.int32)


def _sources(starts: Ints, table: Ints, page_size: int) -> Ints:
    """Return, for each sequence, the page with the state before its first token of this step; 0 if the sequence begins in this step."""
    pages = table[np.arange(len(starts)), np.maximum(starts - 1, 0) // page_size]
    return np.where(starts > 0, pages, 0).astype(np.int32)
