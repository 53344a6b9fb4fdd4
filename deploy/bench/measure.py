"""The figures of a benchmark, and their goals."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value, with the goal that it should reach if there is one."""

    name: str  # what was measured, in words
    value: float
    unit: str
    goal: float | None = None  # None: there is no goal
    at_least: bool = False  # whether the goal is a minimum; otherwise it is a maximum
    note: str = ""  # more about the measurement, for people

    @property
    def reached(self) -> bool | None:
        """Whether the value reaches the goal, or None if there is no goal."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal


def report(figures: list[Figure], *, as_json: bool) -> None:
    """Print the figures as a table, or as JSON. In the table, values that reach their goal are green, and values that do not are red."""
    if as_json:
        print(json.dumps([{**asdict(f), "reached": f.reached} for f in figures], indent=1))
        return
    table = Table("figure", "measured", "goal", "note")
    for f in figures:
        goal = "" if f.goal is None else f"{'>=' if f.at_least else '<='} {f.goal:g}"
        mark = {None: "", True: "[green]", False: "[red]"}[f.reached]
        table.add_row(f.name, f"{mark}{f.value:.4g} {f.unit}", goal, f.note)
    Console().print(table)
