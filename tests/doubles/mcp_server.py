"""An MCP server for tests, with tools that behave well or badly: over standard streams as a program, over HTTP on a thread.

python -m tests.doubles.mcp_server ERA [silent] [slow] [TOOL...]
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODERN, LEGACY = "2026-07-28", "2025-11-25"
OBJECT = {"type": "object", "properties": {}}
PAGE = 5
Message = dict[str, Any]


def tool(name: str, *, read_only: bool = False, **properties: Any) -> Message:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": f"The tool {name}.", "inputSchema": schema, "annotations": {"readOnlyHint": read_only}}


TOOLS = [
    tool("add", read_only=True, a={"type": "integer"}, b={"type": "integer"}),
    tool("echo", text={"type": "string", "x-mcp-header": "Text"}),
    tool("fail"),
    tool("media"),
    tool("structured"),
    tool("wait"),
    tool("ask"),
    tool("die"),
    tool("rubbish"),
    tool("flood"),
    tool("deep"),
    tool("large"),
    tool("grow"),
    {"name": "no schema"},
]


@dataclass
class Behaviour:
    """The behaviour of a server, and the messages that it has seen."""

    era: str = "modern"
    silent_first: bool = False  # an earlier server that ignores requests before the handshake
    tools: list[Message] = field(default_factory=lambda: list(TOOLS))
    seen: list[Message] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    waiting: threading.Event = field(default_factory=threading.Event)
    sessions: set[str] = field(default_factory=set)
    status: int = 200  # HTTP status of every answer
    redirect: str = ""
    as_events: bool = False
    cuts_streams: bool = False  # ends each stream of events before the answer, which a GET continues
    retry_ms: int = 1  # time after which the client is to continue a stream
    ttl_ms: int = 0

    def answers(self, message: Message) -> Iterator[Message | bytes]:
        """Yield what the server sends for a message: messages, or bytes that are none."""
        self.seen.append(message)
        method, number, params = message.get("method"), message.get("id"), message.get("params", {})
        if method == "notifications/cancelled":
            self.cancelled.set()
        if number is None or "method" not in message:
            return
        if self.era == "modern" and method != "subscriptions/listen" and f"{META}clientCapabilities" not in params.get("_meta", {}):
            yield error(number, -32602, "params._meta lacks the envelope")
        elif method == "server/discover" and self.era == "modern":
            capabilities = {"tools": {"listChanged": True}}
            yield result(number, {"resultType": "complete", "supportedVersions": [MODERN], "capabilities": capabilities, "ttlMs": 0})
        elif method == "server/discover" and self.era == "future":
            yield {
                **error(number, -32022, "unsupported"),
                "error": {"code": -32022, "message": "no", "data": {"supported": ["2030-01-01"]}},
            }
        elif method == "initialize" and self.era == "legacy":
            yield result(number, {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": {"name": "x"}})
        elif method == "tools/list":
            begin = int(params.get("cursor", 0))
            more = {"nextCursor": str(begin + PAGE)} if begin + PAGE < len(self.tools) else {}
            yield result(number, {"tools": self.tools[begin : begin + PAGE], "ttlMs": self.ttl_ms, **more})
        elif method == "tools/call":
            yield from self.called(number, params["name"], params["arguments"], params.get("_meta", {}))
        elif not self.silent_first:
            yield error(number, -32601, f"no method {method}")

    def called(self, number: int, name: str, arguments: Message, meta: Message) -> Iterator[Message | bytes]:
        match name:
            case "add":
                if (token := meta.get("progressToken")) is not None:
                    yield notification("notifications/progress", {"progressToken": token, "progress": 1, "total": 2})
                if self.era == "legacy":
                    yield {"jsonrpc": "2.0", "id": 99, "method": "ping"}
                yield text(number, str(arguments["a"] + arguments["b"]))
            case "echo":
                yield text(number, arguments["text"])
            case "weather":
                yield text(number, f"cold in {arguments['city']}")
            case "fail":
                yield text(number, "it does not work", is_error=True)
            case "media":
                blocks = [
                    {"type": "text", "text": "two media"},
                    {"type": "image", "mimeType": "image/png", "data": "QUJD"},
                    {"type": "resource_link", "name": "notes", "uri": "file:///notes"},
                    {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}},
                    {"type": "hologram"},
                ]
                yield result(number, {"content": blocks})
            case "structured":
                yield result(number, {"content": [], "structuredContent": {"degrees": 20}})
            case "wait":
                self.waiting.set()
                self.cancelled.wait(20)
                yield text(number, "late")
            case "ask":
                asked = {"login": {"method": "elicitation/create", "params": {}}}
                yield result(number, {"resultType": "input_required", "inputRequests": asked})
            case "die":
                os._exit(3)
            case "rubbish":
                yield b"<html>no JSON</html>"
            case "flood":
                for count in itertools.count():
                    yield notification("notifications/message", {"data": "x" * 1000, "count": count})
            case "deep":
                yield b'{"jsonrpc":"2.0","id":%d,"result":%s{}%s}' % (number, b'{"a":' * 500, b"}" * 500)
            case "large":
                yield text(number, "x" * (5 << 20))
            case "grow":
                self.tools.insert(0, tool(f"grown{len(self.tools)}"))
                yield notification("notifications/tools/list_changed")
                yield text(number, "grown")
            case _:
                yield error(number, -32602, f"no tool {name}")


META = "io.modelcontextprotocol/"


def result(number: int, value: Message) -> Message:
    return {"jsonrpc": "2.0", "id": number, "result": value}


def text(number: int, said: str, *, is_error: bool = False) -> Message:
    return result(number, {"resultType": "complete", "content": [{"type": "text", "text": said}], "isError": is_error})


def error(number: int, code: int, message: str) -> Message:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}


def notification(method: str, params: Message | None = None) -> Message:
    return {"jsonrpc": "2.0", "method": method, "params": params or {}}


def encoded(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else json.dumps(message).encode()


def main() -> None:
    """Serve standard streams. A call runs on a thread, so that it can be cancelled."""
    named = [one for one in TOOLS if one["name"] in sys.argv[2:]]
    behaviour = Behaviour(sys.argv[1], silent_first="silent" in sys.argv, tools=named or list(TOOLS))
    lock = threading.Lock()
    if "slow" in sys.argv:
        next(sys.stdin.buffer)  # the first request waits until the next one, as if the program started slowly
    print("ready to serve", file=sys.stderr, flush=True)

    def answer(message: Message) -> None:
        for sent in behaviour.answers(message):
            with lock:
                sys.stdout.buffer.write(encoded(sent) + b"\n")
                sys.stdout.buffer.flush()

    for line in sys.stdin.buffer:
        threading.Thread(target=answer, args=(json.loads(line),), daemon=True).start()
    os._exit(0)  # a thread may hold the output, for which the interpreter's end would wait


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    behaviour: Behaviour

    def do_POST(self) -> None:
        seen = self.behaviour
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        seen.headers.append({name.lower(): ", ".join(self.headers.get_all(name, ())) for name in self.headers})
        session, method = self.headers.get("mcp-session-id"), message.get("method")
        is_known = seen.era != "legacy" or method in ("initialize", "server/discover") or session in seen.sessions
        if seen.redirect or seen.status != 200:
            self.reply(307 if seen.redirect else seen.status, b"{}", location=seen.redirect)
        elif not is_known:
            seen.seen.append(message)
            self.reply(404, b"{}")
        elif "id" not in message or method is None:
            list(seen.answers(message))
            self.reply(202, b"")
        elif seen.as_events and method == "tools/call":
            self.stream(seen.answers(message), cut=seen.cuts_streams)
        else:
            # JSON has room for one message only
            sent = next((one for one in seen.answers(message) if isinstance(one, bytes) or "method" not in one), b"")
            refused = isinstance(sent, dict) and "error" in sent
            self.reply(400 if refused else 200, encoded(sent), new_session=method == "initialize")

    def do_GET(self) -> None:
        """Continue a stream that `stream` has cut: answer the request whose id is the id of the last event."""
        self.stream(iter([text(int(self.headers["last-event-id"]), "continued")]), cut=False)

    def do_DELETE(self) -> None:
        self.behaviour.sessions.discard(self.headers.get("mcp-session-id", ""))
        self.reply(200, b"")

    def reply(self, status: int, body: bytes, *, new_session: bool = False, location: str = "") -> None:
        self.send_response(status)
        if location:
            self.send_header("location", location)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        if new_session:
            session = f"session{time.monotonic_ns()}"
            self.behaviour.sessions.add(session)
            self.send_header("mcp-session-id", session)
        self.end_headers()
        self.wfile.write(body)

    def stream(self, sent: Iterator[Message | bytes], *, cut: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        try:
            self.wfile.write(b": a comment\r\n\r\nretry: %d\n" % self.behaviour.retry_ms)
            for message in sent:
                if cut and isinstance(message, dict) and "result" in message:
                    self.wfile.write(b"id: %d\ndata:\n\n" % message["id"])
                    break
                self.wfile.write(b"event: message\ndata: " + encoded(message) + b"\n\n")
                self.wfile.flush()
        except OSError:
            self.behaviour.cancelled.set()
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(behaviour: Behaviour) -> Generator[str]:
    """Serve HTTP on a thread, and yield the address."""
    handler = type("OneHandler", (Handler,), {"behaviour": behaviour})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/mcp"
    finally:
        behaviour.cancelled.set()
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    main()
