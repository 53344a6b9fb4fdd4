"""Measure the best of several runs, and compare figures with their goals."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str
    goal: float | None = None
    at_least: bool = False  # whether the goal is a minimum; otherwise it is a maximum
    note: str = ""

    @property
    def reached(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal


def best_s(run: Callable[[], object], *, seconds: float = 1.0, most: int = 50) -> float:
    """Run `run` repeatedly for `seconds`, but at least three times, and return the shortest time. On a shared machine, longer times include
    interruptions by other programs."""
    run()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < most):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def by_turns(runs: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, list[float]]:
    """Time each of the runs once per round, and return their times. The speed of a shared machine can change by more than half from second
    to second; in rounds, these changes affect all runs alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if number:  # do not count the first round, which touches memory that is not mapped yet
                times[name].append(time.perf_counter() - started)
    return times


def report(figures: list[Figure], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([{**asdict(f), "reached": f.reached} for f in figures], indent=1))
        return
    table = Table("figure", "measured", "goal", "note")
    for f in figures:
        goal = "" if f.goal is None else f"{'>=' if f.at_least else '<='} {f.goal:g}"
        mark = {None: "", True: "[green]", False: "[red]"}[f.reached]
        table.add_row(f.name, f"{mark}{f.value:.4g} {f.unit}", goal, f.note)
    Console().print(table)
