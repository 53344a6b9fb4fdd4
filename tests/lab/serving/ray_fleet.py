"""`python -m tests.lab ray-fleet`: what a fleet of two replicas on Ray Serve costs, beside one server on the same cores.

    one client     time to the first token, and time per token, through the fleet and without it
    N clients      tokens per second of the fleet, as a share of those of one server

Server and fleet run in turns, and each figure is a median of the rounds. The whole fleet is on this machine: Ray's own processes, proxy,
ingress and two replicas share the cores that the one server has for itself.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy import demo
from deploy.bench.measure import Figure, report
from deploy.bench.serving.drive import OverHttp, Prompt, Stream, served
from server.models.state import ModelSpec
from tests.deploy.ray.cluster import running_fleet

NAME = "bench"
PROMPT_TOKENS = 64
VOCAB = 200  # ids that every model has
FIRST_MS, TOKEN_MS, SHARE = 3.0, 0.2, 0.95


@dataclass(frozen=True, slots=True)
class Round:
    first_ms: float
    token_ms: float
    tokens_per_s: float


def prompts(seed: int, count: int, num_new: int) -> list[Prompt]:
    """Return prompts that share no prefix with others."""
    return [Prompt(tuple(random.Random(f"{seed} {at}").choices(range(3, VOCAB), k=PROMPT_TOKENS)), num_new) for at in range(count)]


def run_round(driver: OverHttp, seed: int, num_clients: int, num_new: int) -> Round:
    alone = [driver.run(prompts(seed + at, 1, num_new))[0] for at in range(4)]
    began_s = time.perf_counter()
    together = driver.run(prompts(seed + 100, num_clients, num_new))
    took_s = time.perf_counter() - began_s
    return Round(
        statistics.median(stream.ttft_s for stream in alone) * 1e3,
        statistics.median(_per_token_s(stream) for stream in alone) * 1e3,
        sum(stream.num_tokens for stream in together) / took_s,
    )


def _per_token_s(stream: Stream) -> float:
    return (stream.times_s[-1] - stream.times_s[0]) / max(1, stream.num_tokens - 1)


def figures_of(one: Sequence[Round], fleet: Sequence[Round], num_clients: int) -> list[Figure]:
    def median(name: str, rounds: Sequence[Round]) -> float:
        return statistics.median(getattr(found, name) for found in rounds)

    def of(name: str) -> tuple[float, float]:
        return median(name, one), median(name, fleet)

    (first, first_fleet), (token, token_fleet) = of("first_ms"), of("token_ms")
    share = statistics.median(b.tokens_per_s / a.tokens_per_s for a, b in zip(one, fleet, strict=True))
    rate, rate_fleet = of("tokens_per_s")
    return [
        Figure("added time to the first token", first_fleet - first, "ms", FIRST_MS, note=f"{first_fleet:.2f} ms, without {first:.2f}"),
        Figure("added time per token", token_fleet - token, "ms", TOKEN_MS, note=f"{token_fleet:.3f} ms, without {token:.3f}"),
        Figure(
            f"throughput, {num_clients} clients",
            share,
            "of one server",
            SHARE,
            at_least=True,
            note=f"{rate_fleet:.0f} tokens/s, {rate:.0f}",
        ),
    ]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab ray-fleet", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=str(demo.MODEL), help="the model; the built-in demo model by default")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each client")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--haproxy", action="store_true", help="let HAProxy pass the bytes in place of Ray's own proxy")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    cache = Path(os.environ.get("RELAXSERVE_CACHE", Path.home() / ".cache" / "relaxserve"))
    pool = {"models": [f"{options.model}={NAME}"], "num_cpus": 0.1}
    with served(ModelSpec(NAME, options.model)) as url, running_fleet(cache, {"replicas": pool}, 2, has_haproxy=options.haproxy) as cluster:
        drivers = [OverHttp(address, NAME, temperature=0.0) for address in (url, cluster.url)]
        rounds: list[list[Round]] = [[], []]
        for at in range(options.rounds + 1):
            for driver, found in zip(drivers, rounds, strict=True):
                found.append(run_round(driver, 1000 * (at + 1), options.clients, options.tokens))
    report(figures_of(rounds[0][1:], rounds[1][1:], options.clients), as_json=options.json)  # the first round warms up
