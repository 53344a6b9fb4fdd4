"""HTTP/1.0 requests over plain sockets, as sent by `ab` and old proxies. Answers are not chunked, and a client may close the connection
before it has read the whole answer."""

from __future__ import annotations

import json
import time

import pytest

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def request(method: str, path: str, body: dict | None = None, *, version: str = "1.0", headers: str = "") -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    measure = f"content-type: application/json\r\ncontent-length: {len(content)}\r\n" if content else ""
    return f"{method} {path} HTTP/{version}\r\nhost: 127.0.0.1\r\n{headers}{measure}\r\n".encode() + content


def parted(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert len(headers) == len(lines), f"a header occurs twice: {lines}"
    return int(status.split()[1]), headers, body


def talk(server, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send a request and return the answer's status, headers and body. The server must close the connection after the answer."""
    with server.connect() as sock:
        sock.sendall(data)
        return parted(server.read_all(sock))


def test_a_stream_ends_with_the_connection(server):
    status, headers, body = talk(server, request("POST", "/v1/chat/completions", {**CHAT, "stream": True}))
    assert status == 200 and headers["connection"] == "close"
    assert "transfer-encoding" not in headers and "content-length" not in headers
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and len(events) > 4
    for event in events[:-2]:
        assert json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (request("POST", "/v1/chat/completions", CHAT), 200),
        (request("POST", "/v1/chat/completions", {**CHAT, "model": "other"}), 404),
        (request("POST", "/v1/chat/completions", {**CHAT, "model": "other", "stream": True}), 404),
        (request("GET", "/metrics"), 200),
        (request("GET", "/nowhere"), 404),
        (request("GET", "/v1/models", headers="connection: close\r\n"), 200),
    ],
    ids=["answer", "error", "error of a stream", "metrics", "nowhere", "closing"],
)
def test_other_answers_are_measured_and_close(server, data, expected):
    status, headers, body = talk(server, data)
    assert status == expected and headers["connection"] == "close"
    assert "transfer-encoding" not in headers and int(headers["content-length"]) == len(body) > 0


def test_a_connection_is_kept_for_who_asks(server):
    asking = "connection: Keep-Alive\r\n"
    with server.connect() as sock, sock.makefile("rb") as answers:
        for _ in range(2):
            sock.sendall(request("POST", "/v1/chat/completions", CHAT, headers=asking))
            lines = iter(answers.readline, b"\r\n")
            status, headers, _ = parted(b"".join(lines).removesuffix(b"\r\n") + b"\r\n\r\n")
            assert status == 200 and headers["connection"] == "keep-alive"
            assert json.loads(answers.read(int(headers["content-length"])))["object"] == "chat.completion"
        sock.sendall(request("POST", "/v1/chat/completions", {**CHAT, "stream": True}, headers=asking))
        _, headers, body = parted(answers.read())
    assert headers["connection"] == "close" and body.endswith(b"data: [DONE]\n\n"), "without chunks only closing ends a stream"


def test_nothing_is_promised_to_who_cannot_wait_for_it(server):
    status, headers, _ = talk(server, request("POST", "/v1/chat/completions", CHAT, headers="expect: 100-continue\r\n"))
    assert status == 200 and "content-length" in headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "behind",
    [b"junk\r\n\r\n", b"\0\1\2" * 1000, request("GET", "/metrics"), request("GET", "/health", version="1.1")],
    ids=["words", "bytes", "1.0", "1.1"],
)
def test_what_follows_the_last_request_changes_nothing(serve, answering, behind, stream):
    server = serve(script=answering("x" * 20, interval_s=0.005))
    status, headers, body = talk(server, request("POST", "/v1/chat/completions", {**CHAT, "max_tokens": 20, "stream": stream}) + behind)
    assert status == 200 and headers["connection"] == "close"
    assert body.endswith(b"data: [DONE]\n\n") if stream else json.loads(body)["object"] == "chat.completion"
    assert server.http().get("/health").status_code == 200


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("behind", [b"", request("GET", "/health", version="1.1")], ids=["nothing", "another"])
def test_who_leaves_in_the_middle_is_noticed(serve, answering, version, behind):
    server = serve(script=answering("x" * 100_000, interval_s=0.005, max_context=1 << 20))
    body = {**CHAT, "max_tokens": 100_000, "stream": True}
    with server.connect() as sock:
        sock.sendall(request("POST", "/v1/chat/completions", body, version=version) + behind)
        assert sock.recv(1 << 16)
    end = time.monotonic() + 60
    while not server.worker.aborted and time.monotonic() < end:
        time.sleep(0.01)
    assert server.worker.aborted, "the worker writes for a client that has gone"
