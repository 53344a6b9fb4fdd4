"""The number of a replica's requests that come from other processes, as far as reports that arrive late can tell."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from deploy.ray.directory import Directory
from deploy.ray.open_requests import HEARD_S, OpenRequests
from deploy.ray.wish import Wish


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Reported:
    """A directory that hears reports of two replicas."""

    clock: Clock = field(default_factory=Clock)
    number: int = 0

    def __post_init__(self) -> None:
        self.directory = Directory(self.clock)

    def hear(self, **numbers: int) -> None:
        self.number += 1
        reports: dict[str, dict[str, Any]] = {
            name: {"number": self.number, "url": name, "key": "", "num_requests": count} for name, count in numbers.items()
        }
        self.directory.hear(reports)

    def begin(self, name: str, count: int) -> None:
        for _ in range(count):
            self.directory.requests.begin(name)

    def end(self, name: str, count: int) -> None:
        for _ in range(count):
            self.directory.requests.end(name)

    @property
    def chosen(self) -> str:
        lease = self.directory.choose(Wish())
        assert lease is not None
        return lease.replica


def test_an_old_report_of_own_requests_says_nothing_about_the_load() -> None:
    """Until the next report, a replica whose requests have ended has no more requests than one that never had any."""
    made = Reported()
    made.begin("a", 3)
    made.begin("b", 1)
    made.hear(a=3, b=1)
    made.clock.now_s += 0.5
    made.end("a", 3)
    assert made.chosen == "a"


def test_a_report_that_arrives_after_requests_have_ended() -> None:
    made = Reported()
    made.begin("a", 3)
    made.begin("b", 1)
    made.clock.now_s += 0.5
    made.end("a", 3)
    made.clock.now_s += HEARD_S / 2
    made.hear(a=3, b=1)
    assert made.chosen == "a"


def test_requests_of_other_processes_count_with_those_that_begin_here_later() -> None:
    made = Reported()
    made.hear(a=2, b=0)
    made.begin("b", 1)
    assert made.chosen == "b"
    made.begin("b", 2)
    assert made.chosen == "a"
    made.clock.now_s += 2 * HEARD_S
    made.hear(a=2, b=5)
    made.begin("a", 1)
    assert made.chosen == "a", "2 of others and 1 from here, beside 2 and 3"
    made.end("b", 3)
    assert made.chosen == "b"


def test_equal_reports_are_different_reports() -> None:
    made = Reported()
    made.begin("a", 2)
    made.begin("b", 1)
    made.hear(a=2, b=1)
    made.end("a", 2)
    assert made.chosen == "a"
    made.clock.now_s += 2 * HEARD_S
    made.hear(a=2, b=1)
    assert made.chosen == "b", "now the two requests of a are those of another process"


@pytest.mark.parametrize("seed", range(5))
def test_the_most_requests_lately(seed: int) -> None:
    """Compare with all numbers of requests, each with the time at which it began to hold."""
    chance, clock = random.Random(seed), Clock()
    requests, held = OpenRequests(clock), [(0.0, 0)]
    for _ in range(400):
        clock.now_s += chance.expovariate(10)
        if requests["a"] and chance.random() < 0.5:
            requests.end("a")
        else:
            requests.begin("a")
        held.append((clock.now_s, requests["a"]))
        ends = [at_s for at_s, _ in held[1:]] + [clock.now_s]
        lately = [count for (_, count), end_s in zip(held, ends, strict=True) if end_s >= clock.now_s - HEARD_S]
        assert requests.most_lately("a") == max(lately)
    assert requests.most_lately("b") == 0
    requests.forget([])
    assert requests.replicas == ({"a"} if held[-1][1] else set())
