"""The comparison of a simulated replica and the engine by processor time."""

from __future__ import annotations

from math import inf

import pytest

from deploy.bench.fleet.costs import Costs
from deploy.bench.fleet.traces import Arrival
from deploy.bench.measure import Figure
from tests.lab.serving import simulated_replica
from tests.lab.serving.played import Answered
from tests.lab.serving.simulated_replica import figures_of


def test_errors_compare_the_same_requests() -> None:
    trace = [Arrival(at_s, at, 64, 11, ()) for at, at_s in enumerate((0.0, 5.0, 10.0))]
    answers = [Answered(0.5, 0.5 + 10 * 0.1, 11, 0) for _ in trace]
    found = {figure.name: figure.value for figure in figures_of(trace, answers, Costs({1: 0.4, 64: 0.4}, {1: 0.1}))}
    assert found["first token, median: error"] == pytest.approx(0.2)
    assert found["token, median: error"] == pytest.approx(0.0)


def test_the_engine_answers_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Figure] = []
    monkeypatch.setattr(simulated_replica, "report", lambda figures, as_json: reported.extend(figures))
    simulated_replica.main(["--rate", "20", "--seconds", "1", "--prompt", "16", "--new", "4"])
    assert len(reported) == 4 and all(0.0 <= figure.value < inf for figure in reported)
