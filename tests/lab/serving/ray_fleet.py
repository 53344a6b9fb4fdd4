"""`python -m tests.lab ray-fleet`: what a fleet of two replicas on Ray Serve costs, beside one server on the same cores.

    one client     time to the first token, and time per token: through the fleet, and from the servers of its replicas directly. So the
                   difference is the way through the fleet: HAProxy or Ray's proxy, and the ingress
    N clients      tokens per second of the fleet, as a share of those of one server

One server with all cores answers one client sooner than a replica with a part of them. That difference is printed separately. All three
run in turns, and each figure is a median of the rounds. They get the same prompts, each with a cache salt of its own, so that none finds
what another has cached: the first token of some prompts has no text, and their first event arrives one token later. The whole fleet is on
this machine: Ray's own processes, proxy, ingress and two replicas share the cores that the one server has for itself.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy import demo
from deploy.bench.measure import Figure, report
from deploy.bench.serving.drive import Driver
from deploy.served import served
from deploy.streams import OverHttp, Prompt, Stream
from server.models.state import ModelSpec
from tests.deploy.ray.cluster import running_fleet

NAME = "bench"
PROMPT_TOKENS = 64
VOCAB = 200  # ids that every model has
LEAST_TOKENS = 8  # of a client: the time per token needs some after the first event
FIRST_MS, TOKEN_MS, SHARE = 3.0, 0.2, 0.95
NUM_ALONE = 8  # prompts of one client in a round


@dataclass(frozen=True, slots=True)
class Alone:
    """Medians of the times that one client measures at one target."""

    first_ms: float
    token_ms: float


@dataclass(frozen=True, slots=True)
class Round:
    server: Alone  # with all cores
    replica: Alone  # the servers of the fleet's replicas, asked directly and in turn
    fleet: Alone  # the fleet, asked through its proxy and ingress
    server_rate: float  # tokens per second of all clients
    fleet_rate: float


def prompts(seed: str, count: int, num_new: int) -> list[Prompt]:
    """Return `count` random prompts. No two begin alike, also among different seeds, so a prefix cache has none of their tokens."""
    return [Prompt(tuple(random.Random(f"{seed} {at}").choices(range(3, VOCAB), k=PROMPT_TOKENS)), num_new) for at in range(count)]


def run_round(server: Driver, replicas: Sequence[Driver], fleet: Driver, number: int, num_clients: int, num_new: int) -> Round:
    streams: list[list[Stream]] = [[], [], []]
    for at in range(NUM_ALONE):
        targets = server, replicas[at % len(replicas)], fleet
        prompt = prompts(f"{number} alone {at}", 1, num_new)
        for driver, found in zip(targets, streams, strict=True):
            found += driver.run(prompt)
    together = prompts(f"{number} together", num_clients, num_new)
    rates = [_rate(driver, together) for driver in (server, fleet)]
    return Round(_alone(streams[0]), _alone(streams[1]), _alone(streams[2]), server_rate=rates[0], fleet_rate=rates[1])


def _alone(streams: Sequence[Stream]) -> Alone:
    """Return the medians. A stream whose only event has all its tokens says nothing about the time per token."""
    tokens_s = [1 / one.decoding_rate for one in streams if len(one.times_s) > 1] or [math.nan]
    return Alone(*(statistics.median(found) * 1e3 for found in ([one.ttft_s for one in streams], tokens_s)))


def _rate(driver: Driver, together: Sequence[Prompt]) -> float:
    began_s = time.perf_counter()
    streams = driver.run(together)
    return sum(stream.num_tokens for stream in streams) / (time.perf_counter() - began_s)


def figures_of(rounds: Sequence[Round], num_clients: int) -> list[Figure]:
    median = statistics.median

    def added(name: str, before: str) -> tuple[float, str]:
        pairs = [(getattr(one.fleet, name), getattr(getattr(one, before), name)) for one in rounds]
        return median(a - b for a, b in pairs), f"{median(a for a, _ in pairs):.3f} ms, without {median(b for _, b in pairs):.3f}"

    first, token, beside = added("first_ms", "replica"), added("token_ms", "replica"), added("first_ms", "server")
    rates = median(one.fleet_rate for one in rounds), median(one.server_rate for one in rounds)
    return [
        Figure("added time to the first token", first[0], "ms", FIRST_MS, note=first[1]),
        Figure("added time per token", token[0], "ms", TOKEN_MS, note=token[1]),
        Figure("first token beside a server with all cores", beside[0], "ms", note=beside[1]),
        Figure(
            f"throughput, {num_clients} clients",
            median(one.fleet_rate / one.server_rate for one in rounds),
            "of one server",
            SHARE,
            at_least=True,
            note=f"{rates[0]:.0f} tokens/s, {rates[1]:.0f}",
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
    if options.tokens < LEAST_TOKENS:
        parser.error(f"--tokens is {options.tokens}, expected at least {LEAST_TOKENS}")
    cache = Path(os.environ.get("RELAXSERVE_CACHE", Path.home() / ".cache" / "relaxserve"))
    pool = {"models": [f"{options.model}={NAME}"], "num_cpus": 0.1}
    with served(ModelSpec(NAME, options.model)) as url, running_fleet(cache, {"replicas": pool}, 2, has_haproxy=options.haproxy) as cluster:
        urls = url, cluster.url, *cluster.servers().values()
        server, fleet, *replicas = (OverHttp(one, NAME, temperature=0.0, cache_salt=one) for one in urls)
        rounds = [run_round(server, replicas, fleet, number, options.clients, options.tokens) for number in range(options.rounds + 1)]
    report(figures_of(rounds[1:], options.clients), as_json=options.json)  # the first round warms up
