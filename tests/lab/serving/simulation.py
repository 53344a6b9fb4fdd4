"""`python -m tests.lab simulation`: how well `relaxserve bench fleet --simulate` predicts a real fleet on this machine.

`tests/lab/serving/calibration.py` measures the costs of steps and the ways of requests while one replica is busy, while two are, and so on.
Between its passes the same trace is sent to the fleet several times. Then the trace is simulated: a step takes as long as it took with as
many busy replicas. A way is the time that a request of one step takes in addition to the step (HTTP, proxy, ingress). Each first token
comes later by a way, drawn from the measured ones. Where two replicas have equally many requests, chance decides, in each run differently.
So the trace is simulated NUM_CHANCES times, with WAYS draws of ways each, and a prediction is the median of these simulated runs, as a
measured figure is the median of the real ones.

Each figure is the difference of the prediction from the median of the real runs, as a share of the latter. Its note says how far the real
runs themselves are from their median: no prediction can be closer than that. `--record FILE` writes all that was measured, and
`--replay FILE` predicts it again without a fleet.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from pathlib import Path

import msgspec

from deploy import demo
from deploy.bench.fleet.costs import Costs, CostsAt
from deploy.bench.fleet.figures import first_s, token_s
from deploy.bench.fleet.simulate import Outcome, Plan, simulate
from deploy.bench.fleet.traces import TRACES, Arrival, Shape
from deploy.bench.measure import Figure, report
from deploy.bench.serving.drive import percentile
from tests.deploy.ray.cluster import running_fleet
from tests.lab.serving.calibration import Calibration
from tests.lab.serving.played import Answered, play, salted

NAME = "bench"
MAX_SEQS = 64  # of each server, by default
NUM_PASSES = 6  # number of simulations, each with the busy replicas that the one before found
NUM_CHANCES = 15  # number of times that a trace is simulated, each with replicas chosen differently where several are as good
WAYS, JUST_S = 4, 1e-6  # draws of ways for each simulation; seconds before an arrival at which busy replicas are counted
NEAR = 0.1  # goal: a prediction is at most this far from what was measured


@dataclass(frozen=True, slots=True)
class Recording:
    """A measurement of a fleet: costs, ways, and the answers of each run of the trace."""

    trace: list[Arrival]
    runs: list[list[Answered]]
    costs: list[Costs]
    ways_s: list[list[float]]


def predicted(costs: Sequence[Costs], trace: Sequence[Arrival]) -> Outcome:
    """Simulate a trace. `costs` has the costs while one replica is busy, while two are, and so on up to the number of replicas. Each
    simulation takes the number of busy replicas at each time from the simulation before."""
    outcome = Outcome()
    for _ in range(NUM_PASSES):
        plan = Plan(costs[0], num_replicas=len(costs), policy="prefix", costs_at=_costs_at(costs, outcome.busy))
        outcome = simulate(plan, trace)
    return outcome


def _costs_at(costs: Sequence[Costs], busy: Sequence[Sequence[tuple[float, float]]]) -> CostsAt:
    num_busy = num_busy_of(busy)

    def costs_at(at_s: float) -> tuple[Costs, float]:
        num, holds_until_s = num_busy(at_s)
        return costs[min(max(1, num), len(costs)) - 1], holds_until_s

    return costs_at


def num_busy_of(busy: Sequence[Sequence[tuple[float, float]]]) -> Callable[[float], tuple[int, float]]:
    """Return a function from a time to the number of replicas that are busy then, and the time until which it stays the same. `busy` has
    the spans of each replica."""
    changes = sorted((at_s, change) for spans in busy for began_s, end_s in spans for at_s, change in ((began_s, 1), (end_s, -1)))
    times, numbers = [at_s for at_s, _ in changes], [0, *accumulate(change for _, change in changes)]

    def found(at_s: float) -> tuple[int, float]:
        place = bisect_right(times, at_s)
        return numbers[place], times[place] if place < len(times) else inf

    return found


def firsts_of(outcome: Outcome, ways_s: Sequence[Sequence[float]], chance: random.Random) -> list[float]:
    """Return the time to the first token of each request, in seconds. The replica of the request is busy in addition to those that were
    busy just before the request came."""
    num_busy = num_busy_of(outcome.busy)
    return [first_s(job) + chance.choice(ways_s[min(num_busy(job.arrival.at_s - JUST_S)[0], len(ways_s) - 1)]) for job in outcome.jobs]


def figures_of(recording: Recording) -> list[Figure]:
    trace, runs = recording.trace, recording.runs
    outcomes = [predicted(recording.costs, salted(trace, number)) for number in range(NUM_CHANCES)]
    num_new, num_prompt = sum(one.num_new for one in trace), sum(one.num_prompt for one in trace)
    chance = random.Random(3)
    firsts = [firsts_of(outcome, recording.ways_s, chance) for outcome in outcomes for _ in range(WAYS)]
    tokens = [[token_s(job) for job in outcome.jobs] for outcome in outcomes]
    wall_s = statistics.median(outcome.wall_s for outcome in outcomes)

    def rate(run: Sequence[Answered]) -> float:
        return num_new / (max(one.at_s + answer.whole_s for one, answer in zip(trace, run, strict=True)) - trace[0].at_s)

    hits = sum(job.num_cached for job in outcomes[0].jobs) / num_prompt, sum(one.num_cached for one in runs[0]) / num_prompt
    return [
        _compared("tokens per second", num_new / (wall_s - trace[0].at_s), [rate(run) for run in runs], 1.0, ""),
        *figures_of_times(firsts, tokens, runs),
        Figure("prefix hits", hits[0], "of prompt tokens", note=f"measured {hits[1]:.3f}"),
    ]


def figures_of_times(
    firsts_s: Sequence[Sequence[float]], tokens_s: Sequence[Sequence[float]], runs: Sequence[Sequence[Answered]]
) -> list[Figure]:
    """Compare the times to first tokens, and per token, of simulations with those of real runs."""
    real_firsts, real_tokens = ([[getattr(one, name) for one in run] for run in runs] for name in ("first_s", "token_s"))

    def compared(name: str, share: float, simulated: Sequence[Sequence[float]], real: Sequence[Sequence[float]]) -> Figure:
        prediction = statistics.median(percentile(seconds, share) for seconds in simulated)
        return _compared(name, prediction, [percentile(seconds, share) for seconds in real], 1e3, " ms")

    shares = {"median": 0.5, "p90": 0.9, "p99": 0.99}
    return [
        *(compared(f"first token, {name}", share, firsts_s, real_firsts) for name, share in shares.items()),
        compared("token, median", 0.5, tokens_s, real_tokens),
    ]


def _compared(name: str, prediction: float, runs: Sequence[float], scale: float, unit: str) -> Figure:
    measured = statistics.median(runs)
    apart = max(abs(run / measured - 1) for run in runs)
    note = f"predicted {prediction * scale:.4g}{unit}, measured {measured * scale:.4g}{unit} in {len(runs)} runs within {apart:.1%}"
    return Figure(f"{name}: error", abs(prediction / measured - 1), "of it", NEAR, note=note)


def recorded(options: argparse.Namespace) -> Recording:
    """Run a fleet, and measure it."""
    cache = Path(os.environ.get("RELAXSERVE_CACHE", Path.home() / ".cache" / "relaxserve"))
    # answers of the real fleet are other tokens than those of the trace, so no later prompt begins with one
    made = TRACES[options.trace](Shape(options.rate, options.seconds, options.prompt, options.new, seed=1))
    trace = [replace(one, keys_after=()) for one in made if one.num_prompt + one.num_new <= options.most]
    bounds = {"min_replicas": options.replicas, "max_replicas": options.replicas}
    pool = {"models": [f"{options.model}={NAME}"], "num_cpus": 0.1, **bounds}
    runs: list[list[Answered]] = []
    with running_fleet(cache, {"replicas": pool}, options.replicas, has_haproxy=True) as cluster:
        urls = list(cluster.servers().values())
        Calibration(cluster.url, urls, NAME, trace).add()  # warms up
        calibration = Calibration(cluster.url, urls, NAME, trace)
        for number in range(options.runs):
            calibration.add()
            runs.append(play(cluster.url, NAME, salted(trace, number))[0])
        calibration.add()
    measured = calibration.measured(MAX_SEQS)
    return Recording(trace, runs, list(measured.costs), [list(ways_s) for ways_s in measured.ways_s])


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
    parser.add_argument("--runs", type=int, default=3, help="how often the trace is sent to the real fleet")
    parser.add_argument("--most", type=int, default=1000, help="tokens of a prompt and its answer; longer requests are left out")
    parser.add_argument("--record", type=Path, help="a file to write what was measured to")
    parser.add_argument("--replay", type=Path, help="a file that --record wrote: predict again what it has, without a fleet")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    recording = msgspec.json.decode(options.replay.read_bytes(), type=Recording) if options.replay else recorded(options)
    if options.record:
        options.record.write_bytes(msgspec.json.encode(recording))
    report(figures_of(recording), as_json=options.json)
