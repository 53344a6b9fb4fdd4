"""`python -m tests.lab model --beside SHAPE`: the shares of a model divided by those of another model, whose steps run in turns with
its own. The speed of a shared machine changes within seconds, so shares of two commands cannot be compared."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from rich.table import Table

from deploy.bench.compute.case import Case, Steps, Work
from deploy.bench.compute.model import Model, model_of
from deploy.bench.limits import Gauge, Limits, turns

PREFILL_S, DECODE_S = 12.0, 1.5  # seconds of turns per step
MOST_TURNS = 60


@dataclass(frozen=True, slots=True)
class Quartiles:
    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(*(float(value) for value in np.quantile(values, (0.25, 0.5, 0.75))))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lower:.2f} to {self.upper:.2f})"


@dataclass(frozen=True, slots=True)
class Quotients:
    """The shares of one model divided by those of the other, over all turns of a step."""

    name: str
    limit: Quartiles  # quotients of the shares of the limit, that is of limit time / measured time
    peak: Quartiles  # quotients of the shares of the peak of arithmetic, also where memory is the limit
    turns: int


class Turn(NamedTuple):
    """One run of each of several steps, and the limits measured after them."""

    seconds: tuple[float, ...]  # time of each run
    limits: Limits


def measure(shape: str, options: argparse.Namespace, model: Model, gauge: Gauge) -> list[Quotients]:
    """Measure the steps of a model in turns with those of another shape, to which options that replace a part of a shape do not apply."""
    whole = {"synthetic": shape, "head_size": None, "kv_heads": None, "layers": None}
    other = model_of(argparse.Namespace(**{**vars(options), **whole}), options.device)
    of_other = other.works
    works = {case: (work, of_other[case]) for case, work in model.works.items() if case in of_other}
    found = quotients((model.prepared, other.prepared), works, gauge)
    other.session.close()
    return found


def quotients(steps: tuple[Steps, Steps], works: Mapping[Case, tuple[Work, Work]], gauge: Gauge) -> list[Quotients]:
    """Measure the steps of two models in turns. In each pair, the model whose shares are divided comes first."""
    found: list[Quotients] = []
    for case, pair in works.items():
        runs = [prepared(*case) for prepared in steps]
        measured = in_turns(runs, gauge, seconds=PREFILL_S if case.is_prefill else DECODE_S, most=MOST_TURNS)
        limit, peak = (Quartiles.of([_divided(share, pair, turn) for turn in measured]) for share in (_limit_share, _peak_share))
        found.append(Quotients(str(case), limit, peak, len(measured)))
    return found


def in_turns(runs: Sequence[Callable[[], object]], gauge: Gauge, *, seconds: float, most: int) -> list[Turn]:
    """Time each of the runs once per turn, and measure the limits after each turn. Changes of the machine's speed that last longer than a
    turn affect all runs of the turn alike."""
    found: list[Turn] = []
    for passed in turns(runs, seconds, most):
        gauge.forget()
        gauge.sample()
        found.append(Turn(passed, gauge.limits))
    return found


def _divided(share: Callable[[Work, float, Limits], float], pair: tuple[Work, Work], turn: Turn) -> float:
    ours, others = (share(work, seconds, turn.limits) for work, seconds in zip(pair, turn.seconds, strict=True))
    return ours / others


def _limit_share(work: Work, seconds: float, limits: Limits) -> float:
    return limits.share(*work, seconds)


def _peak_share(work: Work, seconds: float, limits: Limits) -> float:
    return work.operations / seconds / limits.flops


def table_of(title: str, shape: str, rows: Sequence[Quotients]) -> Table:
    names = [f"share of the {share} / that of {shape}" for share in ("limit", "peak")]
    table = Table("", *names, "turns", title=title, caption="Medians and quartiles over all turns")
    for row in rows:
        table.add_row(row.name, str(row.limit), str(row.peak), str(row.turns))
    return table
