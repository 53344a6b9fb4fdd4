"""A real fleet of two replicas whose processes are killed while they answer. No stream ends early, and all bytes are those of a server that
was left alone."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from deploy.ray.lists import LISTS
from tests.deploy.ray.cluster import START_S, Cluster, running_fleet
from tests.deploy.ray.streams import TIMEOUT_S, comparable, request, require_whole, streams

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray (make test-fleet installs it)"),
    pytest.mark.xdist_group("fleet"),
]

NUM_STREAMS = int(os.environ.get("FLEET_STREAMS", "200"))  # of the long test
NUM_KILLS = int(os.environ.get("FLEET_KILLS", "20"))
MOST_TRIES = 20
RESPONSE_AT = 3  # number of a request of /v1/responses
START_LOOK_S = 3.0  # time after which Ray has begun to start a replica that a request waits for


@pytest.fixture(scope="module")
def fleet(cache_folder: Path) -> Iterator[Cluster]:
    pool = {"models": ["demo"], "num_cpus": 0.1}
    spare = {"models": ["demo=spare"], "num_cpus": 0.1, "min_replicas": 0, "max_replicas": 1}
    with running_fleet(cache_folder, {"replicas": pool, "spare": spare}, 2) as cluster:
        yield cluster


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


def test_a_response_is_found_where_its_stream_ends(fleet: Cluster) -> None:
    killed: list[int] = []
    for _ in range(MOST_TRIES):
        received, killed = interrupted(fleet, RESPONSE_AT)
        found = re.search(rb'"id":"(resp_\w+)"', received)
        assert found is not None
        response = found[1].decode()
        fleet.wait_for(2)  # the new replica has no response
        answer = httpx.get(f"{fleet.url}/v1/responses/{response}", timeout=TIMEOUT_S)
        assert (answer.status_code, answer.json().get("id")) == (200, response)
        if killed:
            break
    assert killed, f"{MOST_TRIES} streams had ended before their replica could be killed"


def test_what_means_one_server_is_refused(fleet: Cluster) -> None:
    for path in ("/admin/models", "/metrics", "/v1/files", "/v1/realtime", "/sleep"):
        answer = httpx.get(fleet.url + path)
        assert answer.status_code == 404
        assert "means one server" in answer.json()["error"]["message"]
    with connect(f"{fleet.url.replace('http', 'ws')}/v1/realtime?model=demo", subprotocols=[Subprotocol("realtime")]) as socket:
        assert json.loads(socket.recv())["error"]["code"] == "one_server"
        with pytest.raises(ConnectionClosedError, match="means one server"):
            socket.recv()


def test_answers_have_one_id(fleet: Cluster) -> None:
    """Ray gives each request an id, which the log of the server has, too."""
    assert httpx.get(f"{fleet.url}/v1/models", headers={"x-request-id": "mine"}).headers.get_list("x-request-id") == ["mine"]
    (made,) = httpx.get(f"{fleet.url}/v1/models").headers.get_list("x-request-id")
    assert made


def test_servers_hear_by_which_name_they_are_asked(fleet: Cluster) -> None:
    """Servers without keys answer to their own names only: a page of another site must not reach them, and their own pages must."""
    other = httpx.get(f"{fleet.url}/v1/models", headers={"host": "evil.example"})
    assert (other.status_code, other.json()["error"]["code"]) == (403, "host_not_allowed")
    body = {"model": "demo", "prompt": "Once", "max_tokens": 1}
    assert httpx.post(f"{fleet.url}/v1/completions", json=body, headers={"origin": fleet.url}, timeout=TIMEOUT_S).status_code == 200


def test_a_response_goes_on_where_it_is_stored(fleet: Cluster) -> None:
    for at in range(4):
        first = httpx.post(f"{fleet.url}/v1/responses", json={"input": f"Story {at}", "max_output_tokens": 4}, timeout=TIMEOUT_S).json()
        again = {"input": "And then?", "max_output_tokens": 4, "previous_response_id": first["id"]}
        assert httpx.post(f"{fleet.url}/v1/responses", json=again, timeout=TIMEOUT_S).status_code == 200
        assert httpx.get(f"{fleet.url}/v1/responses/{first['id']}").json()["id"] == first["id"]


def test_a_pool_without_replicas_is_not_started_for_lists_and_stored_responses(fleet: Cluster) -> None:
    for path, entries in LISTS.items():
        answer = httpx.get(fleet.url + path, timeout=TIMEOUT_S)
        assert [entry.get("id", entry.get("name")).partition(":")[0] for entry in answer.json()[entries]] == ["demo"]
    lost = httpx.get(f"{fleet.url}/v1/responses/resp_{'0' * 32}", timeout=TIMEOUT_S)
    assert lost.status_code == 404
    time.sleep(START_LOOK_S)
    assert fleet.processes(b"ray::ServeReplica", b":spare") == []


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
