"""A replica that spans two nodes of Ray computes the bytes of one process, and goes on when a stage is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray", reason="needs Ray (make test-fleet installs it)")

from tests.deploy.ray.blows import struck_streams
from tests.deploy.ray.cluster import Cluster, Node, running_fleet
from tests.deploy.ray.streams import comparable, require_whole, streams, undisturbed
from tests.process_states import is_running

pytestmark = pytest.mark.xdist_group("fleet")

NUM_STREAMS = 20


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
    """Killed are, in three cases, the actor of the stage, its host, and the process that computes."""
    before = fleet.servers()
    (url,) = before.values()

    def resubmitted() -> int:
        return httpx.get(f"{url}/admin/models/demo", timeout=60).json()["resubmitted"]

    num_before = resubmitted()

    (struck,) = fleet.processes(*words)
    found = asyncio.run(struck_streams(fleet, NUM_STREAMS, lambda: os.kill(struck, signal.SIGKILL), at_once=NUM_STREAMS))
    assert not is_running(struck)
    for one in found:
        require_whole(one)
    assert [comparable(one) for one in found] == undisturbed(NUM_STREAMS)
    assert resubmitted() > num_before, "the stage was killed too late"
    assert fleet.servers() == before, "the server was not replaced: it has reached the stage again"
