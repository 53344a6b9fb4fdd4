"""A client that closes only its sending side still gets its answer. If a client closes both sides, its request is aborted."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress

import pytest


def request(method: str, path: str, body: dict | None = None, version: str = "1.1") -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/{version}\r\nhost: 127.0.0.1\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


def ask_and_close_half(server, data: bytes) -> bytes:
    with server.connect() as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        return server.read_all(sock).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_half_closed_clients_are_answered(serve, answering, stream, version):
    """A client that closed its sending side gets its answer, even if the answer is complete only after the server has checked several times
    whether the connection is closed."""
    server = serve(script=answering("Hello", interval_s=0.1))
    body = {"prompt": "x", "max_tokens": 5, "stream": stream}
    answer = ask_and_close_half(server, request("POST", "/v1/completions", body, version))
    assert answer.split()[1] == b"200" and b"length" in answer, answer
    assert (b"[DONE]" in answer) == stream
    assert not server.worker.aborted


def test_a_stream_of_http_1_0_goes_on_after_the_time_for_its_headers(serve, answering):
    """There is no interim answer by which to find out whether the client is there, but the stream itself is written."""
    server = serve(script=answering("Hello", interval_s=0.2), header_timeout_s=0.4)
    answer = ask_and_close_half(server, request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 5, "stream": True}, "1.0"))
    assert b"[DONE]" in answer and not server.worker.aborted


def test_a_silent_stream_of_lines_of_http_1_0_goes_on_after_the_time_for_its_headers(serve, answering, monkeypatch):
    monkeypatch.setattr("server.api.answer.sse.PATIENCE_S", 0.01)
    server = serve(script=answering("Hello", prefill_s=4.0), header_timeout_s=2.0)
    answer = ask_and_close_half(server, request("POST", "/api/generate", {"model": "null", "prompt": "x"}, "1.0"))
    assert b'"done":true' in answer and not server.worker.aborted


def test_each_request_of_http_1_0_has_the_time_for_itself(serve, answering):
    server = serve(script=answering("Hello", interval_s=0.12), header_timeout_s=0.9)
    asked = request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 5}, "1.0").replace(
        b"\r\n", b"\r\nconnection: keep-alive\r\n", 1
    )
    answer = ask_and_close_half(server, asked * 2)
    assert answer.count(b" 200 OK") == 2 and not server.worker.aborted


def test_every_request_of_a_half_closed_pipeline_is_answered(server):
    answer = ask_and_close_half(server, request("GET", "/health/live") * 3)
    assert answer.count(b"HTTP/1.1 200 OK") == 3


def test_answers_that_are_not_yet_sent_reach_a_half_closed_client(server, monkeypatch):
    """Writes are delayed until the end of an iteration of the event loop. If the client's end of file is read before that, the answers are
    sent before the connection is closed. Here, only closing the connection sends them."""
    monkeypatch.setattr("server.http.write_coalescing.PendingWrites.add", lambda pending, transport: None)
    with server.connect() as sock:
        sock.sendall(request("GET", "/health/live") * 3)
        time.sleep(0.5)  # all answers are written by then; on a slower machine the test checks less
        sock.shutdown(socket.SHUT_WR)
        assert server.read_all(sock).count(b"HTTP/1.1 200 OK") == 3


def test_half_a_request_is_not_awaited(server):
    assert ask_and_close_half(server, request("GET", "/health/live")[:-2]) == b""
    assert b"200" not in ask_and_close_half(server, request("POST", "/v1/completions", {"prompt": "x"})[:-1])


def test_a_silent_stream_notices_that_its_client_has_left(serve, answering):
    """A client that leaves after it has read everything ends its half of the connection as one that only stops sending. Only writes show
    the difference, so a stream that is half closed does not wait for its next heartbeat."""
    server = serve(script=answering("x", prefill_s=600), heartbeat_s=600.0)
    with server.connect() as sock:
        sock.sendall(request("POST", "/v1/completions", {"prompt": "x", "stream": True}))
        while b": still working" not in sock.recv(1 << 16):
            pass  # interim answers, and the headers
    end = time.monotonic() + 60
    while not server.worker.aborted:
        assert time.monotonic() < end, "the worker still writes for a client that is gone"
        time.sleep(0.005)


def test_a_silent_stream_of_lines_notices_that_its_client_has_left(serve, answering, monkeypatch):
    """Lines of JSON have no comments, so nothing can be sent between the head of the answer and its first line. The head waits for it."""
    monkeypatch.setattr("server.api.answer.sse.PATIENCE_S", 0.01)
    server = serve(script=answering("x", prefill_s=600), heartbeat_s=600.0)
    with server.connect() as sock:
        sock.sendall(request("POST", "/api/generate", {"model": "null", "prompt": "x"}))
        sock.settimeout(1.0)
        with suppress(TimeoutError):
            sock.recv(1 << 16)
    end = time.monotonic() + 20
    while not server.worker.aborted:
        assert time.monotonic() < end, "the worker still writes for a client that is gone"
        time.sleep(0.005)


def test_a_silent_stream_that_is_half_closed_goes_on(serve, answering):
    server = serve(script=answering("Hello", prefill_s=2.0), heartbeat_s=600.0)
    answer = ask_and_close_half(server, request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 5, "stream": True}))
    assert b"[DONE]" in answer and answer.count(b": still working") >= 2 and not server.worker.aborted


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closed_everything_is_given_up(serve, answering, stream):
    server = serve(script=answering("x" * 4000, interval_s=0.05))
    with server.connect() as sock:
        sock.sendall(request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2000, "stream": stream}))
        end = time.monotonic() + 60
        while not server.worker.running and time.monotonic() < end:
            time.sleep(0.005)
    while not server.worker.aborted and time.monotonic() < end:
        time.sleep(0.005)
    assert server.worker.aborted, "the worker still writes for a client that is gone"
