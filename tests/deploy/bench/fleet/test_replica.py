"""The model of a replica, compared with the real scheduler on a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from statistics import mean, median

import pytest

from deploy.bench.fleet.costs import Costs
from deploy.bench.fleet.figures import first_s
from deploy.bench.fleet.replica import Job, Prefixes, Replica
from deploy.bench.fleet.traces import BLOCK_TOKENS, Arrival, Shape, extended, poisson
from server.engine.scheduling.pace import Measured, Pace, StepCosts
from server.engine.step_model import GroupLimits, StepLimits
from server.load_settings import MAX_GAP_MS
from server.messages import SamplingParams, Submit
from tests.server.engine.conftest import Rig

STEPS = {1: 0.018, 4: 0.021, 8: 0.030, 16: 0.052, 32: 0.092, 64: 0.17, 128: 0.32, 256: 0.62, 512: 1.24}
MAX_SEQS, NUM_PAGES, MAX_CONTEXT = 16, 1000, 2048
LIMITS = StepLimits(vocab_size=64, max_context=MAX_CONTEXT, max_tokens=512, max_seqs=MAX_SEQS, groups=(GroupLimits(NUM_PAGES),))
COSTS = Costs(STEPS, STEPS, max_tokens=512, max_seqs=MAX_SEQS, capacity=NUM_PAGES * 16)


class Clock:
    """A clock that each step of the real engine advances by its cost."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._costs = StepCosts(STEPS)

    def __call__(self) -> float:
        return self.now_s

    def spend(self, num_tokens: int) -> None:
        self.now_s += self._costs(num_tokens)


def text_of(arrival: Arrival) -> tuple[int, ...]:
    ids: list[int] = []
    for key in arrival.keys:
        ids += random.Random(key).choices(range(64), k=BLOCK_TOKENS)
    return tuple(ids + random.Random(arrival.session).choices(range(64), k=arrival.num_prompt - len(ids)))


def real(trace: Sequence[Arrival]) -> tuple[list[float], list[float], int]:
    """Return the times of first tokens and of ends of the real engine, and how many prompt tokens its prefix cache had."""
    clock = Clock()
    one = Rig(limits=LIMITS, cost=clock, clock=clock, pace=Pace(512, Measured(STEPS), MAX_GAP_MS / 1000))
    coming, first, ended = list(enumerate(trace)), dict[int, float](), dict[int, float]()
    while coming or one.engine.has_work:
        if not one.engine.has_work:
            clock.now_s = max(clock.now_s, coming[0][1].at_s)
        while coming and coming[0][1].at_s <= clock.now_s:
            number, arrival = coming.pop(0)
            params = SamplingParams(arrival.num_new, temperature=0.0, ignore_eos=True)
            one.engine.submit(Submit(str(number), text_of(arrival), params))
        one.engine.step()
        for (name, _), outcome in one.outcomes.items():
            if outcome.token_ids:
                first.setdefault(int(name), clock.now_s)
            if outcome.end is not None:
                ended.setdefault(int(name), clock.now_s)
    order = range(len(trace))
    return [first[at] for at in order], [ended[at] for at in order], sum(one.num_cached.values())


def simulated(trace: Sequence[Arrival]) -> tuple[list[float], list[float], int]:
    replica, jobs = Replica("one", COSTS), [Job(arrival) for arrival in trace]
    for job in jobs:
        replica.advance(job.arrival.at_s)
        replica.submit(job)
    replica.finish()
    assert all(job.first_s is not None and job.end_s is not None for job in jobs)
    return [job.first_s or 0.0 for job in jobs], [job.end_s or 0.0 for job in jobs], sum(job.num_cached for job in jobs)


def waits(trace: Sequence[Arrival], times_s: Sequence[float]) -> list[float]:
    return [time_s - arrival.at_s for arrival, time_s in zip(trace, times_s, strict=True)]


def shared_beginnings() -> list[Arrival]:
    """Return 60 arrivals. Each prompt begins with one of three texts."""
    found: list[Arrival] = []
    for at in range(60):
        keys = extended(extended((), f"text {at % 3}", 512), f"own {at}", 700)
        found.append(Arrival(at * 1.1, at, 720, 24, keys))
    return found


TRACES = {
    "half loaded": poisson(Shape(0.7, 120.0, 96, 48)),
    "loaded": poisson(Shape(1.3, 120.0, 96, 48, seed=1)),
    "a burst": [Arrival(0.0, at, 128, 64, ()) for at in range(40)],
    "shared beginnings": shared_beginnings(),
}


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_the_model_is_close_to_the_scheduler(trace: list[Arrival]) -> None:
    trace = [arrival for arrival in trace if arrival.num_prompt + arrival.num_new < MAX_CONTEXT]
    real_first, real_end, real_cached = real(trace)
    first, end, cached = simulated(trace)
    assert max(end) == pytest.approx(max(real_end), rel=0.05)
    assert median(waits(trace, first)) == pytest.approx(median(waits(trace, real_first)), rel=0.1)
    assert mean(waits(trace, first)) == pytest.approx(mean(waits(trace, real_first)), rel=0.1)
    assert mean(waits(trace, end)) == pytest.approx(mean(waits(trace, real_end)), rel=0.1)
    assert cached == pytest.approx(real_cached, rel=0.05)


