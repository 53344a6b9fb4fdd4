"""Build the arrays of a step from a settled plan.

`prepare` builds the arrays of a plan that is still open, while the device computes the step before it; only the tokens that this step draws
are missing. `build` adds them, or builds the arrays anew if the plan has changed. Each running sequence owns a row in the page table of
every cache group. The row is rewritten only when the sequence's pages have changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from server.engine.request import Sequence
from server.engine.scheduling.scheduler import Item, Plan
from server.engine.step_model import NO_ROWS, Places, StepBatch, StepLimits


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The arrays of a plan that had changed `num_changes` times."""

    plan: Plan
    num_changes: int
    batch: StepBatch
    missing: list[tuple[int, Item]]  # items with tokens that were not drawn yet, and where they begin in the batch

    def shows(self, plan: Plan) -> bool:
        return plan is self.plan and plan.num_changes == self.num_changes


class BatchBuilder:
    def __init__(self, limits: StepLimits) -> None:
        self._page_sizes = [group.page_size for group in limits.groups]
        self._tables = [np.zeros((limits.max_seqs, -(-limits.max_context // size)), np.int32) for size in self._page_sizes]
        # per row: the sequence that its table shows, and the version of that sequence's pages
        self._table_state: list[tuple[Sequence | None, int]] = [(None, 0)] * limits.max_seqs
        self._ramp = np.arange(max(limits.max_tokens, limits.max_seqs) + 1, dtype=np.int32)
        self._prepared: _Prepared | None = None

    def prepare(self, plan: Plan) -> None:
        self._prepared = self._built(plan)

    def build(self, plan: Plan) -> StepBatch:
        prepared, self._prepared = self._prepared, None
        if prepared is None or not prepared.shows(plan):
            prepared = self._built(plan)
        tokens = prepared.batch.tokens
        for at, item in prepared.missing:
            if item.count == 1:
                tokens[at] = item.seq.token_ids[item.start]
            else:
                tokens[at : at + item.count] = item.seq.token_ids[item.start : item.stop]
        return prepared.batch

    def _built(self, plan: Plan) -> _Prepared:
        num_seqs = len(plan.items)
        tokens = np.zeros(plan.num_tokens, np.int32)
        missing: list[tuple[int, Item]] = []
        begins: list[int] = []
        rows: list[int] = []
        ends: list[int] = [0]  # end of each sequence's tokens in the batch
        logit_rows: list[int] = []
        hidden_rows: list[int] = []
        num_pages = [0] * len(self._tables)
        at = 0
        for item in plan.in_order:
            seq, count = item.seq, item.count
            if count == 1 or item.stop > seq.num_known:
                missing.append((at, item))
            else:
                tokens[at : at + count] = seq.token_ids[item.start : item.stop]
            at += count
            begins.append(item.start)
            rows.append(seq.slot)
            ends.append(at)
            (hidden_rows if seq.request.embed is not None else logit_rows).extend(range(at - item.num_rows, at))
            num_pages = [max(most, len(held.pages)) for most, held in zip(num_pages, seq.held.lists, strict=True)]
            if self._table_state[seq.slot] != (seq, seq.held.version):
                self._show(seq)

        starts = np.array(begins, np.int32)
        query_starts = np.array(ends, np.int32)
        counts = query_starts[1:] - query_starts[:-1]
        if at == num_seqs:  # every sequence runs a single token
            seq_ids, positions = self._ramp[:num_seqs], starts
        else:
            seq_ids = np.repeat(self._ramp[:num_seqs], counts)
            positions = (starts - query_starts[:-1])[seq_ids] + self._ramp[:at]
        assert at == plan.num_tokens, plan
        places: list[Places] = []
        for held, size, most in zip(self._tables, self._page_sizes, num_pages, strict=True):
            tables = np.take(held[:, :most], rows, axis=0)
            pages, offsets = np.divmod(positions, size)
            places.append(Places(tables[seq_ids, pages] * size + offsets, tables))
        batch = StepBatch(
            tokens=tokens,
            positions=positions,
            query_starts=query_starts,
            seq_ids=seq_ids,
            context_lens=starts + counts,
            places=tuple(places),
            logit_rows=np.array(logit_rows, np.int32),
            hidden_rows=np.array(hidden_rows, np.int32) if hidden_rows else NO_ROWS,
        )
        return _Prepared(plan, plan.num_changes, batch, missing)

    def _show(self, seq: Sequence) -> None:
        for tables, held in zip(self._tables, seq.held.lists, strict=True):
            row = tables[seq.slot]
            row[: len(held.pages)] = held.pages
            row[len(held.pages) :] = 0
        self._table_state[seq.slot] = seq, seq.held.version
