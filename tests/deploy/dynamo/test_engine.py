"""The engine of a worker in front of a server whose answers the test decides."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dynamo.llm", reason="needs Dynamo (the extra dynamo)")

from dynamo.llm.exceptions import CannotConnect, InvalidArgument, Unknown
from dynamo.runtime import Context

from deploy.client import ServerFault
from deploy.dynamo import engine as engine_module
from deploy.dynamo.engine import MOST_FAILED, PATH, Engine
from deploy.dynamo.server import FoundServer
from server.settings import SettingsError
from tests.deploy.dynamo.scripted import ENTRY, Answer, Scripted, listing, scripted

EVENT = {"choices": [{"index": 0, "token_ids": [7], "finish_reason": None}]}
STREAM = b"data: " + json.dumps(EVENT).encode() + b"\n\ndata: [DONE]\n\n"
OLD_FIGURES = b'vllm:cache_config_info{model_name="m"} 1.0\n'


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as found:
        yield found


def engine_of(server: Scripted) -> Engine:
    return Engine("m", FoundServer(server.url, "a-key-of-some-length", None), Path("card"))


async def chunks(engine: Engine, context: Context | None = None) -> list[Any]:
    return [chunk async for chunk in engine.generate({"token_ids": [1], "model": "m"}, context or Context("one"))]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        *((status, CannotConnect) for status in (401, 403, 404, 429, 503)),  # another worker may serve it
        *((status, InvalidArgument) for status in (400, 413, 422)),
        *((status, Unknown) for status in (307, 500)),
    ],
)
def test_a_fault_of_the_server_is_not_that_of_the_client(server: Scripted, status: int, error: type[Exception]) -> None:
    why = {"error": {"message": "the server says why"}}
    server.answers[PATH] = Answer(json.dumps(why).encode(), status, {"location": f"{server.url}/elsewhere"})

    async def refused() -> None:
        engine = engine_of(server)
        await engine.start(1)
        try:
            with pytest.raises(error, match="the server says why"):
                await chunks(engine)
        finally:
            await engine.cleanup()

    asyncio.run(refused())
    assert "/elsewhere" not in [path for path, _, _ in server.heard]


def test_aliases_with_defaults_of_their_own_are_not_registered(server: Scripted) -> None:
    """Dynamo sends requests for aliases under the name of the model."""
    server.answers["/v1/models"] = listing({**ENTRY, "aliases": ["alias", "variant"]}, {**ENTRY, "id": "variant", "aliases": []})

    async def registered() -> list[str] | None:
        engine = engine_of(server)
        try:
            return (await engine.start(1)).model_aliases
        finally:
            await engine.cleanup()

    assert asyncio.run(registered()) == ["alias"]


@pytest.mark.parametrize("is_own", [True, False])
def test_an_abort_concerns_one_try(server: Scripted, is_own: bool) -> None:
    """Dynamo may abort a failed try after it has sent the request to the same worker again, with the same id. The abort must not end the
    new try."""
    may_go = threading.Event()
    server.answers[PATH] = Answer(STREAM, headers={"content-type": "text/event-stream"}, may_go=may_go)

    async def aborted() -> list[Any]:
        engine, own, earlier = engine_of(server), Context("one"), Context("one")
        await engine.start(1)
        try:
            running = asyncio.create_task(chunks(engine, own))
            while PATH not in [path for path, _, _ in server.heard]:
                await asyncio.sleep(0.001)
            stopped = own if is_own else earlier
            stopped.stop_generating()
            await engine.abort(stopped)
            if not is_own:
                may_go.set()
            return await running
        finally:
            may_go.set()
            await engine.cleanup()

    end = {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
    assert asyncio.run(aborted()) == [end if is_own else {"token_ids": [7], "index": 0}]


async def loss(server: Scripted, path: str, answer: Answer, publisher: object = None) -> Engine:
    """Start an engine, let the server change an answer, and wait until the worker ends by itself."""
    engine, ended = engine_of(server), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    try:
        await engine.start(1)
        engine.attach_snapshot_publisher(publisher)
        server.answers[path] = answer
        await ended.wait()
        with pytest.raises(CannotConnect, match="the server at"):
            await chunks(engine)
    finally:
        await engine.cleanup()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    return engine


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        ("/v1/models", listing(), "has no model 'm'; it has: none. Name one as MODEL=NAME"),
        ("/v1/models", Answer(status=401), "is lost: HTTP Error 401: Unauthorized"),
        ("/v1/models", Answer(b"<html>"), "is no relaxserve: "),
        ("/health/live", Answer(status=503), "is lost: HTTP Error 503: Service Unavailable"),
        ("/metrics", Answer(OLD_FIGURES), "is no relaxserve: its figures at /metrics cannot be read, KeyError('block_size')"),
    ],
)
def test_a_worker_whose_server_serves_no_more_ends(
    server: Scripted, path: str, answer: Answer, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "WATCH_S", 0.01)
    engine = asyncio.run(loss(server, path, answer))
    assert server.heard[-1][0] != PATH
    assert isinstance(engine.failure, ServerFault)
    assert str(engine.failure).startswith(f"the server at {server.url} {why}")


def test_a_server_that_fails_now_and_then_is_not_lost(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only consecutive failures count."""
    monkeypatch.setattr(engine_module, "WATCH_S", 0.0)
    looks: list[bool] = []

    class Moody(FoundServer):
        def require_answer(self) -> None:
            looks.append(len(looks) % MOST_FAILED != 0)
            if looks[-1]:
                raise ConnectionRefusedError

    async def watched() -> None:
        engine = Engine("m", Moody(server.url, None, None), Path("card"))
        await engine.start(1)
        while len(looks) < 5 * MOST_FAILED:
            await asyncio.sleep(0.001)
        assert engine.failure is None
        await engine.cleanup()

    asyncio.run(watched())


