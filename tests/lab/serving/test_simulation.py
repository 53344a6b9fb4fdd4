"""Test the comparison of a simulated and a real fleet: the prompts that it sends, its predictions, and its figures."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from math import inf
from pathlib import Path

import msgspec
import pytest

from deploy.bench.fleet.costs import Costs
from deploy.bench.fleet.figures import token_s
from deploy.bench.fleet.replica import Job
from deploy.bench.fleet.simulate import Outcome
from deploy.bench.fleet.traces import Arrival, extended
from tests.lab.serving import simulation
from tests.lab.serving.played import Answered, ids_of
from tests.lab.serving.simulation import Recording, figures_of, firsts_of, num_busy_of, predicted


def test_prompts_share_as_many_tokens_as_keys() -> None:
    start = extended((), "start", 128)
    one, other = (Arrival(0.0, at, 200, 1, extended(start, f"own {at}", 200)) for at in range(2))
    first, second = ids_of(one), ids_of(other)
    assert (len(first), len(second)) == (200, 200)
    assert first[:128] == second[:128]
    assert first[128:192] != second[128:192]
    assert ids_of(one) == first


def recording(*runs: float) -> Recording:
    """Return a recording of a trace of two requests, whose steps take 0.1 s and whose ways take no time. `runs` has the seconds to the
    first token in each run of the trace."""
    trace = [Arrival(at_s, 0, 100, 11, ()) for at_s in (1.0, 3.0)]
    answers = [[Answered(first_s, first_s + 1.0, 11, 32) for _ in trace] for first_s in runs]
    return Recording(trace, answers, [Costs({1: 0.1, 1000: 0.1}, {1: 0.1})], [[0.0]])


def test_figures_are_errors_of_the_prediction() -> None:
    found = {figure.name: figure for figure in figures_of(recording(0.1, 0.2, 0.24))}
    assert found["first token, median: error"].value == pytest.approx(0.5)
    assert "3 runs within 50.0%" in found["first token, median: error"].note
    assert found["token, median: error"].value == pytest.approx(0.0)
    assert found["tokens per second: error"].value == pytest.approx(3.2 / 3.1 - 1)
    assert found["prefix hits"].note == "measured 0.320"


def test_a_recording_is_predicted_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recording"
    path.write_bytes(msgspec.json.encode(recording(0.1)))
    simulation.main(["--replay", str(path), "--json"])
    (median,) = (one for one in msgspec.json.decode(capsys.readouterr().out) if one["name"] == "first token, median: error")
    assert median["value"] == pytest.approx(0.0)


def test_a_first_token_comes_later_by_ways_of_as_many_busy_replicas() -> None:
    jobs = [Job(Arrival(at_s, 0, 1, 1, ()), first_s=at_s + 0.1) for at_s in (0.0, 2.0)]
    outcome = Outcome(jobs, busy=[[(0.0, 1.0)], [(1.5, 3.0)]])
    chance = random.Random(0)
    assert firsts_of(outcome, [[0.01], [0.02]], chance) == pytest.approx([0.11, 0.12]), "another replica is busy at 2.0 only"
    assert {*firsts_of(replace(outcome, jobs=jobs[:1] * 50), [[0.01, 0.03], [0.02]], chance)} == {0.11, 0.13}


def test_replicas_slow_each_other_down_while_they_are_busy() -> None:
    alone, together = Costs({1: 0.001, 64: 0.01}, {1: 0.001}), Costs({1: 0.002, 64: 0.02}, {1: 0.002})

    def token_s_of(between_s: float) -> float:
        trace = [Arrival(at * between_s, at, 64, 11, ()) for at in range(200)]
        return statistics.median(token_s(job) for job in predicted([alone, together], trace).jobs)

    assert token_s_of(5.0) == pytest.approx(0.001, rel=0.02)
    assert token_s_of(0.01) > 0.0015


def test_a_replica_is_slow_only_while_the_other_is_busy() -> None:
    """The second request occupies the other replica for a tenth of the time in which the first one decodes."""
    alone, together = Costs({1: 0.01}, {1: 0.01}), Costs({1: 0.02}, {1: 0.02})
    trace = [Arrival(0.0, 0, 1, 101, ()), Arrival(0.5, 1, 1, 6, ())]
    long, short = predicted([alone, together], trace).jobs
    assert token_s(short) == pytest.approx(0.02, rel=0.1)
    assert token_s(long) == pytest.approx(0.01 * 1.06, rel=0.02)


def test_busy_replicas_are_counted_at_each_time() -> None:
    num_busy = num_busy_of([[(0.0, 1.0), (2.0, 3.0)], [(0.5, 2.5)]])
    assert [num_busy(at_s)[0] for at_s in (-1.0, 0.0, 0.6, 1.5, 2.2, 2.7, 3.0)] == [0, 1, 2, 1, 2, 1, 0]
    assert [num_busy(at_s)[1] for at_s in (-1.0, 0.6, 3.0)] == [0.0, 1.0, inf]
