"""Send a request to this server's own application, without a connection. Its answer has the bytes that a client would get."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Scope

from server.http.auth import INWARD, Passed


@dataclass(slots=True)
class Answer:
    """The answer to a request."""

    status: int = 0  # 0: the answer has not begun
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytearray = field(default_factory=bytearray)


async def call(app: ASGIApp, path: str, body: bytes, passed: Passed, client: str, gone: asyncio.Event) -> Answer:
    """Post a JSON body to `path`, and return the whole answer. `passed`: the result that the access check would have. `client`: the text
    that the log shows in the place of the client's address. Once `gone` is set, the request ends as if its client had closed the
    connection."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": (client, 0),
        "server": None,
        INWARD: passed,
    }
    answer, pending = Answer(), [body]

    async def receive() -> Message:
        """Return the body, and then, once `gone` is set, the end of the connection."""
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        """Store the status and headers of the answer, or a piece of its body."""
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    await app(scope, receive, send)
    return answer
