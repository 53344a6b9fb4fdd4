"""A real fleet of two replicas whose processes are killed while they answer. No stream ends early, and all bytes are those of a server that
was left alone."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.ray.cluster import START_S, Cluster, running_fleet

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (make test-fleet installs it)"),
    pytest.mark.xdist_group("fleet"),
]

NUM_STREAMS = int(os.environ.get("FLEET_STREAMS", "200"))  # of the long test
NUM_KILLS = int(os.environ.get("FLEET_KILLS", "20"))
AT_ONCE = 16
NUM_TOKENS = 160
TIMEOUT_S = 300.0
MOST_TRIES = 20

# These fields differ between two runs of one request: ids, times, and counts of tokens that a prefix cache had.
OWN = re.compile(
    rb'(?<=")(chatcmpl|cmpl|gen|msg|resp|rs|fc|call)[-_]\w+(?=")'
    rb'|"(created|created_at|completed_at)":("[^"]*"|\d+)'
    rb'|"(total_duration|load_duration|prompt_eval_duration|eval_duration)":\d+'
    rb'|"(cached_tokens|cache_read_input_tokens|input_tokens)":\d+'
)


@pytest.fixture(scope="module")
def fleet(cache_folder: Path) -> Iterator[Cluster]:
    pool = {"models": ["demo"], "num_cpus": 0.1}
    with running_fleet(cache_folder, {"replicas": pool}, 2) as cluster:
        yield cluster


def request(at: int) -> tuple[str, dict[str, Any]]:
    """Return a request of one of the APIs. It is sampled with a seed of its own."""
    text = f"You are helper {at % 4}. " * 10 + f"Tell story {at}."
    said = [{"role": "user", "content": text}]
    sampled = {"model": "demo", "stream": True, "temperature": 0.8}
    match at % 5:
        case 0:
            return "/v1/chat/completions", {**sampled, "messages": said, "max_tokens": NUM_TOKENS, "seed": at, "ignore_eos": True}
        case 1:
            return "/v1/completions", {**sampled, "prompt": text, "max_tokens": NUM_TOKENS // 2, "seed": at, "n": 2, "ignore_eos": True}
        case 2:
            return "/v1/messages", {**sampled, "messages": said, "max_tokens": NUM_TOKENS, "temperature": 0}
        case 3:
            return "/v1/responses", {**sampled, "input": text, "max_output_tokens": NUM_TOKENS, "temperature": 0}
        case _:
            return "/api/chat", {**sampled, "messages": said, "options": {"num_predict": NUM_TOKENS, "seed": at}}


def comparable(stream: bytes) -> list[bytes]:
    """Return the events of a stream without comments, the choices one after the other."""
    events = [line for line in OWN.sub(b"", stream).split(b"\n") if line and not line.startswith(b":")]
    choice = re.compile(rb'"choices":\[\{"index":(\d+)')
    return sorted(events, key=lambda event: int(found[1]) if (found := choice.search(event)) else -1)


async def stream(client: httpx.AsyncClient, at: int) -> bytes:
    path, body = request(at)
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        return b"".join([data async for data in answer.aiter_raw()])


async def streams(url: str, num: int, at_once: int = AT_ONCE) -> list[bytes]:
    turns = asyncio.Semaphore(at_once)

    async def one(at: int) -> bytes:
        async with turns:
            return await stream(client, at)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:
        return await asyncio.gather(*(one(at) for at in range(num)))


def require_whole(found: bytes) -> None:
    ends = (b"data: [DONE]\n\n", b'"message_stop"}\n\n', b"}\n", b"}\n\n")
    assert found.endswith(ends) and b'"error":{' not in found, found[-500:]


def kill_busy(servers: dict[int, str]) -> list[int]:
    """Kill the servers that have requests. The others do not advance until it is known which ones these are."""
    for pid in servers:
        os.kill(pid, signal.SIGSTOP)
    killed: list[int] = []
    for pid, url in servers.items():
        os.kill(pid, signal.SIGCONT)
        if httpx.get(f"{url}/load", timeout=TIMEOUT_S).json()["server_load"]:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return killed


def interrupted(fleet: Cluster, at: int) -> tuple[bytes, list[int]]:
    """Return a stream, and the servers that were killed when its first bytes had arrived."""
    path, body = request(at)
    servers, received, killed = fleet.servers(), b"", list[int]()
    with httpx.stream("POST", fleet.url + path, json=body, timeout=TIMEOUT_S) as answer:
        for data in answer.iter_raw():
            if not received:
                killed = kill_busy(servers)
            received += data
    return received, killed


def test_a_stream_survives_the_death_of_its_replica(fleet: Cluster) -> None:
    undisturbed = asyncio.run(streams(fleet.url, 5))
    for at in range(5):
        killed: list[int] = []
        for _ in range(MOST_TRIES):  # a stream may end before its server could be killed
            received, killed = interrupted(fleet, at)
            require_whole(received)
            assert comparable(received) == comparable(undisturbed[at])
            if killed:
                break
        assert killed, f"{MOST_TRIES} streams had ended before their replica could be killed"
        fleet.wait_for(2)


def test_what_means_one_server_is_refused(fleet: Cluster) -> None:
    for path in ("/admin/models", "/metrics", "/v1/files", "/v1/realtime"):
        answer = httpx.get(fleet.url + path)
        assert answer.status_code == 404
        assert "means one server" in answer.json()["error"]["message"]


def test_a_response_goes_on_where_it_is_stored(fleet: Cluster) -> None:
    for at in range(4):
        first = httpx.post(f"{fleet.url}/v1/responses", json={"input": f"Story {at}", "max_output_tokens": 4}, timeout=TIMEOUT_S).json()
        again = {"input": "And then?", "max_output_tokens": 4, "previous_response_id": first["id"]}
        assert httpx.post(f"{fleet.url}/v1/responses", json=again, timeout=TIMEOUT_S).status_code == 200
        assert httpx.get(f"{fleet.url}/v1/responses/{first['id']}").json()["id"] == first["id"]


@pytest.mark.slow
def test_many_streams_survive_many_deaths(fleet: Cluster) -> None:
    rng = random.Random(0)
    undisturbed = asyncio.run(streams(fleet.url, NUM_STREAMS))

    async def kill(pids: list[int]) -> None:
        while len(pids) < NUM_KILLS:
            await asyncio.sleep(rng.uniform(0.5, 2.0))
            ready = await asyncio.to_thread(fleet.servers)
            if len(ready) > 1:
                pids.append(rng.choice([*ready, *fleet.actors()]))
                os.kill(pids[-1], signal.SIGKILL)

    async def disturbed() -> tuple[list[list[bytes]], int]:
        killed: list[int] = []
        killing = asyncio.create_task(kill(killed))
        rounds = [await streams(fleet.url, NUM_STREAMS)]
        while len(killed) < NUM_KILLS:
            rounds.append(await streams(fleet.url, NUM_STREAMS))
        await killing
        return rounds, len(killed)

    began_s = time.monotonic()
    rounds, num_killed = asyncio.run(disturbed())
    print(f"{len(rounds)} x {NUM_STREAMS} streams, {num_killed} SIGKILLs, {time.monotonic() - began_s:.0f} s")
    for found in rounds:
        for one in found:
            require_whole(one)
        assert [comparable(one) for one in found] == [comparable(one) for one in undisturbed]


@pytest.mark.slow
def test_a_fleet_grows_with_its_load_and_is_upgraded_without_an_interruption(cache_folder: Path) -> None:
    pool = {"models": ["demo"], "num_cpus": 0.1, "min_replicas": 1, "max_replicas": 2}
    with running_fleet(cache_folder, {"replicas": pool}, 1) as cluster:
        undisturbed = asyncio.run(streams(cluster.url, 40))

        async def until(happened: Callable[[], bool]) -> None:
            """Send requests until something has happened; no stream may notice."""
            waiting = asyncio.create_task(asyncio.to_thread(wait_for, happened))
            while not waiting.done():
                found = await streams(cluster.url, 40, at_once=40)
                assert [comparable(one) for one in found] == [comparable(one) for one in undisturbed]
            await waiting

        asyncio.run(until(lambda: len(cluster.servers()) == 2))
        before = {*cluster.servers()}
        cluster.upgrade(heartbeat_s=5.0)
        asyncio.run(until(lambda: not before & {*cluster.servers()} and len(cluster.servers()) == 2))


def wait_for(happened: Callable[[], bool]) -> None:
    end_s = time.monotonic() + START_S
    while not happened():
        assert time.monotonic() < end_s
        time.sleep(0.5)
