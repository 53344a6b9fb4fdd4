"""The machines that compute the early stages of a replica's models: on each an actor, which owns a process `relaxserve stage`.

Ray reserves a bundle for each stage of a replica, on as many machines. The replica itself, whose workers are the last stages, has the first
bundle. A stage process ends with its actor, and the actor with its process; Ray then starts the actor again. The replica's
next health check lets it listen at the same address, so the server reaches it again and its requests go on.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.ray.process import StagePlaces
from deploy.ray.stage_process import StageProcess

SECRET_BYTES = 32


class StageHost:
    """The actor."""

    def __init__(self, secret: str, num_threads: int) -> None:
        self._secret = secret
        self._num_threads = num_threads
        self._process: StageProcess | None = None

    def listen(self, port: int) -> str:
        """Start the process unless it runs. Return its place: a host and a port."""
        if self._process is None:
            self._process = StageProcess(self._secret, ray.util.get_node_ip_address(), port, self._num_threads)
            threading.Thread(target=self._watch, args=(self._process,), name="stage-watch", daemon=True).start()
        return self._process.place

    def _watch(self, process: StageProcess) -> None:
        process.wait()
        os._exit(1)


class StageHosts:
    """The actors for all early stages of one replica. They end with it."""

    def __init__(self, num_early: int, num_threads: int) -> None:
        """Start them in the bundles after the first of the placement group of this replica, and wait until they listen."""
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
        """Make sure that all listen where they did. Raise OSError if one does not, since it is on another machine now."""
        places = self.places.early
        ports = [int(place.rpartition(":")[2]) for place in places]
        found = await asyncio.gather(*(host.listen.remote(port) for host, port in zip(self._hosts, ports, strict=True)))
        if tuple(found) != places:
            raise OSError(f"the stages of this replica are at {', '.join(found)} now, and were at {', '.join(places)}")
