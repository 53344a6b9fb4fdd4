"""The ASGI application of the ingress: it passes HTTP requests to the ingress, and tells clients of WebSockets that a fleet has none."""

from __future__ import annotations

import json
from contextlib import suppress

from ray import serve
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from server.errors import ONE_SERVER, ApiError

POLICY_VIOLATION = 1008  # the code with which a WebSocket is closed
REASON = "this path means one server"  # at most 123 bytes (RFC 6455, 5.5)


async def entrance(scope: Scope, receive: Receive, send: Send) -> None:
    """Handle one connection, as an ASGI application does."""
    match scope["type"]:
        case "lifespan":
            await _live(receive, send)
        case "websocket":
            await _refuse(WebSocket(scope, receive, send))
        case _:
            ingress = serve.get_replica_context().servable_object
            with suppress(ClientDisconnect):  # the client has left before it had sent the whole body, so nobody waits for an answer
                response = await ingress.answer(Request(scope, receive))  # pyright: ignore[reportFunctionMemberAccess]
                await response(scope, receive, send)


async def _live(receive: Receive, send: Send) -> None:
    """Confirm the start and the stop of the application, for which nothing is to be done."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def _refuse(socket: WebSocket) -> None:
    """Accept a WebSocket, because no client shows the reason if a WebSocket is not accepted. Then send an error as the realtime API does,
    and close it."""
    path = socket.scope["path"].removeprefix(socket.scope.get("root_path", ""))
    error = ApiError(ONE_SERVER, f"{path} means one server, and this address is that of a fleet; use the address of the server")
    offered = socket.scope.get("subprotocols") or [None]
    await socket.accept(subprotocol=offered[0])
    await socket.send_json({"type": "error", **json.loads(error.body())})
    await socket.close(POLICY_VIOLATION, REASON)
