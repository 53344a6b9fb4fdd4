"""`python -m tests.lab simulation`: how well `relaxserve bench fleet --simulate` predicts a real fleet on this machine.

The costs of steps are measured on one running replica and on all at once, as clients see them: replicas share the cores of this machine
with each other, with Ray and with the clients. A step of a trace costs a mean of both, weighed by the share of the time in which a replica
is busy. Then the trace is played to the fleet, and simulated. Each figure is a prediction as a share of what was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
PROMPTS, STREAMS = (1, 16, 64, 128, 256, 512), (1, 2, 4, 8, 16)  # what is measured: tokens of a prompt, streams of a replica
NUM_RUNS, NUM_NEW = 5, 32
NUM_WEIGHED = 4  # simulations until the share of busy time agrees with the costs
NEAR = 0.1  # goal: a prediction is at most this far from what was measured


def calibrated(urls: Sequence[str], max_seqs: int) -> Costs:
    """Measure what steps cost while all replicas are busy."""
    prompt: dict[int, float] = {}
    for size in PROMPTS:
        runs = [_all(urls, [Arrival(0.0, 1000 * size + run, size, 1, ())]) for run in range(NUM_RUNS)]
        prompt[size] = statistics.median(one.first_s for run in runs for one in run)
    decode: dict[int, float] = {}
    for num in STREAMS:
        found = _all(urls, [Arrival(0.0, at, 4, NUM_NEW, ()) for at in range(num)])
        decode[num] = statistics.median((one.whole_s - one.first_s) / (one.num_tokens - 1) for one in found)
    return Costs(prompt, decode, max_seqs=max_seqs)


def mean(some: Costs, others: Costs, weight: float = 0.5) -> Costs:
    """Return a mean of costs. `weight`: of the others."""

    def of(some: Mapping[int, float], others: Mapping[int, float]) -> dict[int, float]:
        return {size: seconds + weight * (others[size] - seconds) for size, seconds in some.items()}

    return replace(some, prompt=of(some.prompt, others.prompt), decode=of(some.decode, others.decode))


def predicted(alone: Costs, together: Costs, trace: Sequence[Arrival], num_replicas: int) -> Outcome:
    """Simulate a trace on replicas that slow each other down while they are busy at the same time."""
    busy, outcome = 0.0, Outcome()
    for _ in range(NUM_WEIGHED):
        outcome = simulate(Plan(mean(alone, together, busy), num_replicas=num_replicas, policy="prefix"), trace)
        busy = min(1.0, outcome.busy_s / num_replicas / (outcome.wall_s - trace[0].at_s))
    return outcome


def _all(urls: Sequence[str], trace: Sequence[Arrival]) -> list[Answered]:
    """Play a trace to each of several servers at once."""

    async def several() -> list[Answered]:
        apart = [[replace(one, session=100_000 * at + one.session) for one in trace] for at in range(len(urls))]
        done = await asyncio.gather(*(asyncio.to_thread(play, url, NAME, part) for url, part in zip(urls, apart, strict=True)))
        return [one for answers, _ in done for one in answers]

    return asyncio.run(several())


def figures_of(trace: Sequence[Arrival], answers: Sequence[Answered], outcome: Outcome) -> list[Figure]:
    num_new = sum(arrival.num_new for arrival in trace)
    real_s = max(arrival.at_s + answer.whole_s for arrival, answer in zip(trace, answers, strict=True)) - trace[0].at_s
    rates = num_new / (outcome.wall_s - trace[0].at_s), num_new / real_s
    firsts = [first_s(job) for job in outcome.jobs], [answer.first_s for answer in answers]
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
    with running_fleet(cache, {"replicas": pool}, options.replicas, RAY_SERVE_ENABLE_HA_PROXY="1") as cluster:
        urls = list(cluster.servers().values())
        _all(urls, [Arrival(0.0, 7, 256, 16, ())])  # warm up
        before = [calibrated(some, max_seqs=64) for some in (urls[:1], urls)]
        answers, _ = play(cluster.url, NAME, trace)
        after = [calibrated(some, max_seqs=64) for some in (urls[:1], urls)]
    alone, together = map(mean, before, after)  # other work on this machine comes and goes
    outcome = predicted(alone, together, trace, options.replicas)
    report(figures_of(trace, answers, outcome), as_json=options.json)
