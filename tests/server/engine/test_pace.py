"""A long prompt that arrives while streams decode lengthens their gaps by a bounded factor."""

from __future__ import annotations

from statistics import median

import pytest

from runtime.step import StepLimits
from server.engine.pace import SMALLEST, UNKNOWN, Pace
from server.messages import SamplingParams, Submit

LIMITS = StepLimits(vocab_size=64, max_context=4096, max_tokens=2048, max_seqs=32, num_pages=2000)


@pytest.mark.parametrize("token_s", [0.02e-3, 0.3e-3, 2e-3])
def test_the_worst_gap_stays_within_the_promise(rig, token_s: float) -> None:
    """On a simulated clock: a step of 20 ms and a cost per token."""
    clock = SimulatedClock(0.020, token_s)
    one = rig(limits=LIMITS, cost=clock, clock=clock)
    for i in range(16):
        one.engine.submit(Submit(str(i), (1, 2, 3), SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)))
    for _ in range(60):
        one.step()
    for repeat in range(2):
        late = Submit(f"late{repeat}", tuple((i + repeat) % 64 for i in range(2000)), SamplingParams(max_tokens=1))
        clock.ticks.clear()
        one.engine.submit(late)
        while one.outcomes.get((late.request_id, 0)) is None:
            one.step()
        for _ in range(len(clock.ticks)):
            one.step()
        gaps = clock.ticks
        assert max(gaps) <= 2.5 * median(gaps)
        if repeat:
            spare_tokens = 0.020 / token_s
            assert len(gaps) / 2 <= 2000 / max(spare_tokens / 2, SMALLEST) + 3, "and the prompt is not starved either"


class SimulatedClock:
    def __init__(self, step_s: float, token_s: float) -> None:
        self.now = 0.0
        self.ticks: list[float] = []
        self._step_s, self._token_s = step_s, token_s

    def __call__(self) -> float:
        return self.now

    def spend(self, num_tokens: int) -> None:
        self.ticks.append(self._step_s + num_tokens * self._token_s)
        self.now += self.ticks[-1]


def test_the_budget_follows_the_costs() -> None:
    pace = Pace(512)
    assert pace.prefill_budget(0) == 512, "nobody waits"
    assert pace.prefill_budget(3) == 0, "first a step that shows what decoding costs"
    pace.observe(8, 0, 0.010)
    assert pace.prefill_budget(3) == UNKNOWN
    for _ in range(5):
        pace.observe(8, 0, 0.010)
        pace.observe(8, 100, 0.010 + 100 * 0.0001)
    assert pace.prefill_budget(8) == 100
    pace.observe(8, 0, 5.0)  # one step that the machine disturbed
    assert pace.prefill_budget(8) == 100
    for _ in range(30):
        pace.observe(8, 100, 0.010 + 100 * 0.01)
    assert pace.prefill_budget(8) == SMALLEST
