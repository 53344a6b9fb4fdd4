"""The client of the commands, against answers that a server might give."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from deploy.client import Client, ServerFault, segment

ANSWERS: dict[str, tuple[int, bytes]] = {
    "/v1/models": (200, b'{"data": [{"id": "a"}, {"id": "b"}]}'),
    "/v1/chat/completions": (
        200,
        b': a heartbeat\n\ndata: {"choices": [{"delta": {"role": "assistant"}}]}\n\ndata: {"choices": [{"delta": {"content": "hel"}}]}\n\n'
        b'data: {"choices": [{"delta": {"content": "lo"}}]}\n\ndata: {"choices": []}\n\ndata: [DONE]\n\ndata: {"never": 1}\n\n',
    ),
    "/broken": (200, b'data: {"ok": 1}\n\ndata: {"error": {"message": "the worker died", "code": "generation_failed"}}\n\n'),
    "/operation": (200, b'data: {"object": "operation", "error": {"message": "in the load"}}\n\n'),
    "/full": (507, b'{"error": {"message": "too large", "type": "server_error", "code": "insufficient_memory", "required_bytes": 5}}'),
    "/closed": (403, b'{"error": {"message": "/closed needs an admin key", "code": "admin_key_required"}}'),
    "/odd": (502, b"<html>a proxy</html>"),
}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = ANSWERS[self.path]
        self.send_response(status)
        self.send_header("x-key", self.headers.get("authorization", ""))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Client(f"http://127.0.0.1:{server.server_port}/", "secret-key")
        server.shutdown()
        thread.join()


def test_models(client: Client) -> None:
    assert client.models() == ["a", "b"]


def test_a_stream_ends_at_done_and_has_no_heartbeats(client: Client) -> None:
    assert list(client.chat("a", [{"role": "user", "content": "hi"}])) == ["hel", "lo"]


def test_an_error_within_a_stream_is_raised_where_it_comes(client: Client) -> None:
    events = client.events("GET", "/broken")
    assert next(events) == {"ok": 1}
    with pytest.raises(ServerFault, match="the worker died") as caught:
        next(events)
    assert caught.value.code == "generation_failed"


def test_an_operation_that_failed_is_no_broken_stream(client: Client) -> None:
    assert [e["error"]["message"] for e in client.events("GET", "/operation")] == ["in the load"]


def test_an_error_tells_its_figures(client: Client) -> None:
    with pytest.raises(ServerFault, match=r"too large \(required_bytes 5\)"):
        client.get("/full")


def test_a_missing_key_says_where_to_put_it(client: Client) -> None:
    with pytest.raises(ServerFault, match="needs an admin key; give one by RELAXSERVE_KEY or --key"):
        client.get("/closed")


def test_an_answer_of_somebody_else_has_a_status(client: Client) -> None:
    with pytest.raises(ServerFault, match="status 502"):
        client.get("/odd")


def test_the_key_travels(client: Client) -> None:
    with client._open("GET", "/v1/models", None) as response:  # the header is all that is wanted
        assert response.headers["x-key"] == "Bearer secret-key"


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert Client(client.url).models() == ["a", "b"]


def test_names_are_parts_of_paths() -> None:
    assert segment("org/name with space") == "org%2Fname%20with%20space"
