"""What a step costs by its number of tokens, measured before the first request: pacing (`server/engine/pace.py`) begins with it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from runtime.files import regular
from runtime.kv_pool import PAGE_SIZE
from server.engine.step_model import NO_ROWS, StepBatch, StepLimits, StepModel

Costs = dict[int, float]  # seconds by number of tokens

ENOUGH_S = 2.0  # of measuring: larger steps are taken to cost in proportion
BRIEF_S = 0.1  # a step that takes less is measured twice: the first finds its memory cold
MAX_FILE_BYTES = 1 << 16


def step_costs(model: StepModel, kept_at: Path | None) -> Costs:
    """Those that an earlier start has measured, or else measured now and kept: large steps of a large model take seconds."""
    costs = None if kept_at is None else _read(kept_at)
    if costs is None:
        costs = measured(model)
        if kept_at is not None:
            _keep(kept_at, costs)
    return costs


def measured(model: StepModel) -> Costs:
    """Of sizes that double. Keys and values go to pages that nobody has yet."""
    limits = model.limits
    most = min(limits.max_tokens, limits.max_context, (limits.num_pages - 1) * PAGE_SIZE)
    costs: Costs = {}
    spent_s = 0.0
    for size in (*(1 << i for i in range(most.bit_length() - 1)), most):
        batch = step_of(limits, num_seqs=1, num_each=size, context=size)
        began_s = time.perf_counter()
        costs[size] = _seconds(model, batch)
        if costs[size] < BRIEF_S:
            costs[size] = min(costs[size], _seconds(model, batch))
        spent_s += time.perf_counter() - began_s
        if spent_s > ENOUGH_S:
            break
    return costs


def step_of(limits: StepLimits, *, num_seqs: int, num_each: int, context: int) -> StepBatch:
    """A step of equal sequences: the last `num_each` tokens of a context each. Where pages are few, sequences share them."""
    num_pages = -(-context // PAGE_SIZE)
    tables = (1 + np.arange(num_seqs * num_pages) % (limits.num_pages - 1)).astype(np.int32).reshape(num_seqs, num_pages)
    positions = np.tile(np.arange(context - num_each, context), num_seqs).astype(np.int32)
    owners = np.repeat(np.arange(num_seqs), num_each)
    starts = (np.arange(num_seqs + 1) * num_each).astype(np.int32)
    last = starts[1:] - 1
    return StepBatch(
        tokens=np.arange(num_seqs * num_each, dtype=np.int32) % limits.vocab_size,
        positions=positions,
        slots=tables[owners, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
        query_starts=starts,
        context_lens=np.full(num_seqs, context, np.int32),
        page_tables=tables,
        logit_rows=last if limits.generates else NO_ROWS,
        hidden_rows=NO_ROWS if limits.generates else last,
    )


def _seconds(model: StepModel, batch: StepBatch) -> float:
    began_s = time.perf_counter()
    model.run(batch)
    return time.perf_counter() - began_s


def _read(path: Path) -> Costs | None:
    """None if there is nothing that can be used."""
    try:
        with regular(path).open("rb") as file:
            costs = msgspec.json.decode(file.read(MAX_FILE_BYTES), type=Costs)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return costs if costs and all(size > 0 and 0 < seconds < 3600 for size, seconds in costs.items()) else None


def _keep(path: Path, costs: Costs) -> None:
    with suppress(OSError):  # they are measured again next time
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(costs))
        fresh.replace(path)
