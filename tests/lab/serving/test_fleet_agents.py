"""Test that the comparison of routers sends requests with equally long common beginnings to each, and the quotients of its figures."""

from __future__ import annotations

import pytest

from deploy.bench.fleet.traces import Shape
from tests.lab.serving.fleet_agents import figures_of, hits, trace_of
from tests.lab.serving.played import Answered, ids_of, salted

SHAPE = Shape(2.0, 60.0, 40, 12, seed=1)


def test_traces_with_other_tokens_share_as_much() -> None:
    trace = trace_of(SHAPE, 1000, 5.0)
    other = salted(trace, 1)
    assert [one.at_s for one in trace] == [one.at_s for one in other] and max(one.at_s for one in trace) <= 12.0
    first, second = ([ids_of(one) for one in made] for made in (trace, other))
    assert [len(ids) for ids in first] == [len(ids) for ids in second]
    for a in range(20):
        for b in range(a):
            assert shared(first[a], first[b]) // 64 == shared(second[a], second[b]) // 64
    assert max(shared(a, b) for a in first for b in second) < 16, "a cache that has one trace has nothing of the other"


def shared(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_shares_are_those_of_one_large_replica() -> None:
    trace = trace_of(SHAPE, 1000, 5.0)
    answers = [Answered(0.1, 0.2, 1, one.num_prompt // 2) for one in trace]
    assert hits(trace, answers) == pytest.approx(0.5, abs=0.01)
    found = {figure.name: figure for figure in figures_of(0.8, 0.76, 0.4, 4, trace)}
    assert found["hits of 4 replicas behind the router"].value == pytest.approx(0.95)
    assert found["hits of 4 replicas behind the router"].reached
    assert found["hits of 4 replicas in turn"].value == pytest.approx(0.5)
