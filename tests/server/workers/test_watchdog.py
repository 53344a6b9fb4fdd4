"""A worker is replaced if it has stalled, and not because the machine is slow. Time is simulated: a test looks as often as the supervisor
would in that time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from server.engine.scheduling.pace import SLOWEST, Measured, Pace
from server.workers.watchdog import Watchdog

STALL_S = 20.0
MEASURED = {1: 0.04, 64: 0.3, 256: 1.0, 512: 2.0}  # tokens of a step: its seconds


class Watched:
    """A watchdog and the worker that it watches. The worker uses `share` of a core."""

    def __init__(self) -> None:
        self.watchdog = Watchdog(STALL_S)
        self.cpu_s = self.now_s = 0.0
        self.faults: list[tuple[float, str]] = []

    def runs(self, seconds: float, share: float | Callable[[float], float]) -> None:
        """Let time pass in which the worker sends nothing."""
        interval_s = self.watchdog.interval_s
        for _ in range(int(seconds / interval_s)):
            self.now_s += interval_s
            self.cpu_s += interval_s * (share(self.now_s) if callable(share) else share)
            if fault := self.watchdog.look(self.cpu_s):
                self.faults.append((self.now_s, fault))
                self.watchdog.hear()


@pytest.mark.parametrize("slowness", [1, 4, 20])
def test_a_long_prompt_on_a_slow_machine_is_no_stall(slowness: int) -> None:
    """A prompt of about 16,000 tokens runs in steps of 512. The first step takes `slowness` times the measured time; each later one takes
    longer, because the context grows."""
    worker, pace = Watched(), Pace(512, Measured(MEASURED), 0.1)
    for step in range(16_000 // 512):
        step_s = slowness * MEASURED[512] * (1 + step / 40)
        worker.watchdog.expect(pace.limit_s(512))
        worker.runs(step_s, share=1 / slowness)
        worker.watchdog.hear()
        pace.observe(512, step_s)
    assert not worker.faults and worker.now_s > 30 * slowness


@pytest.mark.parametrize("limit_s", [0.0, 600.0])
@pytest.mark.parametrize("share", [0.0, 0.0001])
def test_a_worker_that_does_nothing_is_replaced_in_time(limit_s: float, share: float) -> None:
    """A suspended worker uses no CPU time, whatever its step may take."""
    worker = Watched()
    worker.watchdog.expect(limit_s)
    worker.runs(2 * STALL_S, share)
    at_s, fault = worker.faults[0]
    assert at_s <= STALL_S + 2 * worker.watchdog.interval_s and "no CPU time" in fault


def test_a_worker_that_is_suspended_in_a_slow_step_is_replaced_in_time() -> None:
    worker = Watched()
    worker.watchdog.expect(300.0)
    worker.runs(60.0, share=0.05)
    assert not worker.faults
    worker.runs(60.0, share=0.0)
    assert worker.faults[0][0] <= 60.0 + STALL_S + 2 * worker.watchdog.interval_s


def test_a_worker_that_computes_for_ever_is_replaced() -> None:
    worker, pace = Watched(), Pace(512, Measured(MEASURED), 0.1)
    worker.watchdog.expect(pace.limit_s(512))
    worker.runs(1000.0, share=1.0)
    assert SLOWEST * MEASURED[512] <= worker.faults[0][0] <= SLOWEST * MEASURED[512] + STALL_S
    worker = Watched()
    worker.runs(100.0, share=1.0)
    assert worker.faults[0][0] <= STALL_S + 2 * worker.watchdog.interval_s, "no step was announced as long"


def test_a_worker_that_reports_is_left_alone() -> None:
    worker = Watched()
    for _ in range(100):
        worker.runs(STALL_S / 2, share=0.0)
        worker.watchdog.hear()
    assert not worker.faults


def test_the_limit_follows_the_slowness_of_the_machine() -> None:
    pace = Pace(512, Measured(MEASURED), 0.1)
    before_s = pace.limit_s(512)
    for _ in range(8):
        pace.observe(512, 20 * MEASURED[512])
    assert pace.limit_s(512) > 3 * before_s
    for _ in range(64):
        pace.observe(512, MEASURED[512] / 2)
    assert pace.limit_s(512) == pytest.approx(before_s), "a fast machine does not lower it"