def test_prefixes_that_were_used_last_stay() -> None:
    prefixes = Prefixes()
    first, second = extended((), "first", 256), extended((), "second", 256)
    prefixes.use(first, 1.0)
    prefixes.use(second, 2.0)
    prefixes.use(first, 3.0)
    prefixes.shrink(5)
    assert (prefixes.num_found(first), prefixes.num_found(second)) == (4, 1)
    assert prefixes.kept_since_s == 2.0, "what the router knows of: `second` was stored then"
    prefixes.shrink(2)
    assert (prefixes.num_found(first), prefixes.num_found(second)) == (2, 0)


def test_a_replica_that_fails_loses_its_jobs_and_its_prefixes() -> None:
    replica = Replica("one", COSTS)
    arrivals = [Arrival(0.0, at, 100, 50, extended((), str(at), 100)) for at in range(30)]
    for arrival in arrivals:
        replica.submit(Job(arrival))
    replica.advance(6.0)
    lost = replica.fail()
    assert sorted(job.arrival.session for job in lost) == list(range(30))
    assert any(job.first_s is not None for job in lost)
    assert any(job.first_s is None for job in lost)
    assert replica.num_requests == 0
    assert replica.prefixes.num_found(arrivals[0].keys) == 0


def test_no_more_jobs_run_than_pages_hold() -> None:
    small = Costs(STEPS, STEPS, max_seqs=16, capacity=1000)
    replica = Replica("one", small)
    jobs = [Job(Arrival(0.0, at, 300, 100, ())) for at in range(6)]
    for job in jobs:
        replica.submit(job)
    replica.advance(0.001)
    assert len(replica.waiting) == 4, "two of 400 tokens fit"
    replica.finish()
    assert all(job.end_s is not None for job in jobs)
    assert [job.end_s for job in jobs] == sorted(job.end_s or 0.0 for job in jobs)


def test_a_prompt_reads_the_context_before_each_of_its_chunks() -> None:
    replica, keys = Replica("one", replace(COSTS, pair_s=1e-5)), extended((), "text", 576)
    jobs = [Job(Arrival(0.0, 0, 512, 1, keys[:8])), Job(Arrival(100.0, 1, 576, 1, keys))]
    for job in jobs:
        replica.advance(job.arrival.at_s)
        replica.submit(job)
    replica.finish()
    assert jobs[1].num_cached == 512
    assert first_s(jobs[1]) == pytest.approx(STEPS[64] + 1e-5 * 64 * 512)


def test_a_step_takes_a_part_of_each_of_the_costs_that_change_meanwhile() -> None:
    slow = COSTS.slower(4.0)
    replica = Replica("one", COSTS, lambda at_s: (COSTS, 0.31) if at_s < 0.31 else (slow, inf))
    job = Job(Arrival(0.0, 0, 256, 1, ()))
    replica.submit(job)
    replica.finish()
    assert first_s(job) == pytest.approx(0.31 + 0.5 * 4 * STEPS[256]), "half of the step was done after 0.31 s"


def test_the_decoding_step_in_which_the_costs_change_takes_a_part_of_both() -> None:
    """Steps of 0.1 s take twice as long after 0.25 s, when half of the third step is done."""
    costs = Costs({1: 1e-9}, {1: 0.1})
    slow, ends = costs.slower(2.0), list[float]()
    for num_new in (3, 4, 5):  # the first token comes from the prompt
        replica, job = (
            Replica("one", costs, lambda at_s: (costs, 0.25) if at_s < 0.25 else (slow, inf)),
            Job(Arrival(0.0, 0, 1, num_new, ())),
        )
        replica.submit(job)
        replica.finish()
        ends.append(job.end_s or 0.0)
    assert ends == pytest.approx([0.2, 0.35, 0.55])


@pytest.mark.parametrize("context_s", [0.0, 1e-3])
def test_decoding_steps_taken_together_end_when_single_steps_do(context_s: float) -> None:
    """Decoding steps that are computed together end when single steps would, even if each step takes longer than the one before, and if the
    costs change meanwhile."""
    costs = Costs({1: 1e-9, 512: 1e-9}, {1: 0.1}, context_s)
    slow, ends = costs.slower(2.0), list[float]()
    for most_s in (inf, 0.01):
        replica, job = (
            Replica("one", costs, lambda at_s: (costs, 10.03) if at_s < 10.03 else (slow, inf)),
            Job(Arrival(0.0, 0, 200, 150, ())),
        )
        replica.submit(job)
        while job.end_s is None:
            replica.advance(replica.now_s + most_s)
        ends.append(job.end_s)
    assert ends[0] == pytest.approx(ends[1]) and ends[0] > 10.03
