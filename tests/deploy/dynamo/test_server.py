"""The server that a worker starts, or finds."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
from urllib.error import HTTPError
from urllib.request import Request, build_opener

import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the extra dynamo)")

from deploy.dynamo import server as server_module  # its server needs pyzmq
from deploy.dynamo.server import FoundServer, OwnServer, until_ready
from deploy.replicas.process import ServerEnded
from tests.deploy.dynamo.scripted import Answer, scripted


def status(url: str, key: str | None = None) -> int:
    request = Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with build_opener().open(request, timeout=60) as answer:
            return answer.status
    except HTTPError as error:
        return error.code


def test_only_the_worker_has_the_key_of_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server accepts only the key that the worker has made, and no key of the environment or of the configuration file."""
    monkeypatch.setenv("RELAXSERVE_API_KEYS", "key-of-the-environment")
    server = OwnServer("demo=d", {"api_keys": ["key-of-the-file"], "max_body_bytes": 50_000})
    try:
        asyncio.run(until_ready(server))
        assert [model["id"] for model in json.loads(server.ask("/v1/models"))["data"]] == ["d"]
        url = f"{server.url}/v1/models"
        assert [status(url, key) for key in (None, "key-of-the-environment", "key-of-the-file")] == [401, 401, 401]
        assert status(url, server.access_key) == 200
        found = FoundServer(f"{server.url}/", server.access_key, None)
        assert found.ask("/v1/models") == server.ask("/v1/models")
        found.stop()
        server.require()
    finally:
        server.stop()
    with pytest.raises(OSError, match="refused"):
        found.ask("/health/ready")


def test_a_server_that_ends_before_it_is_ready(tmp_path_factory: pytest.TempPathFactory) -> None:
    server = OwnServer(f"{tmp_path_factory.mktemp('empty')}=empty", {})
    with pytest.raises(ServerEnded, match="status 1"):
        asyncio.run(until_ready(server))
    server.stop()


@pytest.mark.parametrize("status", [302, 400, 401, 404, 500])
def test_an_error_that_stays_ends_the_wait(status: int) -> None:
    with scripted() as found, pytest.raises(HTTPError) as error:
        found.answers["/health/ready"] = Answer(status=status)
        asyncio.run(until_ready(FoundServer(found.url, None, None)))
    assert error.value.code == status


def test_a_server_without_tls_ends_the_wait() -> None:
    with scripted() as found, pytest.raises(ssl.SSLError):
        asyncio.run(until_ready(FoundServer(found.url.replace("http:", "https:"), None, None)))


@pytest.mark.parametrize("status", [502, 503, 504])
def test_the_log_says_why_a_server_is_not_ready(status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(server_module, "SAY_S", 0.0)
    with scripted() as found:
        found.answers["/health/ready"] = Answer(status=status)

        def get_ready(record: logging.LogRecord) -> bool:
            if record.levelno == logging.WARNING:
                found.answers["/health/ready"] = Answer()
            return True

        monkeypatch.setattr(server_module.log, "filters", [get_ready])
        asyncio.run(until_ready(FoundServer(found.url, None, None)))
        assert f"the server at {found.url} is not ready yet: HTTP Error {status}" in caplog.text


def test_a_server_that_takes_no_connection_is_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(server_module, "SAY_S", 0.0)
    with scripted() as found, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        absent = FoundServer(f"http://127.0.0.1:{bound.getsockname()[1]}", None, None)

        def appear(record: logging.LogRecord) -> bool:
            if record.levelno == logging.WARNING:
                absent.url = found.url
            return True

        monkeypatch.setattr(server_module.log, "filters", [appear])
        asyncio.run(until_ready(absent))
    assert "is not ready yet: [Errno 111] Connection refused" in caplog.text


def test_questions_go_to_the_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker sends its key to no proxy of the environment, and to no target of a redirect."""
    with scripted() as found, scripted() as other:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, other.url)
        monkeypatch.delenv("no_proxy", raising=False)
        server = FoundServer(found.url.replace("127.0.0.1", "0.0.0.0"), "a-key-of-some-length", None)  # for urllib no loopback address
        server.require_answer()
        found.answers["/health/live"] = Answer(status=307, headers={"location": f"{other.url}/health/live"})
        with pytest.raises(HTTPError, match="307"):
            server.require_answer()
        assert found.heard == [("/health/live", "Bearer a-key-of-some-length", b"")] * 2
        assert other.heard == []
