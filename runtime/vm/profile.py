"""Measure the time per kernel. While a profile is active, the launches of a region run one by one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Profile:
    """The number of launches of each kernel, and their total time."""

    count: dict[str, int] = field(default_factory=dict[str, int])
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, kernel: str, seconds: float) -> None:
        self.count[kernel] = self.count.get(kernel, 0) + 1
        self.seconds[kernel] = self.seconds.get(kernel, 0.0) + seconds

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def __str__(self) -> str:
        total = self.total_s or 1.0
        rows = sorted(self.seconds.items(), key=lambda item: -item[1])
        return "\n".join(f"{s * 1e3:10.3f} ms {s / total:6.1%} {self.count[k]:7} x  {k}" for k, s in rows)
