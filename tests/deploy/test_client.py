"""The client that the commands use. Prepared answers take the place of a server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from deploy.client import Client, ServerFault, _fault, segment

ANSWERS: dict[str, tuple[int, bytes]] = {
    "/v1/models": (
        200,
        b'{"data": [{"id": "a", "generates": true}, {"id": "only embeds", "generates": false}, {"id": "b", "generates": true}, '
        b'{"id": "base", "generates": true, "chats": false}]}',
    ),
    "/v1/chat/completions": (
        200,
        b': a heartbeat\n\ndata: {"choices": [{"delta": {"role": "assistant"}}]}\n\ndata: {"choices": [{"delta": {"content": "hel"}}]}\n\n'
        b'data: {"choices": [{"delta": {"content": "lo"}}]}\n\ndata: {"choices": []}\n\ndata: [DONE]\n\ndata: {"never": 1}\n\n',
    ),
    "/broken": (200, b'data: {"ok": 1}\n\ndata: {"error": {"message": "the worker died", "code": "generation_failed"}}\n\n'),
    "/operation": (200, b'data: {"object": "operation", "error": {"message": "in the load"}}\n\ndata: [DONE]\n\n'),
    "/full": (
        507,
        b'{"error": {"message": "too large", "type": "server_error", "code": "insufficient_memory", "required_bytes": 5242880}}',
    ),
    "/closed": (403, b'{"error": {"message": "/closed needs an admin key", "code": "admin_key_required"}}'),
    "/odd": (502, b"<html>a proxy</html>"),
    "/other": (404, b'{"error": "no such page"}'),
    "/list": (404, b"[1]"),
    "/page": (200, b"<html>a page</html>"),
    "/numbers": (200, b"[1, 2]"),
    "/lines": (200, b"data: <html>\n\n"),
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


def test_models_that_can_be_talked_to(client: Client) -> None:
    assert client.chat_models() == ["a", "b"]


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
    with pytest.raises(ServerFault, match=r"too large \(required 5.0 MiB\)"):
        client.get("/full")


def test_a_missing_key_says_where_to_put_it(client: Client) -> None:
    with pytest.raises(ServerFault, match="needs an admin key; give a key by RELAXSERVE_KEY or --key"):
        client.get("/closed")


def test_an_answer_of_somebody_else_has_a_status(client: Client) -> None:
    for path, status in (("/odd", 502), ("/other", 404), ("/list", 404)):
        with pytest.raises(ServerFault, match=f"{client.url} answered with status {status}, but not with an error of relaxserve"):
            client.get(path)


def test_what_is_no_server_of_ours_is_told(client: Client) -> None:
    for path in ("/page", "/numbers"):
        with pytest.raises(ServerFault, match=rf"the server at {client.url} is not relaxserve \(.*\); give the right address by --url"):
            client.get(path)
    with pytest.raises(ServerFault, match="is not relaxserve"):
        list(client.events("GET", "/lines"))


@contextmanager
def saying(said: bytes) -> Generator[Client]:
    """Yield the client of a server that answers one connection with these bytes."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        yield Client(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


@pytest.mark.parametrize("said", [b"garbage\r\n", b"", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"])
def test_what_speaks_no_http_is_told(said: bytes) -> None:
    with saying(said) as client, pytest.raises(ServerFault, match=r"give (the right|its) address by --url"):
        client.get("/x")


@pytest.mark.parametrize("said", [b"", b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n10\r\ndata: {"ok": 1}\n\n\r\n'])
def test_a_server_that_ends_within_an_answer_is_told(said: bytes) -> None:
    """It may be relaxserve: its process was killed."""
    with saying(said) as client, pytest.raises(ServerFault, match="broke off its answer; see its log"):
        list(client.events("GET", "/x"))


@pytest.mark.parametrize("url", ["", "somewhere", "ftp://x", "http://", "http://x:port", "http://x:70000", "http://[::1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ServerFault, match="expected http://HOST:PORT"):
        Client(url)


@pytest.mark.parametrize("key", ["a\nb", "schlüssel"])
def test_a_key_that_cannot_be_sent_is_refused_unseen(key: str) -> None:
    with pytest.raises(ServerFault, match="expected printable ASCII") as caught:
        Client("http://127.0.0.1:9", key)
    assert key not in str(caught.value)


def test_the_key_travels(client: Client) -> None:
    with client._open("GET", "/v1/models", None) as response:  # the fake server returns the received key in a header
        assert response.headers["x-key"] == "Bearer secret-key"


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert Client(client.url).chat_models() == ["a", "b"]


def test_names_are_parts_of_paths() -> None:
    assert segment("org/name with space") == "org%2Fname%20with%20space"


def test_a_refusal_for_memory_tells_what_unloading_would_free() -> None:
    error = {"message": "it does not fit", "required_bytes": 3 << 20, "evictable": [{"model": "qwen", "bytes": 5 << 20}], "param": None}
    assert str(_fault({"error": error})) == "it does not fit (required 3.0 MiB, unloading qwen frees 5.0 MiB)"
    assert str(_fault({"error": {**error, "evictable": []}})) == "it does not fit (required 3.0 MiB)"