def test_a_worker_that_cannot_watch_its_server_ends(
    server: Scripted, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes wrong, a worker does not go on without watching."""
    monkeypatch.setattr(engine_module, "WATCH_S", 0.01)
    engine = asyncio.run(loss(server, "/metrics", Answer(), publisher=object()))  # without the method of a publisher
    assert isinstance(engine.failure, ServerFault)
    assert "cannot be watched: AttributeError" in str(engine.failure)
    assert "is not watched any more" in caplog.text


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        ("/health/ready", Answer(status=404), "is no relaxserve: it answers with HTTP Error 404"),
        ("/health/ready", Answer(status=302), "is no relaxserve: it answers with HTTP Error 302"),
        ("/v1/models", Answer(b"<html>"), "is no relaxserve: its answer to /v1/models is b'<html>'"),
        ("/v1/models", listing({"id": "m", "max_model_len": 64}), "is no relaxserve: .*missing required field `generates`"),  # vLLM
        ("/v1/models", listing({**ENTRY, "id": "other"}), "has no model 'm'; it has: other"),
        ("/v1/models", Answer(status=401), "refuses the key, HTTP Error 401: Unauthorized; set RELAXSERVE_KEY to one of its keys"),
        ("/metrics", Answer(status=403), "refuses the key, HTTP Error 403: Forbidden; set RELAXSERVE_KEY to one of its keys"),
        ("/metrics", Answer(OLD_FIGURES), "is no relaxserve: its figures"),
        ("/metrics", Answer(b"\xff"), "is no relaxserve: its figures"),
    ],
)
def test_a_worker_says_why_it_cannot_use_a_server(server: Scripted, path: str, answer: Answer, why: str) -> None:
    server.answers[path] = answer
    engine = engine_of(server)

    async def started() -> None:
        with suppress(OSError, SettingsError):
            await engine.start(1)
        await engine.cleanup()

    asyncio.run(started())
    assert isinstance(engine.failure, SettingsError)
    with pytest.raises(SettingsError, match=f"^the server at {server.url} {why}"):
        raise engine.failure


def test_a_server_with_an_error_is_a_fault(server: Scripted) -> None:
    server.answers["/v1/models"] = Answer(status=500)
    engine = engine_of(server)
    with pytest.raises(OSError, match="500"):
        asyncio.run(engine.start(1))
    assert isinstance(engine.failure, ServerFault)
    assert str(engine.failure) == f"the server at {server.url} cannot be used: HTTP Error 500: Internal Server Error"
