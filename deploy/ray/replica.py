"""A replica: an actor that owns one server process, watches it, and lends it to the ingress."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from deploy.ray.cache_watch import CacheWatch, follow
from deploy.ray.scaling import PAGES, REQUESTS
from deploy.ray.stage_hosts import StageHosts
from deploy.ray.wish import Lease, Wish
from deploy.replicas.process import ServerProcess

STATS_S = 2.0  # interval at which a replica reports its load and its cache to routers
ROUTER: dict[str, Any] = {"request_router_class": "deploy.ray.router.PrefixRouter", "request_routing_stats_period_s": STATS_S}
MOST_LEASES = 100_000  # more than a server accepts, because only a server can refuse a request and say when to send it again


class Replica:
    """The actor of one replica."""

    def __init__(
        self, models: list[str | dict[str, Any]], settings: dict[str, Any], num_threads: int | None = None, num_stages: int = 1
    ) -> None:
        """Start the server. If `num_stages` is not 1, first start the early stages, all but the last, on other machines. Wait until the
        server is ready."""
        self._name = serve.get_replica_context().replica_id.unique_id
        self._stages = StageHosts(num_stages - 1, num_threads or 1) if num_stages > 1 else None
        places = None if self._stages is None else self._stages.places
        self._server = ServerProcess(models, settings, address=ray.util.get_node_ip_address(), num_threads=num_threads, stages=places)
        self._cache = CacheWatch()
        self._server.wait_until_ready()
        follow(self._cache, self._server.events)
        self._lease = Lease(self._name, self._server.url, self._server.key)
        self._stops = False
        self._num_reports = 0
        threading.Thread(target=self._watch, name="server-watch", daemon=True).start()

    async def lease(self, wish: Wish) -> Lease:
        """Return where the server is. Only the router reads the wish."""
        del wish
        return self._lease

    async def check_health(self) -> None:
        """Raise an error if the server does not answer, or a stage has another address than before; Ray then replaces this replica."""
        await asyncio.to_thread(self._server.require_answer)
        if self._stages is not None:
            await self._stages.check()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the report of this replica for Ray's routers, which pass it to the directory of the pool."""
        lease = self._lease
        self._num_reports += 1  # so that the directory does not take a report for the previous one
        found = {"number": self._num_reports, "num_requests": await self._num_requests(), "kept_s": self._cache.kept_s()}
        return {**found, "url": lease.url, "key": lease.key}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics that the policy of autoscaling reads (`scaling.py`)."""
        return {REQUESTS: await self._num_requests(), PAGES: await asyncio.to_thread(self._server.pages_share)}

    async def server_pid(self) -> int:
        """Return the process id of the server, for tests that kill it."""
        return self._server.pid

    async def _num_requests(self) -> int:
        return await asyncio.to_thread(self._server.num_requests)

    def _watch(self) -> None:
        """End this process as soon as the server has ended, so that Ray routes nothing here and starts another replica."""
        self._server.wait()
        if not self._stops:
            self._server.clean()
            os._exit(1)

    def __del__(self) -> None:
        """Let running requests end, then stop the server. Ray calls this before it ends the replica, once no router chooses the replica any
        more."""
        if hasattr(self, "_stops"):
            self._stops = True
            self._server.stop()


REPLICA = serve.deployment(
    max_ongoing_requests=MOST_LEASES,
    logging_config={"enable_access_log": False},  # the servers write a line for each request
    health_check_period_s=2,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=60,
    request_router_config=RequestRouterConfig(**ROUTER),
)(Replica)
