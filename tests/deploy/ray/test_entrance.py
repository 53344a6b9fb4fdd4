"""A WebSocket of a fleet is closed with the reason, and a client that leaves is no failure."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="needs Ray (make test-fleet installs it)")

from starlette.websockets import WebSocket

from deploy.ray.entrance import POLICY_VIOLATION, _refuse, entrance
from deploy.ray.ingress import Ingress

MOST_REASON_BYTES = 123  # RFC 6455, 5.5: a control frame has at most 125 bytes, two of which are the code


@pytest.mark.parametrize(
    "path", ["/v1/realtime", f"/v1/realtime/{'a' * 500}", f"/v1/realtime/{'模' * 60}"], ids=["short", "long", "not ASCII"]
)
def test_the_reason_of_a_close_fits_into_its_frame(path: str) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(_refuse(WebSocket({"type": "websocket", "path": path, "headers": []}, receive, send)))
    accepted, told, closed = sent
    assert accepted["type"] == "websocket.accept"
    error = json.loads(told["text"])["error"]
    assert error["code"] == "one_server" and path in error["message"]
    assert (closed["type"], closed["code"]) == ("websocket.close", POLICY_VIOLATION)
    assert 0 < len(closed["reason"].encode()) <= MOST_REASON_BYTES


def test_a_client_that_leaves_while_it_sends_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray logs an error of the ingress with a traceback, and counts it as a failed request."""
    ingress = Ingress({}, {}, patience_s=60.0)
    monkeypatch.setattr("deploy.ray.entrance.serve.get_replica_context", lambda: SimpleNamespace(servable_object=ingress))
    arriving: list[Any] = [{"type": "http.disconnect"}, {"type": "http.request", "body": b'{"model":', "more_body": True}]
    sent: list[Any] = []

    async def receive() -> Any:
        return arriving.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}
    asyncio.run(entrance(scope, receive, send))
    assert not arriving and not sent
