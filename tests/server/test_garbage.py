"""Requests leave no garbage that only Python's collector can free: collecting it pauses all streams."""

from __future__ import annotations

import gc
import json
import socket
import time

import pytest

from server.http import protocol
from tests.server.meddler import message_of

NUM_REQUESTS = 50
PER_CONNECTION = 20  # objects: the transports of asyncio refer to themselves in Python 3.11


def request(method: str, path: str, body: object = None, version: str = "1.1") -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/{version}\r\nhost: x\r\nconnection: keep-alive\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def ask(client: socket.socket, data: bytes) -> None:
    client.sendall(data)
    message_of(client)


def garbage_of(server, data: bytes) -> int:
    """Return the number of unreachable objects after some requests on one connection."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        ask(client, data)
        gc.collect()
        gc.disable()
        try:
            for _ in range(NUM_REQUESTS):
                ask(client, data)
            time.sleep(0.05)  # the server finishes the last request after its answer
            return gc.collect()
        finally:
            gc.enable()


REQUESTS = {
    "a probe": request("GET", "/health/live"),
    "no path": request("GET", "/nothing"),
    "no valid body": request("POST", "/v1/completions", {}),
    "tokens": request("POST", "/tokenize", {"prompt": "a b"}),
    "a completion": request("POST", "/v1/completions", {"model": "null", "prompt": "a", "max_tokens": 2}),
    "HTTP/1.0": request("POST", "/tokenize", {"prompt": "a b"}, "1.0"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_leaves_no_cycles(shared_server, name):
    assert garbage_of(shared_server, REQUESTS[name]) < NUM_REQUESTS + PER_CONNECTION


def test_a_cycle_per_request_is_found(shared_server, monkeypatch):
    """With a cycle that refers to its own `send`, the test above fails."""
    framed = protocol.framed

    def circular(app, cycle):
        cycle.itself = cycle
        return framed(app, cycle)

    monkeypatch.setattr(protocol, "framed", circular)
    assert garbage_of(shared_server, REQUESTS["a probe"]) > 2 * NUM_REQUESTS


def test_a_closed_connection_leaves_little(shared_server):
    gc.collect()
    gc.disable()
    try:
        for _ in range(NUM_REQUESTS):
            with socket.create_connection(("127.0.0.1", shared_server.port)) as client:
                ask(client, REQUESTS["no path"])
        time.sleep(0.05)
        assert gc.collect() < PER_CONNECTION * NUM_REQUESTS
    finally:
        gc.enable()
