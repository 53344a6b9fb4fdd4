"""Read the times of kernels that a day with a card measured, to show them beside those that the model predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.lab.gpu_day.steps import SHAPE
from tests.lab.reporting.day import MACHINE, read_day


@dataclass(frozen=True, slots=True)
class Measured:
    card: str  # as the driver names it
    kernels: Mapping[tuple[str, str, str], float]  # seconds of a launch, by the format of weights, the step and the kernel

    def seconds(self, card: str, form: str, step: str, kernel: str) -> float | None:
        """Return the time of a launch of a kernel, or None if it was not measured on such a card."""
        return self.kernels.get((form, step, kernel)) if card in self.card else None


def read_measured(file: Path) -> Measured:
    """Read the lines of a day. Raise SettingsError if they are of no real card."""
    found = read_day(file).found
    kernels: dict[tuple[str, str, str], float] = {}
    for name, rows in found.items():
        if not name.startswith(SHAPE):
            continue
        for row in rows:
            for kernel in row.get("kernels", ()):
                kernels[name.removeprefix(SHAPE), row["step"], kernel["kernel"]] = kernel["seconds"] / kernel["launches"]
    return Measured(found[MACHINE][0]["card"], kernels)
