"""A WebSocket is closed, with its code and reason, when its client or its time demands it; and no client's frames hold up other tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from server.api.answer.socket import TURN, Connection, SocketLimits, WebSocket
from server.http.answer_framing import UPGRADED
from server.http.websocket import CloseCode, Opcode, WebSocketError, frame
from tests.server.other_tasks import turns_during

LIMITS = SocketLimits(most_bytes=1000, message_s=30.0, open_s=3600.0)
OPEN = b"\x01\x80mask"  # a first frame without bytes
EMPTY = b"\x00\x80mask"  # a frame that continues it
TEXT = b"\x81\x80mask"


class Client:
    """Sends pieces, each at its time, and then nothing."""

    def __init__(self, *pieces: tuple[float, bytes]) -> None:
        self.now_s = 0.0
        self.is_stopping = False
        self.held = list[int]()
        self.sent = list[bytes]()
        self._pieces = [*pieces]

    async def receive(self) -> Message:
        if not self._pieces:
            self.now_s += 10.0
            raise TimeoutError
        at_s, data = self._pieces.pop(0)
        self.now_s = max(self.now_s, at_s)
        return {"type": "http.request", "body": data, "more_body": True}

    async def send(self, message: Message) -> None:
        self.sent.append(message["body"])

    def connection(self) -> Connection:
        return Connection(self.receive, self.send, LIMITS, lambda: self.is_stopping, lambda: self.now_s)

    def end(self, on_text: Callable[[], None] = lambda: None) -> WebSocketError:
        async def read() -> None:
            async for _ in self.connection().texts(self.held.append):
                on_text()

        with pytest.raises(WebSocketError) as ended:
            asyncio.run(read())
        return ended.value


def test_a_client_that_streams_hears_that_the_server_stops() -> None:
    client = Client(*[(0.0, TEXT)] * 100)
    seen = list[int]()

    def stop() -> None:
        seen.append(1)
        client.is_stopping = len(seen) == 3

    ended = client.end(stop)
    assert (ended.code, ended.reason, len(seen)) == (CloseCode.GOING_AWAY, "the server stops", 3)


@pytest.mark.parametrize(
    ("pieces", "code", "reason"),
    [
        ([(0.0, OPEN), *((float(at), EMPTY) for at in range(100))], CloseCode.POLICY, "a message did not arrive whole within 30 s"),
        (
            [(float(at), bytes([byte])) for at, byte in enumerate(b"\x81\xfe\x01\x00mask" + b"x" * 99)],
            CloseCode.POLICY,
            "a message did not arrive whole",
        ),
        ([(float(at), TEXT) for at in range(0, 5000, 10)], CloseCode.GOING_AWAY, "the session has lasted 60 minutes; connect again"),
        ([(0.0, TEXT)], CloseCode.POLICY, "the client has been silent for 60 s"),
    ],
)
def test_what_takes_too_long_closes_with_a_reason(pieces: list[tuple[float, bytes]], code: CloseCode, reason: str) -> None:
    ended = Client(*pieces).end()
    assert ended.code is code and ended.reason.startswith(reason)


def test_a_client_that_waits_for_the_server_is_not_silent() -> None:
    client = Client((0.0, TEXT), (0.0, TEXT))

    def work() -> None:
        client.now_s += 500.0

    client.end(work)
    assert client.now_s > 1000 + 60
    assert frame(Opcode.PING) in client.sent


def test_incomplete_messages_are_counted() -> None:
    client = Client((0.0, b"\x01\x83mask" + b"abc"), (0.0, EMPTY + b"\x80"), (0.0, b"\x80mask"))
    client.end()
    assert client.held == [3, 4, 0]


def test_frames_without_a_message_let_other_tasks_run() -> None:
    client, num_frames = Client((0.0, OPEN + EMPTY * 50 * TURN)), 50 * TURN

    async def run() -> None:
        with pytest.raises(WebSocketError):
            async for _ in client.connection().texts(client.held.append):
                pass

    assert turns_during(run()) >= num_frames // TURN


def request(**headers: str) -> Request:
    given = {"sec-websocket-version": "13", "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==", **headers}
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]
    scope = {"type": "http", "method": "GET", "path": "/v1/realtime", "headers": raw, UPGRADED: True}
    return Request({**scope, "server": ("127.0.0.1", 80), "scheme": "http", "query_string": b""})


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ("", None),
        ("realtime", "realtime"),
        ("openai-insecure-api-key.secret, realtime", "realtime"),
        ("realtime, openai-insecure-api-key.secret", "realtime"),
        ("openai-insecure-api-key.secret", None),
    ],
)
def test_the_chosen_protocol_is_never_the_key(asked: str, chosen: str | None) -> None:
    async def serve(connection: Any) -> None: ...

    given = {"sec_websocket_protocol": asked} if asked else {}
    answer = WebSocket(request(**given), serve, limits=LIMITS, is_stopping=lambda: False)
    assert answer.headers.get("sec-websocket-protocol") == chosen
