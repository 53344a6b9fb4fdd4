"""Test the comparison of a simulated replica with the engine, whose clock is processor time."""

from __future__ import annotations

import re

import pytest

from deploy import demo
from deploy.bench.checkpoint import model_folder
from deploy.bench.fleet.costs import Costs
from deploy.bench.fleet.traces import Arrival
from deploy.bench.measure import Figure
from deploy.model_loading.load import load_model
from runtime import flags
from server.messages import Load
from tests.lab.serving import simulated_replica
from tests.lab.serving.played import Answered
from tests.lab.serving.simulated_replica import Played, figures_of


def test_errors_compare_the_same_requests() -> None:
    trace = [Arrival(at_s, at, 64, 11, ()) for at, at_s in enumerate((0.0, 5.0, 10.0))]
    answers = [Answered(0.5, 0.5 + 10 * 0.1, 11, 0) for _ in trace]
    found = {figure.name: figure.value for figure in figures_of(trace, answers, Costs({1: 0.4, 64: 0.4}, {1: 0.1}))}
    assert found["first token, median: error"] == pytest.approx(0.2)
    assert found["token, median: error"] == pytest.approx(0.0)


def test_the_engine_answers_all_requests_at_times_of_its_clock() -> None:
    """Two requests come together, and the clock jumps to the third, which comes after an hour without any."""
    trace = [Arrival(0.0, 0, 16, 4, ()), Arrival(0.0, 1, 24, 3, ()), Arrival(3600.0, 2, 16, 1, ())]
    with flags.scope(threads=1), model_folder(demo.NAME) as folder:
        played = Played(load_model(Load("bench", str(folder)), lambda _stage, _fraction: None))
        answers = played.run(trace)
    assert [answer.num_tokens for answer in answers] == [4, 3, 1]
    assert all(0.0 < answer.first_s <= answer.whole_s < 600.0 for answer in answers)
    assert answers[0].first_s < answers[0].whole_s and played.now_s >= 3600.0 + answers[2].whole_s


def test_the_command_compares_the_times_of_the_engine_and_of_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Figure] = []
    monkeypatch.setattr(simulated_replica, "report", lambda figures, as_json: reported.extend(figures))
    simulated_replica.main(["--rate", "20", "--seconds", "1", "--prompt", "16", "--new", "4"])
    names = "first token, median", "first token, p90", "first token, p99", "token, median"
    assert [figure.name for figure in reported] == [f"{name}: error" for name in names]
    assert all(re.search(r"predicted [\d.]+ ms, measured [\d.]+ ms in 1 runs", figure.note) for figure in reported)
