"""A server whose answers the test decides, in the place of one that runs already."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

ENTRY: Mapping[str, Any] = {"id": "m", "generates": True, "aliases": ["alias"], "max_model_len": 64}


@dataclass
class Answer:
    content: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    may_go: Event | None = None  # event for which the answer waits


def listing(*entries: Mapping[str, Any]) -> Answer:
    return Answer(json.dumps({"data": entries}).encode())


@dataclass
class Scripted:
    """A server that first answers as one with the model "m" does. `heard` are its requests: path, authorization and body."""

    url: str = ""
    heard: list[tuple[str, str | None, bytes]] = field(default_factory=list[tuple[str, str | None, bytes]])
    answers: dict[str, Answer] = field(
        default_factory=lambda: {"/health/ready": Answer(), "/health/live": Answer(), "/v1/models": listing(ENTRY), "/metrics": Answer()}
    )


@contextmanager
def scripted() -> Generator[Scripted]:
    found = Scripted()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            size = int(self.headers.get("content-length", 0))
            found.heard.append((self.path, self.headers.get("authorization"), self.rfile.read(size)))
            answer = found.answers.get(self.path, Answer(status=404))
            if answer.may_go is not None:
                answer.may_go.wait()
            self.send_response(answer.status)
            for name, value in {**answer.headers, "content-length": str(len(answer.content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.content)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Write no log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
