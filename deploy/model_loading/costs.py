"""Measure, before the first request, the time of a step as a function of its number of tokens. `server/engine/scheduling/pace.py` uses it
to limit prompt tokens per step."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from deploy.model_loading.known import carried
from deploy.model_loading.serving import Served
from runtime.cache_groups import PAGE_SIZE
from runtime.files import regular
from runtime.whole_files import replacing
from server.engine.scheduling.pace import LEAST_SHARE, Measured, StepCosts, extrapolated_s
from server.engine.step_model import NO_ROWS, ExcerptTokens, GroupLimits, Places, StepBatch, StepLimits, StepModel
from server.stages.relay import fastest

# Most seconds for measuring steps: the first start waits for the measurement. The pace extrapolates the times of larger steps. Several runs
# of a brief step predict these times better than one run of a large step, because other work on a machine slows some runs down.
ENOUGH_S = 0.4
NUM_CHUNKS, CHUNK, BEHIND = 8, 8, 512  # number of short chunks, tokens per chunk, and tokens of context before each chunk
NUM_RUNS, BRIEF_S = 4, 0.1  # runs of a step, and seconds after which it is not run again
SHORTEST_S = 1e-6  # least time of encoding an excerpt: noise may make a step without an excerpt seem longer than one with an excerpt
MOST_S = 3600.0  # longest plausible time of a step; a file with a longer time is ignored
MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Timed(Served):
    """The state of a load once the times of its steps are known."""

    costs: Measured | None  # None for an encoder, whose texts are not cut into chunks


def measure_steps(known: Served) -> Timed:
    """Measure the times of steps, or read those of an earlier start. For an encoder, measure none, but write a file without times, which
    shows later starts that an example was encoded. If other machines compute stages of the model, choose from the times into how many parts
    the relay, which sends steps to the stages, cuts a step."""
    costs = None if known.step_model is None else step_costs(known.step_model, known.costs_file)
    if costs is None and known.costs_file is not None and not known.costs_file.exists():
        _keep(known.costs_file, Measured())
    if costs is not None and known.relay is not None and not known.relay.shares_cores:
        known.relay.num_parts = fastest(StepCosts(costs.steps), known.relay.num_stages)
    known.progress("warm-up", 1.0)
    return Timed(**carried(known, Served), costs=costs)


def step_costs(model: StepModel, kept_at: Path | None) -> Measured:
    """Return the step times that an earlier start stored in the file `kept_at`. If there are none, or none for a medium that the model
    reads, measure them now and store them. Measuring large steps of a large model takes seconds."""
    costs = None if kept_at is None else _read(kept_at)
    if costs is None or any(limits.medium not in costs.excerpts_s for limits in model.limits.excerpts):
        costs = measured(model)
        if kept_at is not None:
            _keep(kept_at, costs)
    return costs


def measured(model: StepModel) -> Measured:
    """Measure steps of one prompt: the smallest two sizes, and further sizes up to the largest step, as long as ENOUGH_S leaves time. Then
    measure what context and excerpts add. The keys and values of these steps go to pages that no sequence owns yet."""
    limits = model.limits
    steps: dict[int, float] = {}
    began_s = time.perf_counter()
    for size in sizes_of(largest_step(limits)):
        spent_s = time.perf_counter() - began_s
        if len(steps) > 1 and spent_s + extrapolated_s(steps, size) > ENOUGH_S:
            break
        steps[size] = _seconds(model, step_of(limits, num_seqs=1, num_each=size, context=size))
    return Measured(steps, _context_s(model, StepCosts(steps)), _excerpts_s(model, steps[1]))


def sizes_of(most: int) -> list[int]:
    """Return the sizes to measure, in rising order: one token, the largest step (`most`), the smallest chunk of the pace (`most` //
    LEAST_SHARE), and sizes that are smaller than this chunk by factors of four."""
    sizes = {1, most}
    size = most // LEAST_SHARE
    while size > 1:
        sizes.add(size)
        size //= 4
    return sorted(sizes)


def largest_step(limits: StepLimits) -> int:
    """Return the largest number of tokens of one prompt that a step can compute."""
    return min(limits.max_tokens, limits.capacity)


def _context_s(model: StepModel, costs: StepCosts) -> float:
    """Return the seconds that each token of context adds to a step that consists of short chunks. A slow model gets fewer chunks. Return 0
    if a step has no room for a chunk, or the cache none for its context."""
    limits = model.limits
    most = min(NUM_CHUNKS, limits.max_seqs, limits.max_tokens // CHUNK)
    num_seqs = max((count for count in range(1, most + 1) if costs(count * CHUNK) <= BRIEF_S), default=min(1, most))
    # Sequences that write to the same page would conflict, so each gets separate pages.
    pages_each = [(group.num_pages - 1) // max(num_seqs, 1) for group in limits.groups if group.window is None]
    behind = min([BEHIND, limits.max_context, *(count * PAGE_SIZE for count in pages_each)]) - CHUNK
    if num_seqs == 0 or behind < CHUNK:
        return 0.0
    near, far = (
        _seconds(model, step_of(limits, num_seqs=num_seqs, num_each=CHUNK, context=context)) for context in (CHUNK, behind + CHUNK)
    )
    return max(far - near, 0.0) / (num_seqs * behind)


def _excerpts_s(model: StepModel, one_s: float) -> dict[str, float]:
    """Return, by medium, the seconds that encoding an example adds to a step of one token, which takes `one_s` without an example.
    Each run has another key, so that the model encodes the example again and does not use rows that it has kept."""
    batch = step_of(model.limits, num_seqs=1, num_each=1, context=1)
    found: dict[str, float] = {}
    for limits in model.limits.excerpts:
        example, name = limits.example, f"measured {limits.medium}"
        batches = (replace(batch, seen=(ExcerptTokens(example, f"{name} {number}".encode(), 0, 0, 1),)) for number in range(NUM_RUNS))
        found[limits.medium] = max(_fastest(model, batches) - one_s, SHORTEST_S)
    return found


def step_of(limits: StepLimits, *, num_seqs: int, num_each: int, context: int) -> StepBatch:
    """Build a step of equal sequences. Each has `context` tokens, and the step computes the last `num_each` of them."""
    positions = np.tile(np.arange(context - num_each, context), num_seqs).astype(np.int32)
    seq_ids = np.repeat(np.arange(num_seqs, dtype=np.int32), num_each)
    starts = (np.arange(num_seqs + 1) * num_each).astype(np.int32)
    last = starts[1:] - 1
    places: list[Places] = []
    for group in limits.groups:
        size = group.page_size
        tables = tables_of(group, num_seqs, -(-context // size))
        places.append(Places(tables[seq_ids, positions // size] * size + positions % size, tables))
    return StepBatch(
        tokens=np.arange(num_seqs * num_each, dtype=np.int32) % limits.vocab_size,
        positions=positions,
        query_starts=starts,
        seq_ids=seq_ids,
        context_lens=np.full(num_seqs, context, np.int32),
        places=tuple(places),
        logit_rows=last if limits.generates else NO_ROWS,
        hidden_rows=NO_ROWS if limits.generates else last,
    )


def tables_of(group: GroupLimits, num_seqs: int, num_pages: int) -> NDArray[np.int32]:
    """Return page tables with `num_pages` entries per sequence. If a group has too few pages, such as one with a window, tables repeat
    pages. If there are fewer pages than sequences, sequences share pages."""
    held = group.num_pages - 1
    each = max(1, min(num_pages, held // num_seqs))
    return (1 + (np.arange(num_seqs)[:, None] * each + np.arange(num_pages) % each) % held).astype(np.int32)


def _seconds(model: StepModel, batch: StepBatch) -> float:
    """Return the seconds of the fastest of several runs of a step, because caches miss in the first run."""
    return _fastest(model, repeat(batch, NUM_RUNS))


def _fastest(model: StepModel, batches: Iterable[StepBatch]) -> float:
    """Run steps, and return the seconds of the fastest one. Once those that have run took BRIEF_S together, do not run the remaining
    ones."""
    took_s: list[float] = []
    for batch in batches:
        began_s = time.perf_counter()
        model.download(model.run(batch))  # `run` only launches on an asynchronous device; the downloads wait for the results
        model.hidden()
        took_s.append(time.perf_counter() - began_s)
        if sum(took_s) >= BRIEF_S:
            break
    return min(took_s)


def _read(path: Path) -> Measured | None:
    """Return the times that a file has. Return None if the file is missing, malformed or implausible, or has no times of steps."""
    try:
        with regular(path).open("rb") as file:
            costs = msgspec.json.decode(file.read(MAX_FILE_BYTES), type=Measured)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    others = costs.context_s, *costs.excerpts_s.values()
    usable = all(size > 0 and 0 < seconds < MOST_S for size, seconds in costs.steps.items()) and all(0 <= s < MOST_S for s in others)
    return costs if costs.steps and usable else None


def _keep(path: Path, costs: Measured) -> None:
    """Store the times in a file. If that fails, do nothing: the next start measures again."""
    with suppress(OSError), replacing(path, synced=False) as file:
        file.write(msgspec.json.encode(costs))
