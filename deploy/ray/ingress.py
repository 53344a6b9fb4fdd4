"""The ingress: takes requests of all APIs, and chooses a replica for each. It refuses paths that mean one server, and merges the lists of
models of several pools.

The ingress chooses by what replicas report. While no replica that has reported can be chosen, the ingress asks Ray for a lease, the address
of a replica's server, and Ray waits until there is a replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from urllib.parse import quote

import aiohttp
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from deploy.ray.body import receive
from deploy.ray.destination import means_one_server, pool_of
from deploy.ray.directory import directory_of
from deploy.ray.entrance import entrance
from deploy.ray.lists import LISTS, ModelLists
from deploy.ray.options import prefill_name
from deploy.ray.passage import Passage
from deploy.ray.prefill import Prefill
from deploy.ray.refusal import refusal
from deploy.ray.wish import Lease, Reading, Wish, read
from deploy.replicas.session import new_session
from server.errors import ONE_SERVER, ApiError

log = logging.getLogger(__name__)

LEASE_S = 10.0  # longest wait for a lease from Ray
MEET_S = 2.0  # longest wait for a lease that is asked for only so that Ray names the replicas of a pool
MOST_REQUESTS = 100_000  # more than servers accept, because only a server can refuse a request and say when to send it again
PATH_CHARACTERS = "/:@!$&'()*+,;=~"
QUERY_CHARACTERS = "".join(map(chr, range(0x21, 0x7F)))  # a query is already percent-encoded, except bytes that are not ASCII


class Ingress:
    """The actor that answers the requests of a fleet. A fleet may have several such actors."""

    def __init__(
        self,
        pools: dict[str, DeploymentHandle],
        models: dict[str, str],
        patience_s: float,
        sharing: Collection[str] = (),
        prefill: Mapping[str, tuple[DeploymentHandle, int]] | None = None,
    ) -> None:
        """`models` says which pool serves which model. A request that names none of these models goes to the pool with the replica that
        stores the response that it names, otherwise to the first pool. `patience_s` is the longest time that a request waits for a replica
        that serves it. The replicas of pools in `sharing` give each other pages. `prefill` has, for some pools, the deployment of the
        replicas that compute long prompts, and the least number of new characters for which they compute a prompt: characters that no
        replica of the pool has in its prefix cache."""
        self._pools = {name: pool.options(method_name="lease") for name, pool in pools.items()}
        self._sharing = frozenset(sharing)
        self._prefill = {
            name: Prefill(directory_of(prefill_name(name)), partial(_leased, handle.options(method_name="lease")), least)
            for name, (handle, least) in (prefill or {}).items()
        }
        self._models = models
        self._patience_s = patience_s
        self._client: aiohttp.ClientSession | None = None

    async def answer(self, request: Request) -> Response:
        """Return the ASGI response to a request: a refusal, or what a replica answers."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if means_one_server(path):
            text = f"{path} means one server, and this address is that of a fleet; use the address of the server"
            return refusal(path, ApiError(ONE_SERVER, text))
        try:
            body = await receive(request.stream(), request.headers)
        except ApiError as error:
            return refusal(path, error)
        query = quote(request.scope["query_string"], safe=QUERY_CHARACTERS)
        reading = self._located(read(request.method, path, request.headers, body, query))
        target = quote(path, safe=PATH_CHARACTERS) + (f"?{query}" if query else "")

        def passage(name: str) -> Passage:
            borrow, directory = partial(self._borrow, name), directory_of(name)
            given = request.method, target, request.headers, body.content, reading
            return Passage(self._session(), borrow, directory.requests, *given, self._patience_s, directory.move)

        if request.method == "GET" and path in LISTS and len(self._pools) > 1:
            await self._meet()
            return ModelLists(path, {name: None if directory_of(name).is_empty else passage(name) for name in self._pools})
        return passage(await self._pool_of(reading))

    def _located(self, reading: Reading) -> Reading:
        """If the stored response has moved to another replica, return a reading that wants this replica, else `reading`."""
        places = (directory_of(name).place_of_moved(reading.stored) for name in self._pools)
        place = next((place for place in places if place is not None), None)
        return reading if place is None else replace(reading, wish=replace(reading.wish, place=place))

    async def _pool_of(self, reading: Reading) -> str:
        """Return the name of the pool that serves the named model, or has the replica that stores the named response, or is the first."""
        name, place = pool_of(reading.model, self._models), reading.wish.place
        if name is None and place and len(self._pools) > 1:
            name = self._pool_with(place)
            if name is None:
                await self._meet()
                name = self._pool_with(place)
        return next(iter(self._pools)) if name is None else name

    def _pool_with(self, place: bytes) -> str | None:
        return next((name for name in self._pools if directory_of(name).has(place)), None)

    async def _meet(self) -> None:
        """Ask Ray for a replica of each pool that has replicas, but none that Ray has named to this process. Ray then names all replicas of
        these pools, and from then on each new one. Do not ask for a replica of a pool that has none, because Ray would start one."""
        new = [pool for name, pool in self._pools.items() if not directory_of(name).is_told and pool.running_replicas_populated()]
        await asyncio.gather(*(_leased(pool, Wish(), MEET_S) for pool in new))

    async def _borrow(self, name: str, wish: Wish) -> Lease | None:
        """Return a lease of the pool's best replica, maybe with a prefill replica that computes the prompt. Return None if Ray gives no
        lease in time."""
        lease, prefill = directory_of(name).choose(wish, shares=name in self._sharing), self._prefill.get(name)
        if lease is None:
            return await _leased(self._pools[name], wish)
        return prefill.added(lease, wish) if prefill is not None else lease

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:  # made in the event loop of the requests, to which it belongs
            self._client = new_session()
        return self._client


async def _leased(lease: DeploymentHandle, wish: Wish, within_s: float = LEASE_S) -> Lease | None:
    """Ask Ray for a lease. Return None if Ray fails, or gives none within `within_s` seconds."""
    asked = lease.remote(wish)
    try:
        async with asyncio.timeout(within_s):
            return await asked
    except TimeoutError:
        asked.cancel()
    except (RayError, RayServeException) as error:
        log.warning("a lease failed: %s", type(error).__name__)
    return None


# Ray's server, this code and Ray's router share one thread, because passing a token from one thread to another takes 10 us each time.
ONE_THREAD = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}

INGRESS = serve.deployment(
    max_ongoing_requests=MOST_REQUESTS,
    ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": ONE_THREAD}},
    logging_config={"enable_access_log": False},
)(serve.ingress(lambda: entrance)(Ingress))
