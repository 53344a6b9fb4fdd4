"""What clients see when other parts of a fleet than its servers are killed, fall silent, or lose their network.

Streams outlive everything behind the ingress. A stream whose ingress or proxy died ends with an error, so no client takes it for complete.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.deploy.ray.blows import Blow, num_running, struck_streams, url_of, wait_until
from tests.deploy.ray.cluster import START_S, Cluster, Node, running_fleet
from tests.deploy.ray.streams import TIMEOUT_S, comparable, require_whole, streams
from tests.network import can_cut, other_machine
from tests.process_states import is_running

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (make test-fleet installs it)"),
    pytest.mark.xdist_group("fleet"),
    pytest.mark.slow,
]

NUM_STREAMS = 32
GENERATED = re.compile(r"^vllm:generation_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)
LONG: dict[str, Any] = {"model": "demo", "prompt": "Once", "ignore_eos": True, "n": 8, "max_tokens": 900}  # takes seconds in all
POOL = {"models": ["demo"], "num_cpus": 0.1}


@pytest.fixture(scope="module")
def fleet(cache_folder: Path) -> Iterator[Cluster]:
    with running_fleet(cache_folder, {"replicas": POOL}, 2) as cluster:
        yield cluster


def generated(fleet: Cluster) -> float:
    """Return how many tokens all servers have generated since they started."""
    pages = [httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text for url in fleet.servers().values()]
    return sum(float(found) for page in pages for found in GENERATED.findall(page))


def kill(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


async def unanswered(fleet: Cluster, num: int, num_bytes: int = 0) -> list[httpx.Response]:
    """Send long requests of at least `num_bytes` bytes that are answered in one piece, and kill an ingress as soon as servers compute.
    Return the answers."""
    bodies = [json.dumps({**LONG, "seed": seed}).ljust(num_bytes) for seed in range(num)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=fleet.url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:
        headers = {"content-type": "application/json"}
        asked = [asyncio.create_task(client.post("/v1/completions", content=body, headers=headers)) for body in bodies]
        urls = [*fleet.servers().values()]

        def is_reached() -> bool:
            return any(one.done() for one in asked) or num_running(urls) >= num

        await asyncio.to_thread(wait_until, is_reached, "servers compute all requests")
        kill(fleet.ingresses()[:1])
        assert not any(one.done() for one in asked), "requests had ended before the blow"
        return await asyncio.gather(*asked)


async def broken(url: str, num: int, strike: Callable[[], None]) -> list[tuple[bytes, Exception | None]]:
    """Send long requests, and strike when each has begun. Return what arrived of each, and how it broke."""
    begun, has_struck = 0, asyncio.Event()

    async def one(client: httpx.AsyncClient, seed: int) -> tuple[bytes, Exception | None]:
        nonlocal begun
        received = b""
        try:
            async with client.stream("POST", "/v1/completions", json={**LONG, "stream": True, "seed": seed}) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for data in answer.aiter_raw():
                    begun += not received
                    received += data
                    if begun == num and not has_struck.is_set():
                        has_struck.set()
                        strike()
        except httpx.HTTPError as error:
            return received, error
        return received, None

    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None), trust_env=False) as client:
        return await asyncio.gather(*(one(client, seed) for seed in range(num)))


def first_answer(fleet: Cluster) -> list[int]:
    """Ask until there is an answer. Return the statuses."""
    statuses: list[int] = []
    end_s = time.monotonic() + START_S
    while 200 not in statuses and time.monotonic() < end_s:
        try:
            body = {"model": "demo", "prompt": "Once", "max_tokens": 2}
            statuses.append(httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=TIMEOUT_S).status_code)
        except httpx.TransportError:
            time.sleep(0.1)  # the proxy starts
    return statuses


@pytest.mark.parametrize("parts", [Cluster.ingresses, Cluster.proxies], ids=["ingress", "proxy"])
def test_what_is_in_front_dies(fleet: Cluster, parts: Callable[[Cluster], list[int]]) -> None:
    """Streams break visibly, and their replicas stop computing. The fleet answers again without help."""
    before = generated(fleet)
    found = asyncio.run(broken(fleet.url, 8, lambda: kill(parts(fleet))))
    for received, error in found:
        assert error is not None or b'"error"' in received[-1000:], received[-1000:]
    wait_until(lambda: num_running([*fleet.servers().values()]) == 0, "replicas stop computing")
    assert generated(fleet) - before < 8 * LONG["n"] * LONG["max_tokens"] / 2, "replicas computed to the end"
    assert {*first_answer(fleet)} <= {200, 503}
    assert len(fleet.servers()) == 2


def test_requests_whose_ingress_dies_are_refused(fleet: Cluster) -> None:
    """Ray's own proxy, unlike HAProxy, does not retry a request whose ingress died. It answers 500 or 503."""
    assert {answer.status_code for answer in asyncio.run(unanswered(fleet, 4))} <= {500, 503}
    assert 200 in first_answer(fleet)


