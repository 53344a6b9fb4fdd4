"""Write and check the messages of MCP: JSON-RPC 2.0, limited in bytes and depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from server.mcp.errors import McpLost, McpRefused

MODERN = "2026-07-28"  # the newest version of MCP, which each request names
LEGACY = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")  # earlier versions of MCP, on one of which a handshake agrees
MAX_MESSAGE_BYTES = 4 << 20
MAX_DEPTH = 64
# limits on all messages that arrive until a request is answered
MAX_TRAFFIC_BYTES = 64 << 20
MAX_MESSAGES = 10_000
METHOD_NOT_FOUND = -32601
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a server."""

    id: int
    method: str
    params: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)  # headers of the HTTP request that carries this request

    def encode(self) -> bytes:
        """Return the message."""
        return msgspec.json.encode({"jsonrpc": "2.0", "id": self.id, "method": self.method, "params": self.params})


def notification(method: str, params: Mapping[str, Any] | None = None) -> bytes:
    """Return a message that has no answer."""
    return msgspec.json.encode({"jsonrpc": "2.0", "method": method, **({} if params is None else {"params": params})})


def reply_to(request: Message) -> bytes:
    """Return the answer to a request of the server. Earlier versions of MCP have such requests; this client answers only `ping`."""
    if request["method"] == "ping":
        return msgspec.json.encode({"jsonrpc": "2.0", "id": request["id"], "result": {}})
    error = {"code": METHOD_NOT_FOUND, "message": "this client has no such method"}
    return msgspec.json.encode({"jsonrpc": "2.0", "id": request["id"], "error": error})


def read_messages(data: bytes, name: str) -> list[Message]:
    """Return the messages of a JSON text: one, or several in a batch. Raise McpLost if the text is not JSON, has other values than messages
    of JSON-RPC, or is nested too deeply."""
    try:
        value: object = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise McpLost(f"MCP server {name!r} sent {data[:60]!r}, which is not JSON") from None
    found = cast("list[object]", value) if isinstance(value, list) else [value]
    if not all(isinstance(message, dict) and message.get("jsonrpc") == "2.0" for message in cast("list[Any]", found)):
        raise McpLost(f"MCP server {name!r} sent {data[:60]!r}; expected a message of JSON-RPC 2.0")
    if is_deeper(found, MAX_DEPTH):
        raise McpLost(f"MCP server {name!r} sent a message that is nested in more than {MAX_DEPTH} levels")
    return cast("list[Message]", found)


def is_deeper(value: object, most: int) -> bool:
    """Return whether lists and objects are nested in more than `most` levels."""
    level = [value]
    for _ in range(most + 1):
        nested = [part for part in level if isinstance(part, dict | list)]
        level = [inner for part in nested for inner in (part.values() if isinstance(part, dict) else cast("list[object]", part))]
        if not level:
            return False
    return True


def result_of(message: Message, name: str) -> Mapping[str, Any]:
    """Return the result of an answer. Raise McpRefused if the answer is an error, or McpLost if the answer has no result."""
    error = message.get("error")
    if isinstance(error, dict):
        told, code = cast("Message", error), cast("Message", error).get("code")
        text = f"MCP server {name!r} refused: {str(told.get('message', ''))[:500]}"
        raise McpRefused(text, code if isinstance(code, int) else 0, told.get("data"))
    result = message.get("result")
    if not isinstance(result, dict):
        raise McpLost(f"MCP server {name!r} sent an answer without a result")
    return cast("Message", result)


class Traffic:
    """Counts what arrives until a request is answered. A server may send any number of notifications, so the total is limited."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_bytes = self._num_messages = 0

    def count(self, num_bytes: int, num_messages: int = 1) -> None:
        """Count what has arrived. Raise McpLost if too much has arrived."""
        self._num_bytes += num_bytes
        self._num_messages += num_messages
        if self._num_bytes > MAX_TRAFFIC_BYTES or self._num_messages > MAX_MESSAGES:
            most = f"{MAX_MESSAGES} messages or {MAX_TRAFFIC_BYTES >> 20} MiB"
            raise McpLost(f"MCP server {self._name!r} sent more than {most} without an answer")
