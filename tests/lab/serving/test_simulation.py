"""The comparison of a simulated and a real fleet draws the same requests and computes right quotients."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest

from deploy.bench.fleet.costs import Costs
from deploy.bench.fleet.figures import token_s
from deploy.bench.fleet.replica import Job
from deploy.bench.fleet.simulate import Outcome
from deploy.bench.fleet.traces import Arrival, extended
from tests.lab.serving import simulation
from tests.lab.serving.played import Answered, ids_of
from tests.lab.serving.simulation import figures_of, mean, num_busy_of, predicted


def test_prompts_share_as_many_tokens_as_keys() -> None:
    start = extended((), "start", 128)
    one, other = (Arrival(0.0, at, 200, 1, extended(start, f"own {at}", 200)) for at in range(2))
    first, second = ids_of(one), ids_of(other)
    assert (len(first), len(second)) == (200, 200)
    assert first[:128] == second[:128]
    assert first[128:192] != second[128:192]
    assert ids_of(one) == first


def test_figures_are_errors_of_the_prediction() -> None:
    trace = [Arrival(at_s, 0, 100, 11, ()) for at_s in (1.0, 2.0)]
    jobs = [Job(one, first_s=one.at_s + 0.1, end_s=one.at_s + 1.1, num_cached=64) for one in trace]
    answers = [Answered(first_s=0.2, whole_s=1.2, num_tokens=11, num_cached=32) for _ in trace]
    found = {figure.name: figure for figure in figures_of(trace, answers, Outcome(jobs, wall_s=3.1), [0.05])}
    assert found["first token, median: error"].value == pytest.approx(0.25)
    assert found["token, median: error"].value == pytest.approx(0.0)
    assert found["tokens per second: error"].value == pytest.approx(2.2 / 2.1 - 1)
    assert found["prefix hits"].value == pytest.approx(0.64)
    assert found["prefix hits"].note == "measured 0.320"


def test_costs_are_the_mean_of_both_measurements() -> None:
    found = mean(Costs({1: 1.0, 16: 4.0}, {1: 1.0}), Costs({1: 3.0, 16: 4.0}, {1: 2.0}))
    assert (found.prompt, found.decode) == ({1: 2.0, 16: 4.0}, {1: 1.5})


def test_replicas_slow_each_other_down_while_they_are_busy() -> None:
    alone, together = Costs({1: 0.001, 64: 0.01}, {1: 0.001}), Costs({1: 0.002, 64: 0.02}, {1: 0.002})

    def token_s_of(between_s: float) -> float:
        trace = [Arrival(at * between_s, at, 64, 11, ()) for at in range(200)]
        return statistics.median(token_s(job) for job in predicted([alone, together], trace).jobs)

    assert token_s_of(5.0) == pytest.approx(0.001, rel=0.02)
    assert token_s_of(0.01) > 0.0015


def test_busy_replicas_are_counted_at_each_time() -> None:
    num_busy = num_busy_of([[(0.0, 1.0), (2.0, 3.0)], [(0.5, 2.5)]])
    assert [num_busy(at_s) for at_s in (-1.0, 0.0, 0.6, 1.5, 2.2, 2.7, 3.0)] == [0, 1, 2, 1, 2, 1, 0]


def test_no_prompt_of_two_calibrations_is_in_a_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[int]] = []

    def play(_: str, __: str, trace: Sequence[Arrival]) -> tuple[list[Answered], float]:
        sent.extend(ids_of(one) for one in trace)
        return [Answered(0.01, 0.02, 2, 0) for _ in trace], 0.02

    monkeypatch.setattr(simulation, "play", play)
    for _ in range(2):
        simulation.calibrated(["one", "other"], 64)
        simulation.ways("fleet", 2.0, 0.01)
    long = [tuple(ids[:16]) for ids in sent if len(ids) >= 16]
    assert len(long) > 100
    assert len(set(long)) == len(long)
