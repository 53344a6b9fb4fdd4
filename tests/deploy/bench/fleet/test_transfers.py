"""Simulated replicas that give each other pages."""

from __future__ import annotations

from dataclasses import replace

from deploy.bench.fleet.costs import SMOLLM2
from deploy.bench.fleet.simulate import Outcome, Plan, simulate
from deploy.bench.fleet.traces import Arrival, Shape, extended, poisson, sessions
from deploy.bench.fleet.transfers import Network

FAST = Network(1e12)
PLAN = Plan(SMOLLM2, num_replicas=2, network=FAST)
KEYS = extended((), "long", 2048)


# the same long prompt twice, which `round-robin` sends to two replicas
TWICE = [Arrival(0.0, 1, 2048, 10, KEYS), Arrival(10.0, 2, 2048, 10, KEYS)]
TURNS = replace(PLAN, policy="round-robin")


def hits(outcome: Outcome) -> list[int]:
    return [job.num_cached for job in outcome.jobs]


def test_an_owner_gives_its_pages() -> None:
    without, found = simulate(replace(TURNS, network=None), TWICE), simulate(TURNS, TWICE)
    assert (hits(without), hits(found)) == ([0, 0], [0, 2047])
    assert found.busy_s < without.busy_s, "the second replica does not compute what the first has"
    assert all(job.end_s is not None for job in found.jobs)


def test_a_slow_network_is_not_used() -> None:
    assert hits(simulate(replace(TURNS, network=Network(1e3)), TWICE)) == [0, 0]


def test_prefill_replicas_compute_long_prompts() -> None:
    trace = [Arrival(float(at), at, 2048, 50, extended((), f"prompt {at}", 2048)) for at in range(20)]
    short = [Arrival(20.0 + at, 50 + at, 500, 50, extended((), f"short {at}", 500)) for at in range(20)]
    outcome = simulate(replace(PLAN, num_prefill=2), [*trace, *short])
    long = outcome.jobs[:20]
    assert all(job.num_cached == 2047 for job in long)
    assert all(job.num_cached == 0 for job in outcome.jobs[20:])
    assert all(job.first_s is not None and job.end_s is not None and job.first_s > job.arrival.at_s for job in outcome.jobs)
    alone = simulate(replace(PLAN, network=None), [*trace, *short])
    assert outcome.paid_s / outcome.wall_s == 4 and alone.paid_s / alone.wall_s == 2


def test_prompts_whose_beginning_is_known_are_computed_where_it_is() -> None:
    trace = sessions(Shape(rate=1.0, duration_s=200.0, num_prompt=256, num_new=32))
    plan = replace(PLAN, num_replicas=4, num_prefill=1)
    outcome = simulate(plan, trace)
    assert sum(job.num_cached for job in outcome.jobs) > 0.5 * sum(job.arrival.num_prompt for job in outcome.jobs)
    assert all(job.end_s is not None for job in outcome.jobs)


def test_each_request_ends_once() -> None:
    trace = poisson(Shape(rate=3.0, duration_s=100.0, num_prompt=1500, num_new=64))
    outcome = simulate(replace(PLAN, num_prefill=1), trace)
    assert len(outcome.jobs) == len(trace)
    assert all(job.num_sent == 1 and job.first_s is not None and job.end_s is not None for job in outcome.jobs)
