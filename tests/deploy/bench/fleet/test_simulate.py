"""Simulated fleets: routing, failures, admission, and the figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.bench.fleet.costs import SMOLLM2, Costs
from deploy.bench.fleet.figures import Objective, figures_of
from deploy.bench.fleet.policies import POLICIES, Cell
from deploy.bench.fleet.replica import Job, Replica
from deploy.bench.fleet.scaling import LOOK_S, START_S, Scaler
from deploy.bench.fleet.simulate import Failure, Outcome, Plan, simulate
from deploy.bench.fleet.traces import Arrival, Shape, day, poisson, sessions
from deploy.ray.scaling import DOWNSCALE_DELAY_S, TARGET_REQUESTS, UPSCALE_DELAY_S

AGENTS = sessions(Shape(rate=2.0, duration_s=400.0, num_prompt=128, num_new=64))
PLAN = Plan(SMOLLM2, num_replicas=4)


def figure(outcome: Outcome, name: str) -> float:
    (found,) = [one.value for one in figures_of(outcome, Objective(), 1.0) if one.name == name]
    return found


def hits(policy: str) -> float:
    plan = replace(PLAN, policy=policy)
    return figure(simulate(plan, AGENTS), "prefix hits")


def test_agents_find_their_prefixes_again() -> None:
    found = {policy: hits(policy) for policy in POLICIES}
    large = replace(PLAN, num_replicas=1, costs=replace(SMOLLM2, capacity=4 * SMOLLM2.capacity, max_seqs=256))
    alone = figure(simulate(large, AGENTS), "prefix hits")
    assert found["prefix"] >= 0.9 * alone, "four replicas find what one large one finds"
    assert found["sessions"] >= 0.9 * alone
    assert max(found["round-robin"], found["load"]) <= 0.85 * found["prefix"]


@pytest.mark.parametrize("policy", POLICIES)
def test_each_request_ends_once(policy: str) -> None:
    outcome = simulate(replace(PLAN, policy=policy), AGENTS)
    assert len(outcome.jobs) == len(AGENTS)
    assert not outcome.num_refused
    for job in outcome.jobs:
        assert job.first_s is not None
        assert job.end_s is not None
        assert job.arrival.at_s < job.first_s <= job.end_s
        assert job.num_sent == 1
        assert 0 <= job.num_cached < job.arrival.num_prompt


def test_the_requests_of_a_cell_that_fails_go_on_elsewhere() -> None:
    trace = sessions(Shape(rate=6.0, duration_s=300.0, num_prompt=128, num_new=128))
    plan = Plan(SMOLLM2, num_cells=3, num_replicas=2, failures=(Failure(200.0, 60.0, 1, 2),))
    outcome, undisturbed = simulate(plan, trace), simulate(replace(plan, failures=()), trace)
    assert outcome.num_again > 0
    assert all(job.end_s is not None for job in outcome.jobs)
    assert len(outcome.jobs) == len(trace)
    assert figure(outcome, "prefix hits") < figure(undisturbed, "prefix hits"), "caches are lost"
    moved = [job for job in outcome.jobs if job.num_sent > 1]
    assert len(moved) == outcome.num_again
    assert all((job.end_s or 0.0) > 200.0 for job in moved)


def test_without_any_replica_requests_have_no_answer() -> None:
    plan = Plan(SMOLLM2, num_replicas=1, failures=(Failure(200.0, 60.0, 0, 1),))
    outcome = simulate(plan, AGENTS)
    assert outcome.num_refused > 0, "those that arrive meanwhile"
    assert figure(outcome, "requests without an answer") > 0
    assert outcome.num_again == 0, "there was no replica to which they could be sent"
    assert all(job.num_sent == 1 for job in outcome.jobs)
    later = [job for job in outcome.jobs if job.arrival.at_s > 260.0]
    assert later, "the replica came back"
    assert all(job.end_s is not None for job in later)


def test_the_edge_takes_another_cell_and_then_refuses() -> None:
    trace = [Arrival(0.001 * at, 7, 100, 200, ()) for at in range(40)]  # one session, so one cell is everybody's first
    plan = Plan(SMOLLM2, num_cells=2, num_replicas=1, most_requests=10)
    outcome = simulate(plan, trace)
    assert len(outcome.jobs) == 20
    assert outcome.num_refused == 20
    assert figure(outcome, "objective met") <= 0.5, "a refused request meets no objective"


def test_more_replicas_serve_more_and_cost_more() -> None:
    trace = poisson(Shape(rate=12.0, duration_s=120.0, num_prompt=128, num_new=64))
    few, many = Plan(SMOLLM2, num_replicas=2), Plan(SMOLLM2, num_replicas=8)
    found = [simulate(plan, trace) for plan in (few, many)]
    met, first, cost = ([figure(one, name) for one in found] for name in ("objective met", "first token, p99", "cost"))
    assert met[0] < met[1]
    assert first[0] > first[1]
    assert cost[0] < cost[1]


def test_the_number_of_replicas_follows_a_day() -> None:
    trace = day(Shape(rate=12.0, duration_s=3600.0, num_prompt=128, num_new=64))
    fixed = simulate(Plan(SMOLLM2, num_replicas=10), trace)
    scaled = simulate(Plan(SMOLLM2, num_replicas=1, most_replicas=10), trace)
    assert figure(fixed, "replicas") == 10
    assert 2 < figure(scaled, "replicas") < 8
    assert figure(scaled, "cost") < 0.8 * figure(fixed, "cost")
    assert all(job.end_s is not None for job in scaled.jobs), "a replica that stops finishes what it has"
    assert len(scaled.jobs) + scaled.num_refused == len(trace)


def test_replicas_are_paid_until_the_last_request_has_ended() -> None:
    """The number of replicas also follows the load after the last arrival."""
    trace = [Arrival(0.001 * at, at, 100, 200, ()) for at in range(100)]
    fixed = simulate(Plan(SMOLLM2, num_replicas=1), trace)
    scaled = simulate(Plan(SMOLLM2, num_replicas=1, most_replicas=1), trace)
    assert fixed.paid_s == fixed.wall_s > 10 * LOOK_S
    assert 0 <= scaled.paid_s - scaled.wall_s <= LOOK_S
    assert 0.9 < figure(scaled, "busy") <= 1


def test_replicas_that_fail_are_replaced() -> None:
    trace = poisson(Shape(rate=6.0, duration_s=600.0, num_prompt=128, num_new=64))
    plan = Plan(SMOLLM2, num_replicas=2, most_replicas=6, failures=(Failure(200.0, 1e9, 0, 2),))
    outcome = simulate(plan, trace)
    assert figure(outcome, "requests without an answer") > 0, "those that both replicas had when they failed"
    assert outcome.num_again == 0
    late = [job for job in outcome.jobs if job.arrival.at_s > 400.0]
    assert len(late) > 1000
    assert all(job.end_s is not None for job in late)


def test_a_replica_that_stops_gets_nothing_and_is_paid_until_it_has_ended() -> None:
    cell = Cell("cell", [Replica(str(at), SMOLLM2) for at in range(2)], "load")
    scaler = Scaler(cell, 1, TARGET_REQUESTS)
    assert [replica.is_up for replica in cell.replicas] == [True, False]
    jobs = [Job(Arrival(0.0, at, 50, 400, ())) for at in range(40)]
    for job in jobs:
        cell.replicas[0].submit(job)
    times_s = [LOOK_S * at for at in range(1, 400)]
    ups = []
    for now_s in times_s:
        scaler.look(now_s)
        ups.append(sum(replica.is_up for replica in cell.replicas))
    began_s = times_s[ups.index(2)]
    assert began_s == pytest.approx(UPSCALE_DELAY_S + START_S, abs=2 * LOOK_S)
    ended_s = max(job.end_s or 0.0 for job in jobs)
    stopped_s = next(now_s for now_s, num in zip(times_s, ups, strict=True) if now_s > began_s and num == 1)
    assert stopped_s >= ended_s + DOWNSCALE_DELAY_S / 2, "it waits before it stops"
    assert scaler.paid_s == pytest.approx(times_s[-1] + stopped_s - UPSCALE_DELAY_S, abs=3 * LOOK_S)


def test_a_step_of_prompts_and_of_decoding_reads_the_weights_once() -> None:
    costs = Costs({1: 1.0, 11: 2.0}, {1: 1.0, 5: 3.0}, context_s=0.5)
    assert costs.step_s(0, 1, 0) == costs.step_s(1, 0, 0) == 1.0
    assert costs.step_s(6, 3, 0) == pytest.approx(1.5 + 2.0 - 1.0)
    assert costs.step_s(21, 0, 0) == pytest.approx(3.0), "larger steps than those measured go on in a line"
    assert costs.step_s(0, 1, 130) == pytest.approx(2.0), "two tokens beyond those that the measurement had"


def test_chunks_after_others_of_their_prompt_cost_more() -> None:
    costs = Costs({1: 1.0, 4: 1.0}, {1: 1.0}, pair_s=0.1, max_tokens=4)
    assert costs.step_s(4, 0, 0, 8) == pytest.approx(1.8)
    assert costs.prompt_s(10) == pytest.approx(3.0 + 0.1 * (4 * 4 + 2 * 8))
