"""A server that stops leaves no connection open, whatever state the connection is in."""

from __future__ import annotations

import gc
import socket
import time

import pytest

from server.http.server import ACCEPTED_AT_ONCE
from tests.doubles.worker import NullScript
from tests.server.conftest import Running


def stop(server: Running) -> float:
    """Stop the server; return how long it took, in seconds."""
    begin = time.monotonic()
    server.stop()
    gc.collect()  # an unclosed transport causes a warning when it is collected
    return time.monotonic() - begin


@pytest.mark.parametrize("asks", [False, True])
def test_a_connection_accepted_while_the_server_stops(serve, asks):
    """The connection has been accepted, but is not among the server's connections when the server begins to stop, or it still waits to be
    accepted."""
    (answer,) = answers_while_stopping(serve(drain_s=60.0), 1, asks=asks)
    assert answer[:9] == (b"HTTP/1.1 " if asks else b"")


def test_connections_that_wait_to_be_accepted_while_the_server_stops(serve):
    """The loop accepts a few connections at a time, and the kernel resets those that wait when the port is closed."""
    answers = answers_while_stopping(serve(drain_s=60.0), 3 * ACCEPTED_AT_ONCE, asks=True)
    assert all(answer.startswith(b"HTTP/1.1 503 ") and b"connection: close" in answer for answer in answers)


def answers_while_stopping(server: Running, num_clients: int, *, asks: bool) -> list[bytes]:
    """Connect to a server in the moment in which it begins to stop. Return what it answers."""
    socks: list[socket.socket] = []

    def connect_and_stop() -> None:
        for _ in range(num_clients):
            socks.append(server.connect())
            if asks:
                socks[-1].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        server.registry.closing = server.server.should_exit = True
        time.sleep(0.2)  # uvicorn's next look for its end is due too, so it follows the accepting in one iteration of the loop

    server.loop.call_soon_threadsafe(connect_and_stop)
    assert stop(server) < 30
    answers: list[bytes] = []
    for sock in socks:
        with sock:
            answers.append(server.read_all(sock))
    return answers


def test_a_connection_that_reads_the_rest_of_a_refused_body(serve):
    server = serve(drain_s=1.0, max_body_bytes=1000)
    with server.connect() as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 2000\r\n\r\n{")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
        stop(server)


def test_a_client_that_still_sends_reads_why_it_was_refused_while_the_server_stops(serve):
    """Closing the connection at once would reset it, and the reset would destroy the answer on its way."""
    server = serve(drain_s=60.0, max_body_bytes=8 << 20)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    with server.connect() as sock:
        sock.sendall(head)
        while not server.server.server_state.connections:
            time.sleep(0.001)
        server.server.should_exit = True
        while not server.server._held.is_stopping:
            time.sleep(0.001)
        sock.sendall(b"not a chunk\r\n" + b"x" * (4 << 20))
        answer = server.read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"chunk" in answer
    stop(server)


def test_a_kept_connection_is_told_that_it_closes(serve, answering):
    server = serve(script=answering("Hello", interval_s=0.1), drain_s=60.0)
    with server.connect() as sock:
        sock.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 32\r\n\r\n{"prompt": "x", "max_tokens": 5}')
        while not server.worker.submits:
            time.sleep(0.001)
        server.registry.closing = True
        server.server.should_exit = True
        answer = server.read_all(sock)
    assert answer.startswith(b"HTTP/1.1 200 ") and b"connection: close" in answer
    stop(server)


def test_a_request_that_is_not_answered_in_time_gets_an_error(serve):
    server = serve(script=NullScript(prefill_s=600.0), drain_s=1.0)
    with server.connect() as sock:
        sock.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 15\r\n\r\n{"prompt": "x"}')
        while not server.worker.submits:
            time.sleep(0.01)
        stop(server)
        answer = server.read_all(sock)
    assert answer.startswith(b"HTTP/1.1 503 ") and b"shutting_down" in answer


def test_a_client_that_reads_nothing(serve):
    server = serve(script=NullScript(answer=lambda _submit, _choice: [[120] * 1000] * 20_000, max_context=1 << 30), drain_s=1.0)
    with server.connect() as sock:
        body = b'{"prompt": "x", "stream": true, "max_tokens": 20000000}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        sock.sendall(head + body)
        while not server.worker.submits:
            time.sleep(0.01)
        assert stop(server) > 1.0  # the server waited for the client
