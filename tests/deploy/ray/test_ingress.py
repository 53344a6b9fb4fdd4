"""The ingress finds pools without waiting for those that have no replica, and without starting one."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import pytest

pytest.importorskip("ray.serve", reason="needs Ray (make test-fleet installs it)")

from starlette.requests import Request

from deploy.ray import options
from deploy.ray.directory import Directory, directory_of
from deploy.ray.ingress import INGRESS, Ingress
from deploy.ray.wish import Lease, Reading, Wish, place_of
from tests.deploy.ray.scripted import Client, answers, replicas, run

LISTED = b'{"object":"list","data":[{"id":"a"}]}'


class Handle:
    """Stands for Ray's handle of a pool. Ray names the replicas when it is asked for one, and waits if there is none. `ended`: the pool has
    had replicas that have ended."""

    def __init__(self, pool: str, replicas: Sequence[str] = (), url: str = "http://127.0.0.1:9", *, ended: bool = False) -> None:
        self._pool = pool
        self._replicas = replicas
        self._url = url
        self._ended = ended
        self.num_asked = 0

    def running_replicas_populated(self) -> bool:
        """Return whether the pool has or had a replica, as Ray's handle does."""
        return bool(self._replicas) or self._ended

    def options(self, **_options: Any) -> Handle:
        return self

    def remote(self, _wish: Wish) -> asyncio.Task[Lease]:
        self.num_asked += 1
        directory_of(self._pool).hear({name: {"url": self._url, "key": "key"} for name in self._replicas})
        return asyncio.ensure_future(self._lend())

    async def _lend(self) -> Lease:
        if not self._replicas:
            await asyncio.Event().wait()
        return Lease(self._replicas[0], self._url, "key")


@pytest.fixture(autouse=True)
def _own_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.ray.directory._directories", defaultdict(Directory))
    monkeypatch.setattr("deploy.ray.ingress.MEET_S", 0.05)


def ingress_of(**pools: Handle) -> Ingress:
    return Ingress(cast("Any", pools), {}, patience_s=60.0)


def stored_at(replica: str) -> Reading:
    return Reading(Wish(place=place_of(replica)))


def test_a_pool_without_replicas_is_not_asked_for_what_another_one_stores() -> None:
    empty, large = Handle("empty"), Handle("large", ["r0"])

    async def go() -> None:
        ingress = ingress_of(empty=empty, large=large)
        directory_of("large").hear({"r0": {}})
        assert await ingress._pool_of(stored_at("r0")) == "large"
        assert (empty.num_asked, large.num_asked) == (0, 0)

    run(go())


def test_a_pool_that_ray_has_not_named_is_asked_once() -> None:
    empty, ended, large = Handle("empty"), Handle("ended", ended=True), Handle("large", ["r0"])

    async def go() -> None:
        ingress = ingress_of(empty=empty, ended=ended, large=large)
        assert await ingress._pool_of(stored_at("r0")) == "large"
        assert await ingress._pool_of(stored_at("lost")) == "empty", "the first pool says that there is no such response"
        assert (empty.num_asked, ended.num_asked, large.num_asked) == (0, 1, 1)

    run(go())


def test_a_response_that_has_moved_is_found() -> None:
    async def go() -> None:
        ingress = ingress_of(small=Handle("small", ["r0"]), large=Handle("large", ["r1"]))
        response = f"resp_{place_of('gone').hex()}00"
        reading = Reading(Wish(place=place_of("gone")), stored=response)
        assert ingress._located(reading) == reading
        directory_of("large").move(response, "r1")
        assert ingress._located(reading).wish.place == place_of("r1")
        assert await ingress._pool_of(ingress._located(reading)) == "large"

    run(go())


async def list_models(ingress: Ingress, query: bytes = b"") -> Client:
    """Ask an ingress for the models of all its pools."""
    client, given = Client(), [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Any:
        return given.pop() if given else await client.receive()

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "query_string": query, "headers": []}
    response = await ingress.answer(Request(scope, receive))
    await response(scope, receive, client.send)
    return client


def test_a_list_starts_no_replica() -> None:
    async def go() -> None:
        async with replicas(answers(200, LISTED), num=1) as made:
            empty, large = Handle("empty"), Handle("large", ["r0"], made.urls[0])
            ingress = ingress_of(empty=empty, large=large)
            for _ in range(2):
                client = await list_models(ingress)
                assert (client.status, json.loads(client.body)) == (200, json.loads(LISTED))
            await ingress._session().close()
            assert (empty.num_asked, large.num_asked) == (0, 1)

    run(go())


def test_a_list_of_a_fleet_without_replicas_is_refused() -> None:
    async def go() -> None:
        ingress = ingress_of(empty=Handle("empty"), other=Handle("other"))
        client = await list_models(ingress)
        assert (client.status, json.loads(client.body)["error"]["code"]) == (503, "no_replica")

    run(go())


def test_a_query_passes_as_it_is() -> None:
    """Bytes that are no ASCII are percent-encoded, because a target of HTTP has none."""

    async def go() -> None:
        async with replicas(answers(200, LISTED), num=1) as made:
            ingress = ingress_of(only=Handle("only", ["r0"], made.urls[0]))
            for query in (b"a=%C3%A9&b=[x]\"{}|^`&c=1+2%20?/;:@!$'()*,", b"x=\xff\xc3\xa9"):
                assert (await list_models(ingress, query)).status == 200
            await ingress._session().close()
            targets = [target for target, _, _ in made.seen]
            assert targets == ["/v1/models?a=%C3%A9&b=[x]\"{}|^`&c=1+2%20?/;:@!$'()*,", "/v1/models?x=%FF%C3%A9"]

    run(go())


def test_no_pool_may_have_the_name_of_the_ingress() -> None:
    assert INGRESS.name == options.INGRESS
