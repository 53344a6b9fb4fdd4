"""A replica that spans two nodes of Ray computes the bytes of one process, and goes on when a stage is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray", reason="needs Ray (make test-fleet installs it)")

from deploy.ray.process import ServerProcess, StagePlaces
from deploy.ray.stage_hosts import StageProcess
from tests.deploy.ray.cluster import Cluster, Node, running_fleet
from tests.deploy.ray.streams import comparable, require_whole, streams
from tests.process_states import is_running

pytestmark = pytest.mark.xdist_group("fleet")

SECRET = "a secret of some length"
NUM_STREAMS = 20


def undisturbed(num: int) -> list[list[bytes]]:
    """Return the streams of a server that computes all layers itself."""
    server = ServerProcess(["demo"], {}, address="127.0.0.1", num_threads=1)
    try:
        server.wait_until_ready()
        return [comparable(one) for one in asyncio.run(streams(server.url, num))]
    finally:
        server.stop()


def test_a_server_finds_the_stages_of_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAXSERVE_STAGE_SECRET_FILE", "/nowhere")  # of the cluster, whose stages have another secret
    stage = StageProcess(SECRET, "127.0.0.1", 0, 1)
    server = ServerProcess(["demo"], {}, address="127.0.0.1", num_threads=1, stages=StagePlaces((stage.place,), SECRET))
    try:
        server.wait_until_ready()
        assert len([comparable(one) for one in asyncio.run(streams(server.url, 2))]) == 2
        assert SECRET not in repr(StagePlaces((stage.place,), SECRET))
    finally:
        server.stop()
        os.kill(stage.pid, signal.SIGKILL)
        stage.wait()
    again = StageProcess(SECRET, "127.0.0.1", int(stage.place.rpartition(":")[2]), 1)
    assert again.place == stage.place
    os.kill(again.pid, signal.SIGKILL)
    again.wait()


def test_a_stage_that_cannot_listen_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1 port"):
        StageProcess(SECRET, "127.0.0.1", taken.getsockname()[1], 1)


@pytest.fixture(scope="module")
def fleet(cache_folder: Path) -> Iterator[Cluster]:
    pool = {"models": ["demo"], "num_cpus": 0.1, "num_stages": 2, "min_replicas": 1, "max_replicas": 1}
    with running_fleet(cache_folder, {"replicas": pool}, 1, nodes=(Node(1), Node(1))) as cluster:
        yield cluster


@pytest.mark.slow
def test_a_replica_on_two_nodes_computes_the_bytes_of_one_process(fleet: Cluster) -> None:
    assert len(fleet.processes(b"ray::StageHost")) == 1
    found = asyncio.run(streams(fleet.url, NUM_STREAMS))
    assert [comparable(one) for one in found] == undisturbed(NUM_STREAMS)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(b"ray::StageHost",), (b"deploy.cli", b"stage", b"--listen"), (b"deploy.stages.process",)])
def test_streams_go_on_when_a_stage_is_killed(fleet: Cluster, words: tuple[bytes, ...]) -> None:
    """The actor, its host, and the process that computes."""
    before = fleet.servers()
    (url,) = before.values()

    def resubmitted() -> int:
        return httpx.get(f"{url}/admin/models/demo", timeout=60).json()["resubmitted"]

    num_before = resubmitted()

    async def disturbed() -> list[bytes]:
        running = asyncio.create_task(streams(fleet.url, NUM_STREAMS, at_once=NUM_STREAMS))
        (struck,) = fleet.processes(*words)
        await asyncio.sleep(0.3)
        os.kill(struck, signal.SIGKILL)
        found = await running
        assert not is_running(struck)
        return found

    found = asyncio.run(disturbed())
    for one in found:
        require_whole(one)
    assert [comparable(one) for one in found] == undisturbed(NUM_STREAMS)
    assert resubmitted() > num_before, "the stage was killed too late"
    assert fleet.servers() == before, "the server was not replaced: it has reached the stage again"
