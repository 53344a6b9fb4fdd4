"""The server that a worker starts, or finds."""

from __future__ import annotations

import asyncio
import json
from urllib.error import HTTPError
from urllib.request import Request, build_opener

import pytest

pytest.importorskip("zmq", reason="needs pyzmq (the extra dynamo)")

from deploy.dynamo.server import FoundServer, OwnServer, until_ready  # its server needs pyzmq
from deploy.replicas.process import ServerEnded


def status(url: str, key: str | None = None) -> int:
    request = Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with build_opener().open(request, timeout=60) as answer:
            return answer.status
    except HTTPError as error:
        return error.code


def test_only_the_worker_has_the_key_of_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the environment or of the configuration file do not open it."""
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
