"""Simulated replicas give each other pages, within limits of rate and number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.bench.fleet.costs import SMOLLM2
from deploy.bench.fleet.replica import Job
from deploy.bench.fleet.simulate import Failure, Outcome, Plan, simulate
from deploy.bench.fleet.traces import Arrival, Shape, extended, poisson
from deploy.bench.fleet.transfers import Network
from server.engine.page_exchange import MOST_TRANSFERS
from server.peers.wire import MOST_GIVINGS

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
    trace = [Arrival(2.5 * at, at, 2048, 50, extended((), f"prompt {at}", 2048)) for at in range(20)]
    short = [Arrival(60.0 + at, 50 + at, 500, 50, extended((), f"short {at}", 500)) for at in range(20)]
    outcome = simulate(replace(PLAN, num_prefill=2), [*trace, *short])
    long = outcome.jobs[:20]
    assert all(job.num_cached == 2047 for job in long)
    assert all(job.num_cached == 0 for job in outcome.jobs[20:])
    assert all(job.first_s is not None and job.end_s is not None and job.first_s > job.arrival.at_s for job in outcome.jobs)
    alone = simulate(replace(PLAN, network=None), [*trace, *short])
    assert outcome.paid_s / outcome.wall_s == 4 and alone.paid_s / alone.wall_s == 2


def growing(first: int, more: int, number: int) -> list[Arrival]:
    """Return a session whose prompt is `first` tokens long, and grows by `more` tokens with each request."""
    keys, found = (), list[Arrival]()
    for at in range(number):
        keys = extended(keys, "session", first + at * more)
        found.append(Arrival(30.0 * at, 1, first + at * more, 10, keys))
    return found


def test_prompts_whose_beginning_is_known_are_computed_where_it_is() -> None:
    trace = growing(4096, 512, 5)
    outcome = simulate(replace(PLAN, num_prefill=1), trace)
    *_, prefill = outcome.busy
    assert prefill and max(end_s for _, end_s in prefill) < trace[1].at_s, "the prefill replica computes the first prompt only"
    assert [job.num_cached for job in outcome.jobs[1:]] == [job.arrival.num_prompt for job in outcome.jobs[:-1]]


def test_a_prefill_replica_does_not_compute_a_long_history_again() -> None:
    """Each prompt but the last adds too little for the prefill replica, which therefore has nothing of the history."""
    *trace, last = growing(1920, 1920, 4)
    long = replace(last, num_prompt=5760 + 2112, keys=extended(trace[-1].keys, "session", 5760 + 2112))
    outcome = simulate(replace(PLAN, num_prefill=1), [*trace, long])
    assert not outcome.busy[-1] and outcome.jobs[-1].num_cached == 5760


SHARED_S = SMOLLM2.token_bytes * 2048 / 3.5  # bytes per second at which the long prompt takes 3.5 s; it is computed in 3.7 s


def burst(number: int) -> list[Arrival]:
    """Return a long prompt that one replica computes, and later the same prompt for each of the others, all at once."""
    return [TWICE[0], *(Arrival(10.0, 2 + at, 2048, 10, KEYS) for at in range(number))]


def test_transfers_share_the_rate_of_their_giver_and_end_at_their_limit() -> None:
    """The second transfer gets what is left until its limit, 5.7 s, and the third one nothing."""
    outcome = simulate(replace(TURNS, num_replicas=4, network=Network(SHARED_S)), burst(3))
    _, first, second, third = outcome.jobs
    assert first.num_cached == 2047 and 1024 < second.num_cached < 2047 and third.num_cached == 0
    assert first.first_s is not None and second.first_s is not None and third.first_s is not None
    assert 13.5 < first.first_s < 15.0 < second.first_s < third.first_s


def short(at_s: float, name: str) -> Arrival:
    """Return a request that only takes its turn, so that the one after it goes to the next replica."""
    return Arrival(at_s, 0, 64, 10, extended((), f"short {name}", 64))


def prompts(number: int) -> list[Arrival]:
    """Return long prompts that the second and the third of three replicas compute in turn, and later all of them for the first one."""
    keys = [extended((), f"prompt {at}", 2048) for at in range(number)]
    trace: list[Arrival] = []
    for at in range(0, number, 2):
        trace += [Arrival(0.0, at, 2048, 10, keys[at]), Arrival(0.0, at + 1, 2048, 10, keys[at + 1]), short(0.0, f"{at}")]
    for at in range(number):
        trace += [short(60.0, f"a {at}"), short(60.0, f"b {at}"), Arrival(60.0, at, 2048, 10, keys[at])]
    return trace


def taken(outcome: Outcome) -> list[Job]:
    return [job for job in outcome.jobs if job.arrival.at_s == 60.0 and job.arrival.num_prompt == 2048]


def test_a_taker_receives_one_transfer_after_the_other() -> None:
    """The two transfers come from different replicas."""
    outcome = simulate(replace(TURNS, num_replicas=3, network=Network(2 * SHARED_S)), prompts(2))
    first, second = taken(outcome)
    assert first.num_cached == second.num_cached == 2047 and first.first_s is not None and second.first_s is not None
    assert first.first_s - 60.0 < 2.0 and second.first_s - 60.0 > 3.5


def test_a_taker_takes_so_many_at_a_time() -> None:
    outcome = simulate(replace(TURNS, num_replicas=3), prompts(MOST_TRANSFERS + 2))
    assert [job.num_cached for job in taken(outcome)] == [2047] * MOST_TRANSFERS + [0] * 2


def test_a_giver_gives_to_so_many_at_a_time() -> None:
    number = MOST_GIVINGS + 3
    outcome = simulate(replace(TURNS, num_replicas=number + 1), burst(number))
    assert sorted(hits(outcome)[1:]) == [0] * 3 + [2047] * MOST_GIVINGS


@pytest.mark.parametrize("num_cells", [1, 2])
def test_a_replica_that_is_lost_while_pages_are_on_the_way(num_cells: int) -> None:
    """The second request is lost with its cell. It goes to the other cell, or has no answer if there is none."""
    plan, found = replace(TURNS, num_cells=num_cells, network=Network(SHARED_S)), list[Outcome]()
    for cell in range(num_cells):
        found.append(simulate(replace(plan, failures=(Failure(11.0, 60.0, cell, 2),)), TWICE))
    assert sum(outcome.num_again for outcome in found) == (1 if num_cells == 2 else 0)
    assert [outcome.jobs[1].end_s is not None for outcome in found] == [num_cells == 2] * num_cells


def test_each_request_ends_once() -> None:
    trace = poisson(Shape(rate=3.0, duration_s=100.0, num_prompt=1500, num_new=64))
    outcome = simulate(replace(PLAN, num_prefill=1), trace)
    assert len(outcome.jobs) == len(trace)
    assert all(job.num_sent == 1 and job.first_s is not None and job.end_s is not None for job in outcome.jobs)
