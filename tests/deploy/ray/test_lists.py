"""A fleet of several pools lists the models of all of them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs aiohttp (the extra ray)")

from aiohttp import web
from starlette.datastructures import Headers

from deploy.ray import lists
from deploy.ray.lists import MISSING, ModelLists, merged
from deploy.replicas.session import new_session
from tests.deploy.ray.scripted import Client, Script, answers, passage_of, replicas, run


def listed(*names: str) -> bytes:
    ends = {"first_id": names[0], "last_id": names[-1]}
    return json.dumps({"object": "list", "data": [{"id": name} for name in names], **ends}).encode()


def test_each_model_is_listed_once() -> None:
    found = json.loads(merged([listed("a", "b"), listed("b", "c")], "data"))
    assert found == json.loads(listed("a", "b", "c"))
    tags = [json.dumps({"models": [{"name": name, "size": 1}]}).encode() for name in ("a", "b")]
    assert json.loads(merged(tags, "models")) == {"models": [{"name": "a", "size": 1}, {"name": "b", "size": 1}]}


async def ask_all(*scripts: Script, idle: Sequence[str] = (), **headers: str) -> Client:
    """Ask pools of one replica each, which are called p, q and so on, for their models. The pools `idle` have no replica."""
    client, without = Client(), dict.fromkeys(idle)
    async with new_session() as session:
        pools = [replicas(script, num=1) for script in scripts]
        made = [await pool.__aenter__() for pool in pools]
        try:
            passages = [await passage_of(one, session, "GET", "/v1/models", b"", 60.0, headers) for one in made]
            await ModelLists("/v1/models", dict(zip("pqrs", passages, strict=False)) | without)(
                {"type": "http"}, client.receive, client.send
            )
        finally:
            for pool in pools:
                await pool.__aexit__(None, None, None)
    return client


def test_compressed_lists_are_not_asked_for() -> None:
    """Servers compress a long answer if the client accepts that."""

    def lists(name: str) -> Script:
        async def answer(request: web.Request) -> web.StreamResponse:
            found = web.Response(body=listed(name), content_type="application/json")
            if "gzip" in request.headers.get("accept-encoding", ""):
                found.enable_compression()
            return found

        return answer

    client = run(ask_all(lists("a"), lists("b"), accept_encoding="gzip, deflate"))
    assert (client.status, client.body) == (200, merged([listed("a", "b")], "data"))


def test_every_header_of_a_name_is_passed_on() -> None:
    async def given() -> Headers:
        raw = [(b"x-forwarded-for", b"10.0.0.1"), (b"accept-encoding", b"gzip"), (b"x-forwarded-for", b"10.0.0.2")]
        async with new_session() as session, replicas(answers(200, listed("a")), num=1) as made:
            passage = await passage_of(made, session, "GET", "/v1/models", b"", 60.0, {})
            passage.given = Headers(raw=raw)
            ModelLists("/v1/models", {"p": passage})
            return passage.given

    assert run(given()).raw == [(b"x-forwarded-for", b"10.0.0.1"), (b"x-forwarded-for", b"10.0.0.2")]


async def hangs(_request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


async def begins(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"content-type": "application/octet-stream"})  # which a passage sends on as it comes
    await answer.prepare(request)
    await answer.write(b'{"data": [')
    return await hangs(request)


@pytest.mark.parametrize(
    ("scripts", "status", "body", "missing"),
    [
        ((answers(200, listed("a")), answers(200, listed("b"))), 200, json.loads(listed("a", "b")), None),
        ((hangs, answers(200, listed("b"))), 200, json.loads(listed("b")), "p"),
        ((begins, answers(200, listed("b"))), 200, json.loads(listed("b")), "p"),
        ((hangs, answers(401, b'{"error":{}}')), 401, {"error": {}}, None),
        ((answers(200, listed("a")), answers(500, b"{}")), 200, json.loads(listed("a")), "q"),
        ((answers(401, b'{"error":{}}'), answers(401, b"{}")), 401, {"error": {}}, None),
    ],
)
def test_pools_are_asked_together(
    scripts: tuple[Script, ...], status: int, body: Any, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "LIST_S", 0.5)
    client = run(ask_all(*scripts))
    assert (client.status, json.loads(client.body), client.is_whole) == (status, body, True)
    assert client.headers.get(MISSING) == missing
    assert client.headers["content-length"] == str(len(client.body))


def test_a_pool_that_refuses_the_list_is_not_called_late(caplog: pytest.LogCaptureFixture) -> None:
    """Clients ask every few seconds, so this is no warning."""
    with caplog.at_level(logging.INFO, lists.log.name):
        run(ask_all(answers(200, listed("a")), answers(500, b"{}")))
    (record,) = caplog.records
    told = "/v1/models lacks the models of q, from which no list came with status 200 within 5 s"
    assert (record.levelname, record.getMessage()) == ("INFO", told)


def test_pools_without_a_replica_are_named() -> None:
    client = run(ask_all(answers(200, listed("a")), idle=("large",)))
    assert (client.status, json.loads(client.body), client.headers[MISSING]) == (200, json.loads(listed("a")), "large")


@pytest.mark.parametrize(("scripts", "why"), [((hangs, hangs), "within"), ((begins, hangs), "within"), ((), "no pool has a replica")])
def test_a_list_is_refused_once_if_no_pool_answers(scripts: tuple[Script, ...], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "LIST_S", 0.05)
    client = run(ask_all(*scripts))
    error = json.loads(client.body)["error"]
    assert (client.status, error["code"], client.is_whole) == (503, "no_replica", True)
    assert why in error["message"]
