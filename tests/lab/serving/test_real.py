"""What `python -m tests.lab real` reads of a peer and of processes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from tests.lab.serving import real
from tests.lab.serving.real import Place, predicted

PROBABLE = [{"id": 3, "logprob": -0.5}, {"id": 1, "logprob": -2.0}]


class Peer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["prompt"] == [5, 6] and body["n_predict"] == 1 and not body["temperature"]
        content = json.dumps({"completion_probabilities": [{"top_logprobs": PROBABLE}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def peer() -> Iterator[Place]:
    with HTTPServer(("127.0.0.1", 0), Peer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Place(f"http://127.0.0.1:{server.server_port}", os.getpid(), 0.0)
        server.shutdown()
        thread.join()


def test_tokens_that_the_peer_does_not_return_are_as_probable_as_its_least(peer: Place) -> None:
    assert predicted(peer, np.array([5, 6]).tolist(), 5).tolist() == [[-2.0, -2.0, -2.0, -0.5, -2.0]]


def test_memory_is_that_of_the_process_and_of_those_below(peer: Place) -> None:
    assert peer.resident_bytes >= real._pss(os.getpid()) // 2 > 0
