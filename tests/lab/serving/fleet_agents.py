"""`python -m tests.lab fleet-agents`: how many prompt tokens of agent sessions a fleet of small replicas finds in its prefix caches.

A session has about twelve requests. The first begins with one of four system prompts; each later one begins with the prompt of the request
before. The same trace is sent

    to one server       whose cache has as many pages as those of all replicas together
    to the fleet        whose router sends a request to the replica that has most of its prompt
    to the replicas     in turn (round robin), without the router

A figure is the share of prompt tokens that a prefix cache had. It is a quotient of counts, so it depends little on how busy the machine is.
`--faster` divides the times between requests, because a small model computes fast.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deploy import demo
from deploy.bench.fleet.traces import Arrival, Shape, sessions
from deploy.bench.measure import Figure, report
from deploy.served import served
from deploy.settings import num_bytes
from server.models.state import ModelSpec
from tests.deploy.ray.cluster import running_fleet
from tests.lab.serving.played import Answered, play, salted

NAME = "bench"
LEAST_SHARE = 0.9  # goal for the hits of the fleet, relative to those of one large replica


def trace_of(shape: Shape, most: int, faster: float) -> list[Arrival]:
    """Return the requests of which prompt and answer have at most `most` tokens together. Real answers differ from those of the trace, so
    answers add no keys of a prefix cache (`keys_after`)."""
    made = [one for one in sessions(shape) if one.num_prompt + one.num_new <= most]
    return [replace(one, at_s=one.at_s / faster, keys_after=()) for one in made]


def hits(trace: Sequence[Arrival], answers: Sequence[Answered]) -> float:
    return sum(answer.num_cached for answer in answers) / sum(arrival.num_prompt for arrival in trace)


def figures_of(one: float, routed: float, in_turn: float, num_replicas: int, trace: Sequence[Arrival]) -> list[Figure]:
    num_sessions, num_tokens = len({arrival.session for arrival in trace}), sum(arrival.num_prompt for arrival in trace)
    return [
        Figure("requests", len(trace), "", note=f"{num_sessions} sessions, {num_tokens:,} prompt tokens"),
        Figure("prefix hits of one large replica", one, "of prompt tokens"),
        Figure(
            f"hits of {num_replicas} replicas behind the router",
            routed / one,
            "of one large replica's",
            LEAST_SHARE,
            at_least=True,
            note=f"{routed:.3f} of prompt tokens",
        ),
        Figure(f"hits of {num_replicas} replicas in turn", in_turn / one, "of one large replica's", note=f"{in_turn:.3f} of prompt tokens"),
    ]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab fleet-agents", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=str(demo.MODEL), help="the model; the built-in demo model by default")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--cache", default="8M", help="bytes of the KV cache of each replica, such as 8M")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second before --faster")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--prompt", type=int, default=40, help="tokens that each request adds, on average")
    parser.add_argument("--new", type=int, default=12)
    parser.add_argument("--most", type=int, default=1000, help="tokens of a prompt and its answer; longer requests are left out")
    parser.add_argument("--faster", type=float, default=5.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    cache = Path(os.environ.get("RELAXSERVE_CACHE", Path.home() / ".cache" / "relaxserve"))
    size = num_bytes(options.cache)
    trace = trace_of(Shape(options.rate, options.seconds, options.prompt, options.new, seed=1), options.most, options.faster)
    with served(ModelSpec(NAME, options.model, kv_cache_bytes=options.replicas * size)) as url:
        one = hits(trace, play(url, NAME, trace)[0])
    bounds = {"min_replicas": options.replicas, "max_replicas": options.replicas}
    pool = {"models": [{"source": options.model, "name": NAME, "kv_cache_bytes": size}], "num_cpus": 0.1, **bounds}
    with running_fleet(cache, {"replicas": pool}, options.replicas) as cluster:
        routed = hits(trace, play(cluster.url, NAME, trace)[0])
        other = salted(trace, 1)
        first, *others = cluster.servers().values()
        in_turn = hits(other, play(first, NAME, other, *others)[0])
    report(figures_of(one, routed, in_turn, options.replicas, trace), as_json=options.json)