@pytest.mark.parametrize("parts", [lambda fleet: [*fleet.servers()], Cluster.actors], ids=["server", "actor"])
def test_a_silent_replica_is_passed_over(fleet: Cluster, parts: Callable[[Cluster], list[int]]) -> None:
    """A stopped process keeps its connections. Ray misses its answers and replaces it, and its streams go on elsewhere."""
    fleet.wait_for(2)
    undisturbed = [comparable(one) for one in asyncio.run(streams(fleet.url, NUM_STREAMS, at_once=NUM_STREAMS))]

    struck = parts(fleet)[0]
    blow = Blow(lambda: os.kill(struck, signal.SIGSTOP))
    found = asyncio.run(struck_streams(fleet, NUM_STREAMS, blow.strike, on=[url_of(fleet, struck)], at_once=NUM_STREAMS))
    print(f"the streams ended {blow.seconds_ago():.1f} s after their replica fell silent")
    wait_until(lambda: not is_running(struck), "the silent process is killed")
    for one in found:
        require_whole(one)
    assert [comparable(one) for one in found] == undisturbed
    fleet.wait_for(2)


def test_streams_outlive_the_head(cache_folder: Path) -> None:
    """Requests do not pass through Ray's control store, so they go on without it, new ones too."""
    with running_fleet(cache_folder, {"replicas": POOL}, 2) as fleet:
        undisturbed = [comparable(one) for one in asyncio.run(streams(fleet.url, NUM_STREAMS))]
        disturbed = asyncio.run(struck_streams(fleet, NUM_STREAMS, lambda: kill(fleet.processes(b"gcs_server"))))
        for found in (disturbed, asyncio.run(streams(fleet.url, NUM_STREAMS))):
            assert [comparable(one) for one in found] == undisturbed


@pytest.mark.skipif(not can_cut(), reason="may not make a network of its own, which tests cut")
@pytest.mark.parametrize("lost", [{}, {"to_near": False}, {"to_far": False}], ids=["both directions", "requests", "answers"])
def test_streams_go_on_when_the_network_of_a_replica_is_lost(cache_folder: Path, lost: dict[str, bool]) -> None:
    pool = {"models": ["demo"], "num_cpus": 1, "settings": {"insecure": True}}
    with other_machine() as machine:
        nodes = (Node(1, {"near": 1}), Node(1, {}, machine))
        ingress = {"name": "Ingress", "ray_actor_options": {"num_cpus": 0, "resources": {"near": 0.001}}}
        with running_fleet(cache_folder, {"replicas": pool}, 2, nodes=nodes, deployments=[ingress]) as fleet:
            (lost_url,) = (url for url in fleet.servers().values() if machine.far in url)
            undisturbed = [comparable(one) for one in asyncio.run(streams(fleet.url, NUM_STREAMS))]
            blow = Blow(lambda: machine.cut(**lost))
            found = asyncio.run(struck_streams(fleet, NUM_STREAMS, blow.strike, on=[lost_url], at_once=NUM_STREAMS))
            print(f"the streams ended {blow.seconds_ago():.1f} s after their machine was lost")
            for one in found:
                require_whole(one)
            assert [comparable(one) for one in found] == undisturbed


# The fleet behind HAProxy comes last, so that no more than two fleets run at the same time.


def texts_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


@pytest.fixture(scope="module")
def balanced(cache_folder: Path) -> Iterator[Cluster]:
    """Yield a fleet with two ingresses behind HAProxy, as the manifest configures it."""
    ingresses = {"name": "Ingress", "num_replicas": 2}
    with running_fleet(cache_folder, {"replicas": POOL}, 2, deployments=[ingresses], has_haproxy=True) as cluster:
        yield cluster


def test_haproxy_gives_unanswered_requests_to_another_ingress(balanced: Cluster) -> None:
    """HAProxy sends on requests that exceed its usual buffer of 16 KiB, too."""
    num = 8  # each of two ingresses has half of them
    bodies = [{**LONG, "seed": seed} for seed in range(num)]
    undisturbed = [texts_of(httpx.post(f"{balanced.url}/v1/completions", json=body, timeout=TIMEOUT_S)) for body in bodies]
    for num_bytes in (0, 100_000):
        wait_until(lambda: balanced.num_balanced() == len(balanced.ingresses()) == 2, "HAProxy distributes requests among two ingresses")
        before = generated(balanced)
        assert [texts_of(answer) for answer in asyncio.run(unanswered(balanced, num, num_bytes))] == undisturbed
        assert generated(balanced) - before > num * LONG["n"] * LONG["max_tokens"], "no request was computed twice"


async def half_sent(fleet: Cluster, num_bytes: int) -> bytes:
    """Send the first half of a body, and wait for the answer. Return its first line."""
    parts = urlsplit(fleet.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: fleet\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % num_bytes + b" " * (num_bytes // 2))
        await writer.drain()
        return await asyncio.wait_for(reader.readline(), TIMEOUT_S)
    finally:
        writer.close()


def test_bodies_that_stall_hold_no_buffer_for_long(balanced: Cluster) -> None:
    """HAProxy refuses the body of 1,000 bytes; an ingress refuses that of 1 MiB, which exceeds HAProxy's buffer."""

    async def answers() -> list[bytes]:
        return await asyncio.gather(*(half_sent(balanced, num_bytes) for num_bytes in (1000, 1 << 20)))

    assert [line.split()[1] for line in asyncio.run(answers())] == [b"408", b"408"]
