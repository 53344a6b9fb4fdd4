"""`python -m tests.lab simulation`: how well `relaxserve bench fleet --simulate` predicts a real fleet on this machine.

Replicas share the cores of this machine with each other, with Ray and with the clients. So the times of steps are measured, as clients see
them, while one replica is busy, while two are, and so on up to all. A simulated step takes the time that was measured with as many busy
replicas. A request also takes time on its way through the fleet (HTTP, ingress, processes that wake up). This overhead is measured with
short requests at random times; one of the measured values, drawn at random, is added to each simulated time to a first token. Then another
trace is sent to the fleet, and simulated. Each figure is the difference of the prediction from the measurement, as a share of the latter.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, count
from pathlib import Path

from deploy import demo
from deploy.bench.fleet.costs import Costs
from deploy.bench.fleet.figures import first_s, token_s
from deploy.bench.fleet.simulate import Outcome, Plan, simulate
from deploy.bench.fleet.traces import TRACES, Arrival, Shape
from deploy.bench.measure import Figure, report
from deploy.bench.serving.drive import percentile
from tests.deploy.ray.cluster import running_fleet
from tests.lab.serving.played import Answered, play

NAME = "bench"
PROMPTS, STREAMS = (1, 16, 64, 128, 256, 512), (1, 2, 4, 8, 16)  # measured sizes: tokens of a prompt, streams of a replica
NUM_RUNS, NUM_NEW = 5, 32
WAY_PROMPT, WAY_S = 16, 40.0  # prompt tokens of the short requests that measure the overhead, and for how many seconds they arrive
NUM_PASSES = 4  # number of simulations, each with the busy replicas that the one before found
_NEW_SESSIONS = count(1_000_000)
NEAR = 0.1  # goal: a prediction is at most this far from what was measured


def calibrated(urls: Sequence[str], max_seqs: int) -> Costs:
    """Measure the times of steps while all of these replicas are busy."""
    prompt: dict[int, float] = {}
    for size in PROMPTS:
        runs = [_all(urls, [Arrival(0.0, 0, size, 1, ())]) for _ in range(NUM_RUNS)]
        prompt[size] = statistics.median(one.first_s for run in runs for one in run)
    decode: dict[int, float] = {}
    for num in STREAMS:
        found = _all(urls, [Arrival(0.0, 0, 4, NUM_NEW, ())] * num)
        decode[num] = statistics.median((one.whole_s - one.first_s) / (one.num_tokens - 1) for one in found)
    return Costs(prompt, decode, max_seqs=max_seqs)


def mean(some: Costs, others: Costs) -> Costs:
    def of(some: Mapping[int, float], others: Mapping[int, float]) -> dict[int, float]:
        return {size: (seconds + others[size]) / 2 for size, seconds in some.items()}

    return replace(some, prompt=of(some.prompt, others.prompt), decode=of(some.decode, others.decode))


def predicted(costs: Sequence[Costs], trace: Sequence[Arrival]) -> Outcome:
    """Simulate a trace. `costs` has the times of steps while one replica is busy, while two are, and so on up to the number of replicas.
    Each simulation takes the number of busy replicas at each time from the simulation before."""
    outcome = Outcome()
    for _ in range(NUM_PASSES):
        num_busy = num_busy_of(outcome.busy)
        plan = Plan(costs[0], num_replicas=len(costs), policy="prefix", costs_at=lambda at_s, of=num_busy: costs[max(1, of(at_s)) - 1])
        outcome = simulate(plan, trace)
    return outcome


def num_busy_of(busy: Sequence[Sequence[tuple[float, float]]]) -> Callable[[float], int]:
    """Return a function from a time to the number of replicas that are busy then. `busy` has the spans of each replica."""
    changes = sorted((at_s, change) for spans in busy for began_s, end_s in spans for at_s, change in ((began_s, 1), (end_s, -1)))
    times, numbers = [at_s for at_s, _ in changes], [0, *accumulate(change for _, change in changes)]
    return lambda at_s: numbers[bisect_right(times, at_s)]


def ways(url: str, rate: float, prompt_s: float) -> list[float]:
    """Measure how much longer than `prompt_s`, the time of their one step, short requests to the fleet take, in seconds."""
    sparse = TRACES["poisson"](Shape(rate, WAY_S, WAY_PROMPT, 1, seed=2))
    short = [replace(one, session=next(_NEW_SESSIONS), num_prompt=WAY_PROMPT, num_new=1, keys=(), keys_after=()) for one in sparse]
    answers, _ = play(url, NAME, short)
    return [max(0.0, answer.first_s - prompt_s) for answer in answers]


def _all(urls: Sequence[str], trace: Sequence[Arrival]) -> list[Answered]:
    """Send a trace to each of several servers at once. No prompt has the beginning of an earlier one, so no prefix cache has it."""

    async def several() -> list[Answered]:
        apart = [[replace(one, session=next(_NEW_SESSIONS)) for one in trace] for _ in urls]
        done = await asyncio.gather(*(asyncio.to_thread(play, url, NAME, part) for url, part in zip(urls, apart, strict=True)))
        return [one for answers, _ in done for one in answers]

    return asyncio.run(several())


def figures_of(trace: Sequence[Arrival], answers: Sequence[Answered], outcome: Outcome, ways_s: Sequence[float]) -> list[Figure]:
    chance = random.Random(3)
    num_new = sum(arrival.num_new for arrival in trace)
    real_s = max(arrival.at_s + answer.whole_s for arrival, answer in zip(trace, answers, strict=True)) - trace[0].at_s
    rates = num_new / (outcome.wall_s - trace[0].at_s), num_new / real_s
    firsts = [first_s(job) + chance.choice(ways_s) for job in outcome.jobs], [answer.first_s for answer in answers]
    tokens = [token_s(job) for job in outcome.jobs], [(one.whole_s - one.first_s) / max(1, one.num_tokens - 1) for one in answers]
    prompts = sum(arrival.num_prompt for arrival in trace)
    hits = sum(job.num_cached for job in outcome.jobs) / prompts, sum(answer.num_cached for answer in answers) / prompts
    return [
        _compared("tokens per second", rates, 1.0, ""),
        _compared("first token, median", _both(firsts, 0.5), 1e3, " ms"),
        _compared("first token, p90", _both(firsts, 0.9), 1e3, " ms"),
        _compared("first token, p99", _both(firsts, 0.99), 1e3, " ms"),
        _compared("token, median", _both(tokens, 0.5), 1e3, " ms"),
        Figure("prefix hits", hits[0], "of prompt tokens", note=f"measured {hits[1]:.3f}"),
    ]


def _both(times_s: tuple[Sequence[float], Sequence[float]], share: float) -> tuple[float, float]:
    predicted, measured = times_s
    return percentile(predicted, share), percentile(measured, share)


def _compared(name: str, pair: tuple[float, float], scale: float, unit: str) -> Figure:
    predicted, measured = pair
    note = f"predicted {predicted * scale:.4g}{unit}, measured {measured * scale:.4g}{unit}"
    return Figure(f"{name}: error", abs(predicted / measured - 1), "of it", NEAR, note=note)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab simulation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=str(demo.MODEL), help="the model; the built-in demo model by default")
    parser.add_argument("--trace", choices=sorted(TRACES), default="poisson")
    parser.add_argument("--rate", type=float, default=5.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--most", type=int, default=1000, help="tokens of a prompt and its answer; longer requests are left out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    cache = Path(os.environ.get("RELAXSERVE_CACHE", Path.home() / ".cache" / "relaxserve"))
    # answers of the real fleet are other tokens than those of the trace, so no later prompt begins with one
    made = TRACES[options.trace](Shape(options.rate, options.seconds, options.prompt, options.new, seed=1))
    trace = [replace(one, keys_after=()) for one in made if one.num_prompt + one.num_new <= options.most]
    bounds = {"min_replicas": options.replicas, "max_replicas": options.replicas}
    pool = {"models": [f"{options.model}={NAME}"], "num_cpus": 0.1, **bounds}
    with running_fleet(cache, {"replicas": pool}, options.replicas, has_haproxy=True) as cluster:
        urls = list(cluster.servers().values())
        _all(urls, [Arrival(0.0, 7, 256, 16, ())])  # warm up
        before = [calibrated(urls[: num + 1], max_seqs=64) for num in range(len(urls))]
        ways_s = ways(cluster.url, options.rate, before[0].prompt[WAY_PROMPT])
        answers, _ = play(cluster.url, NAME, trace)
        after = [calibrated(urls[: num + 1], max_seqs=64) for num in range(len(urls))]
    outcome = predicted(list(map(mean, before, after)), trace)  # a mean, because other work on this machine comes and goes
    report(figures_of(trace, answers, outcome, ways_s), as_json=options.json)
