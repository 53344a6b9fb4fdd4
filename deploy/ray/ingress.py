"""The ingress: takes requests of all APIs, and chooses a replica for each.

It chooses from what replicas report. While it knows of none that it could choose, it asks Ray for a lease, and Ray waits for a replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from functools import partial
from urllib.parse import quote

import aiohttp
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from deploy.ray.directory import directory_of
from deploy.ray.options import prefill_name
from deploy.ray.passage import Passage, refusal
from deploy.ray.prefill import Prefill
from deploy.ray.wish import BodyTooLarge, BodyTooLate, Lease, Wish, read, receive
from deploy.replicas.session import new_session

log = logging.getLogger(__name__)

LEASE_S = 10.0
MOST_REQUESTS = 100_000  # the servers refuse what is too much, and say when to come back
PATH_CHARACTERS = "/:@!$&'()*+,;=~"

# Paths that mean one server, not the fleet.
OF_ONE_SERVER = ("/admin", "/internal", "/metrics", "/load", "/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/realtime")


class Ingress:
    def __init__(
        self,
        pools: dict[str, DeploymentHandle],
        models: dict[str, str],
        patience_s: float,
        sharing: Collection[str] = (),
        prefill: Mapping[str, tuple[DeploymentHandle, int]] | None = None,
    ) -> None:
        """`models` says which pool serves which model. The first pool serves requests that name none of them. The replicas of pools in
        `sharing` give each other pages. `prefill` has, for some pools, the deployment of the replicas that compute long prompts, and the
        least number of characters of such a prompt."""
        self._pools = {name: pool.options(method_name="lease") for name, pool in pools.items()}
        self._sharing = frozenset(sharing)
        self._prefill = {
            name: Prefill(directory_of(prefill_name(name)), partial(_leased, handle.options(method_name="lease")), least)
            for name, (handle, least) in (prefill or {}).items()
        }
        self._models = models
        self._patience_s = patience_s
        self._client: aiohttp.ClientSession | None = None

    async def __call__(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if any(path == own or path.startswith(f"{own}/") for own in OF_ONE_SERVER):
            text = f"{path} means one server, and this address is that of a fleet; use the address of the server"
            return refusal(404, "not_found", text)
        try:
            body, is_quick = await receive(request.stream())
        except BodyTooLarge as error:
            return refusal(413, "body_too_large", str(error))
        except BodyTooLate as error:
            return refusal(408, "request_timeout", str(error))
        reading = read(request.method, path, request.headers, body, is_quick=is_quick)
        name = self._models.get(reading.model, next(iter(self._pools)))
        pool, directory, prefill = self._pools[name], directory_of(name), self._prefill.get(name)
        target = quote(path, safe=PATH_CHARACTERS) + (f"?{request.url.query}" if request.url.query else "")

        async def borrow(wish: Wish) -> Lease | None:
            lease = directory.choose(wish, shares=name in self._sharing)
            if lease is None:
                return await _leased(pool, wish)
            return prefill.added(lease, wish) if prefill is not None else lease

        client, headers = self._session(), request.headers
        return Passage(client, borrow, directory.requests, request.method, target, headers, body, reading, self._patience_s)

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:  # it belongs to the event loop of the requests
            self._client = new_session()
        return self._client


async def _leased(lease: DeploymentHandle, wish: Wish) -> Lease | None:
    asked = lease.remote(wish)
    try:
        async with asyncio.timeout(LEASE_S):
            return await asked
    except TimeoutError:
        asked.cancel()
    except (RayError, RayServeException) as error:
        log.warning("a lease failed: %s", type(error).__name__)
    return None


# Ray's server, this code and Ray's router share one thread, because each step from one thread to another costs each token 10 us.
ONE_THREAD = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}

INGRESS = serve.deployment(
    max_ongoing_requests=MOST_REQUESTS,
    ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": ONE_THREAD}},
    logging_config={"enable_access_log": False},
)(Ingress)
