"""Run the early stages of a replica's models on other machines: on each, an actor owns a process `relaxserve stage`.

Ray reserves a bundle for each stage of a replica, each on another machine. The first bundle is for the replica itself; the workers of its
server are the last stages. If a stage process ends, its actor ends too, and vice versa; then Ray restarts the actor. The replica's next
health check tells the actor to listen at the same address. So the server reaches the stage again, and continues its requests.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.ray.stage_process import StageProcess
from deploy.replicas.process import StagePlaces

SECRET_BYTES = 32


class StageHost:
    """The actor on a machine of early stages. It ends when its stage process ends."""

    def __init__(self, secret: str, num_threads: int) -> None:
        self._secret = secret
        self._num_threads = num_threads
        self._process: StageProcess | None = None

    def listen(self, port: int) -> str:
        """Start the stage process, unless it runs already. It listens on `port`, or on any port if `port` is 0. Return its address: a host
        and a port."""
        if self._process is None:
            self._process = StageProcess(self._secret, ray.util.get_node_ip_address(), port, self._num_threads)
            threading.Thread(target=self._watch, args=(self._process,), name="stage-watch", daemon=True).start()
        return self._process.place

    def _watch(self, process: StageProcess) -> None:
        process.wait()
        os._exit(1)


class StageHosts:
    """The actors for all early stages of one replica. They end with the replica."""

    def __init__(self, num_early: int, num_threads: int) -> None:
        """Start the actors, one in each bundle of the replica's placement group but the first, and wait until they listen."""
        secret = secrets.token_hex(SECRET_BYTES)
        group = ray.util.get_current_placement_group()
        assert group is not None, "a replica with stages has a placement group"
        kind = ray.remote(StageHost)
        self._hosts: list[Any] = [
            kind.options(
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            ).remote(secret, num_threads)
            for number in range(1, num_early + 1)
        ]
        places = ray.get([host.listen.remote(0) for host in self._hosts])
        self.places = StagePlaces(tuple(places), secret)

    async def check(self) -> None:
        """Let all stages listen at their old addresses. Raise OSError if a stage has another address now, because its actor is on another
        machine."""
        places = self.places.early
        ports = [int(place.rpartition(":")[2]) for place in places]
        found = await asyncio.gather(*(host.listen.remote(port) for host, port in zip(self._hosts, ports, strict=True)))
        if tuple(found) != places:
            raise OSError(f"the stages of this replica are at {', '.join(found)} now, and were at {', '.join(places)}")
