"""Prompts that ride along lengthen the gaps of streams by a bounded factor, and get on all the same. On a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import pytest

from server.engine.pace import FURTHEST, SMALLEST, STALE, STRETCH, WEIGHT, Pace
from server.engine.step_model import StepLimits
from server.messages import SamplingParams, Submit

LIMITS = StepLimits(vocab_size=64, max_context=4096, max_tokens=512, max_seqs=64, num_pages=2000)

Cost = Callable[[int], float]
COSTS: dict[str, Cost] = {
    "each token costs the same": lambda num: 0.010 + 0.0058 * num,
    "six tokens beside the weights are free": lambda num: max(0.016, 0.008 + 0.0012 * num),
    "most tokens are free": lambda num: max(0.016, 0.012 + 0.00006 * num),
}
costs = pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)


class SimulatedClock:
    """A machine that now and then is disturbed."""

    def __init__(self, cost: Cost) -> None:
        self.now = 0.0
        self.ticks: list[float] = []
        self._cost = cost
        self._rng = random.Random(0)

    def __call__(self) -> float:
        return self.now

    def spend(self, num_tokens: int) -> None:
        disturbed = 1 + 0.04 * abs(self._rng.gauss(0, 1)) + 0.2 * (self._rng.random() < 0.02)
        self.ticks.append(self._cost(num_tokens) * disturbed)
        self.now += self.ticks[-1]


def submit(name: str, length: int, max_tokens: int) -> Submit:
    prompt = tuple((i * 7 + hash_of(name)) % 64 for i in range(length))
    return Submit(name, prompt, SamplingParams(max_tokens, temperature=0.0, ignore_eos=True))


def hash_of(name: str) -> int:
    return sum(map(ord, name))


@costs
@pytest.mark.parametrize("num_streams", [2, 16])
def test_the_worst_gap_stays_within_the_promise(rig, cost: Cost, num_streams: int) -> None:
    clock = SimulatedClock(cost)
    one = rig(limits=LIMITS, cost=clock, clock=clock)
    for i in range(num_streams):
        one.engine.submit(submit(str(i), 3, 2000))
    for _ in range(60):
        one.step()
    usual = median(clock.ticks[-40:])
    clock.ticks.clear()
    one.engine.submit(submit("late", 2000, 1))
    while one.outcomes.get(("late", 0)) is None:
        one.step()
    dear = cost(num_streams + SMALLEST) > STRETCH * cost(num_streams)
    assert max(clock.ticks) <= (4.0 if dear else 2.5) * usual
    alone_s = 2000 * (cost(512) - cost(0)) / 512
    assert sum(clock.ticks) <= 4.6 * alone_s + 8 * usual, "and the prompt is not starved either"


@costs
def test_many_at_once_reach_most_of_what_the_model_alone_would(rig, cost: Cost) -> None:
    """32 prompts of 128 tokens, 128 tokens out: beside prompts in the fullest steps, and then steps of all."""
    clock = SimulatedClock(cost)
    one = rig(limits=LIMITS, cost=clock, clock=clock)
    one.run(submit(chr(33 + i), 128, 128) for i in range(32))
    alone_s = 8 * cost(512) + 127 * cost(32)
    assert alone_s / clock.now >= 0.87


def paced(pace: Pace, cost: Cost, num_decode: int, num_waiting: int, num_steps: int) -> int:
    """The budget after so many steps that used it."""
    for _ in range(num_steps):
        num_prefill = pace.prefill_budget(num_decode, num_waiting)
        pace.observe(num_decode, num_prefill, cost(num_decode + num_prefill))
    return pace.prefill_budget(num_decode, num_waiting)


def linear(num: int) -> float:
    return 0.010 + 0.0001 * num


def test_the_budget_follows_the_costs() -> None:
    pace = Pace(1024)
    assert pace.prefill_budget(0, 1) == 1024, "nobody waits"
    assert pace.prefill_budget(8, 1) == 0, "first a step that shows what decoding costs"
    pace.observe(8, 0, linear(8))
    sizes = [paced(pace, linear, 8, 1, 1) for _ in range(6)]
    assert sizes == [8, 16, 32, 43, 43, 43], "twice as many each time, to what fits"
    assert pace.prefill_budget(8, 9) == 2 * 43, "eight more that wait"
    assert paced(pace, linear, 8, 6, 5) == pytest.approx(WEIGHT * 5 / 8 * linear(8) / 0.0001, abs=1)
    assert paced(pace, linear, 8, 60, 5) == pytest.approx((FURTHEST - 1) * linear(8) / 0.0001, abs=1)
    pace.observe(8, 0, 5.0)
    pace.observe(8, 80, 5.0)
    assert pace.prefill_budget(8, 1) == SMALLEST, "the machine was disturbed, and may be still"
    pace.observe(8, SMALLEST, linear(8 + SMALLEST))
    assert pace.prefill_budget(8, 1) == 43, "it is not, and the estimates hardly moved"
    for _ in range(30):
        pace.observe(8, 80, 0.010 + 80 * 0.01)
    assert pace.prefill_budget(8, 1) == SMALLEST


def test_steps_of_prompts_alone_show_what_many_cost() -> None:
    pace = Pace(512)
    pace.observe(0, 512, 512 * 0.0002)
    pace.observe(8, 0, linear(8))
    assert pace.prefill_budget(8, 1) == pytest.approx((STRETCH - 1) * linear(8) / 0.0002, abs=1), "no need to feel the way"


def test_the_usual_step_is_measured_anew() -> None:
    pace = Pace(512)
    pace.observe(8, 0, linear(8))
    assert pace.prefill_budget(9, 1) > 0, "about as many"
    assert pace.prefill_budget(11, 1) == pace.prefill_budget(32, 1) == 0, "other steps"
    for _ in range(STALE):
        pace.observe(8, 16, linear(24))
    assert pace.prefill_budget(8, 1) > 0
    pace.observe(8, 16, linear(24))
    assert pace.prefill_budget(8, 1) == 0
    pace.observe(8, 0, 0.030)
    for _ in range(20):
        pace.observe(8, 50, 0.035)
    assert pace.prefill_budget(8, 1) == 100, "what was known of old steps is forgotten"
