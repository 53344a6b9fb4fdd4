"""Build the arrays of a step from the scheduler's plan.

`prepare` builds the arrays while the device computes the previous step. The plan is then still open, that is, its items may change, and the
tokens that the running step draws are missing. `build` adds them once the plan is settled, or builds the arrays anew if the plan has
changed. Each running sequence owns a row in the page table of every cache group. The row is rewritten only when another sequence gets it,
or when the sequence's pages have changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from server.engine.axes import along_positions, axes_of
from server.engine.request import Sequence, among
from server.engine.scheduling.plan import Item, Plan
from server.engine.step_model import NO_ROWS, ExcerptTokens, Places, StepBatch, StepLimits

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The arrays of a plan that had changed `num_changes` times when they were built. The tokens of the items in `unfinished` and `singles`
    are zeros until `BatchBuilder.build` sets them."""

    plan: Plan
    num_changes: int
    batch: StepBatch
    unfinished: list[tuple[int, Item]]  # where items begin in the batch, and items of several tokens that were not all known
    singles: list[Item]  # items of one token, the last ones of the batch

    def shows(self, plan: Plan) -> bool:
        """Return whether the arrays are those of `plan` in its present state."""
        return plan is self.plan and plan.num_changes == self.num_changes


class BatchBuilder:
    """Builds the arrays of each step, and keeps the page tables from step to step."""

    def __init__(self, limits: StepLimits) -> None:
        self._reads_excerpts = bool(limits.excerpts)
        self._has_axes = limits.three_axes
        self._page_sizes = [group.page_size for group in limits.groups]
        self._tables = [np.zeros((limits.max_seqs, -(-limits.max_context // size)), np.int32) for size in self._page_sizes]
        # per group and row: number of leading entries that are the sequence's list of pages; all later entries are 0
        self._num_shown = [[0] * limits.max_seqs for _ in self._page_sizes]
        # per row: the sequence whose pages it shows, and their `Held.version`
        self._shown: list[tuple[Sequence | None, int]] = [(None, 0)] * limits.max_seqs
        self._ramp = np.arange(max(limits.max_tokens, limits.max_seqs) + 1, dtype=np.int32)
        self._prepared: _Prepared | None = None

    def prepare(self, plan: Plan) -> None:
        """Build the arrays of an open plan, and keep them for `build`."""
        self._prepared = self._built(plan)

    def build(self, plan: Plan) -> StepBatch:
        """Return the arrays of a settled plan, with all tokens."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or not prepared.shows(plan):
            prepared = self._built(plan)
        tokens = prepared.batch.tokens
        for at, item in prepared.unfinished:
            tokens[at : at + item.count] = item.seq.token_ids[item.start : item.stop]
        if prepared.singles:
            tokens[-len(prepared.singles) :] = [item.seq.token_ids[item.start] for item in prepared.singles]
        return prepared.batch

    def _built(self, plan: Plan) -> _Prepared:
        """Build the arrays of a plan. An item of several tokens gets its tokens if all of them are known. All other tokens stay zeros until
        `build` sets them."""
        items, num_tokens = plan.in_order, plan.num_tokens
        num_longer = sum(item.count > 1 for item in items)
        tokens = np.zeros(num_tokens, np.int32)
        unfinished: list[tuple[int, Item]] = []
        at = 0
        for item in items[:num_longer]:
            if item.stop > item.seq.num_known:
                unfinished.append((at, item))
            else:
                tokens[at : at + item.count] = item.seq.token_ids[item.start : item.stop]
            at += item.count

        starts = np.array([item.start for item in items], np.int32)
        if num_longer:
            counts = np.array([item.count for item in items], np.int32)
            query_starts = np.zeros(len(items) + 1, np.int32)
            np.cumsum(counts, out=query_starts[1:])
            seq_ids = np.repeat(self._ramp[: len(items)], counts)
            positions, context_lens = (starts - query_starts[:-1])[seq_ids] + self._ramp[:num_tokens], starts + counts
        else:
            query_starts, seq_ids, positions, context_lens = self._ramp[: len(items) + 1], self._ramp[: len(items)], starts, starts + 1
        logit_rows, hidden_rows = self._requested(items, query_starts[1:])
        places = self._places(items, seq_ids, positions, int(context_lens.max()))
        batch = StepBatch(
            tokens=tokens,
            positions=positions,
            query_starts=query_starts,
            seq_ids=seq_ids,
            context_lens=context_lens,
            places=places,
            logit_rows=logit_rows,
            hidden_rows=hidden_rows,
            seen=_seen(items, query_starts) if self._reads_excerpts else (),
            axes=_axes(items, positions) if self._has_axes else None,
        )
        assert query_starts[-1] == num_tokens, plan
        return _Prepared(plan, plan.num_changes, batch, unfinished, items[num_longer:])

    def _requested(self, items: list[Item], ends: Ints) -> tuple[Ints, Ints]:
        """Return the rows of logits and the rows of hidden states that the items request. An item requests the rows of its last `num_rows`
        tokens; `ends` has, for each item, the end of its tokens in the batch."""
        num_rows = [item.num_rows for item in items]
        if sum(num_rows) == ends[-1]:
            rows = self._ramp[: ends[-1]]
        else:
            rows = np.repeat(ends - np.cumsum(num_rows, dtype=np.int32), num_rows) + self._ramp[: sum(num_rows)]
        embeds = [item.seq.request.embed is not None for item in items]
        if not any(embeds):
            return rows, NO_ROWS
        are_hidden = np.repeat(embeds, num_rows)
        return rows[~are_hidden], rows[are_hidden]

    def _places(self, items: list[Item], seq_ids: Ints, positions: Ints, longest: int) -> tuple[Places, ...]:
        """Write the pages that have changed into the page tables. Return, for each cache group, where the keys and values of the tokens are
        stored, and the page-table rows of the items' sequences. `longest` is the length of the longest context."""
        slots: list[int] = []
        for item in items:
            seq = item.seq
            slots.append(seq.slot)
            if self._shown[seq.slot] != (seq, seq.held.version):
                self._show(seq)
        places: list[Places] = []
        for held, size in zip(self._tables, self._page_sizes, strict=True):
            tables = np.take(held[:, : -(-longest // size)], slots, axis=0)
            pages, offsets = np.divmod(positions, size)
            places.append(Places(tables[seq_ids, pages] * size + offsets, tables))
        return tuple(places)

    def _show(self, seq: Sequence) -> None:
        """Write the pages of a sequence into its row of each page table."""
        for tables, num_shown, held in zip(self._tables, self._num_shown, seq.held.lists, strict=True):
            row, num_pages = tables[seq.slot], len(held.pages)
            row[:num_pages] = held.pages
            row[num_pages : num_shown[seq.slot]] = 0
            num_shown[seq.slot] = num_pages
        self._shown[seq.slot] = seq, seq.held.version


def _seen(items: list[Item], query_starts: Ints) -> tuple[ExcerptTokens, ...]:
    """Return the excerpts that have tokens in this step: one entry for each run of tokens. `query_starts` has, for each item, the index of
    its first token in the batch."""
    found: list[ExcerptTokens] = []
    for item, first in zip(items, query_starts, strict=False):
        excerpts = item.seq.request.excerpts
        if not excerpts or item.start >= excerpts[-1].stop:
            continue
        found += (
            ExcerptTokens(placed.excerpt, placed.key, int(first) + start - item.start, row, count, placed.stop - 1)
            for placed in among(excerpts, item.start, item.stop)
            for start, count, row in placed.runs(item.start, item.stop)
        )
    return tuple(found)


def _axes(items: list[Item], positions: Ints) -> Ints | None:
    """Return the coordinates of the tokens of a step, [tokens, 3], or None if no sequence of the step has images or audio."""
    if not any(item.seq.request.excerpts for item in items):
        return None
    found = along_positions(positions)
    at = 0
    for item in items:
        if excerpts := item.seq.request.excerpts:
            found[at : at + item.count] = axes_of(excerpts, item.start, item.stop)
        at += item.count
    return found
