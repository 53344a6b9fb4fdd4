"""The calibration of a fleet finds the costs of a fleet whose times are known, and sends no prompt twice."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import pytest

from deploy.bench.fleet.costs import NEAR
from deploy.bench.fleet.traces import Arrival
from tests.lab.serving import calibration
from tests.lab.serving.calibration import PROMPTS, Calibration, middle, rising
from tests.lab.serving.played import Answered, ids_of

WAY_S, FLEET_S, TOKEN_S, PAIR_S, CONTEXT_S = 0.002, 0.003, 0.001, 1e-6, 1e-6


class Known:
    """A fleet whose steps take a known time, twice as long while another replica is busy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[list[int]] = []
        self.num_behind = 0
        monkeypatch.setattr(calibration, "played", self.played)
        monkeypatch.setattr(calibration, "kept_busy", self.kept_busy)
        monkeypatch.setattr(calibration, "GAP_S", 1e-6)

    async def played(self, urls: Sequence[str], model: str, trace: Sequence[Arrival]) -> list[Answered]:
        self.sent += [ids_of(one) for one in trace]
        slow = 1 + (self.num_behind > 0 or len(urls) > 1)
        return [self._answered(one, len(trace) // len(urls), slow, urls[0]) for one in trace]

    def _answered(self, one: Arrival, num: int, slow: int, url: str) -> Answered:
        size, half = one.num_prompt, PROMPTS[-1]
        pair_s = PAIR_S * half * half * (size > half)
        first_s = slow * (TOKEN_S * size + pair_s) + WAY_S + FLEET_S * (url == "fleet")
        each_s = slow * (TOKEN_S * num + CONTEXT_S * max(0, size - NEAR))
        return Answered(first_s, first_s + each_s * (one.num_new - 1), one.num_new, 0)

    @asynccontextmanager
    async def kept_busy(self, urls: Sequence[str], model: str, trace: Sequence[Arrival]) -> AsyncGenerator[None]:
        self.num_behind = len(urls)
        yield
        self.num_behind = 0


def test_known_costs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Known(monkeypatch)
    made = Calibration("fleet", ["one", "other"], "model", [])
    made.add()
    made.add()
    measured = made.measured(64)
    for slow, costs, ways_s in zip((1, 2), measured.costs, measured.ways_s, strict=True):
        assert costs.prompt == pytest.approx({size: slow * TOKEN_S * size for size in PROMPTS})
        assert costs.decode[4] == pytest.approx(slow * TOKEN_S * 4)
        assert costs.pair_s == pytest.approx(slow * PAIR_S)
        assert costs.context_s == pytest.approx(slow * CONTEXT_S)
        assert ways_s == pytest.approx([WAY_S + FLEET_S] * len(ways_s))
    long = [tuple(ids[:16]) for ids in fleet.sent if len(ids) >= 16]
    assert len(long) > 60 and len({*long}) == len(long), "a prefix cache may have the beginning of a prompt"


def test_the_middle_half_has_neither_disturbed_nor_lucky_times() -> None:
    assert middle([1.0, 2.0, 3.0, 100.0]) == 2.5
    assert middle([1.0, 1.0, 2.0, 1.0, 1.0, 2.0, 2.0, 2.0]) == pytest.approx(1.5), "one of three processes waits while two run"
    assert middle([4.0]) == 4.0


def test_costs_rise_with_the_size() -> None:
    assert rising({1: 2.0, 2: 1.0, 4: 3.0}) == {1: 2.0, 2: 2.0, 4: 3.0}
