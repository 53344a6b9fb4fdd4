"""`python -m tests.lab real` reads probabilities of a peer and memory of processes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from deploy.quality.measure import Exact
from tests.lab.serving import real
from tests.lab.serving.real import Place, divergence, predicted

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


def test_a_peer_says_the_probabilities_of_some_tokens(peer: Place) -> None:
    assert predicted(peer, [5, 6]) == {3: -0.5, 1: -2.0}


def test_the_divergence_from_some_tokens_is_at_most_that_from_all() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.full(50, 0.3), 2)
    order = np.argsort(-p)[:30]
    expected = Exact(order[None].astype(np.int32), np.log(p[order])[None].astype(np.float32), np.zeros(1, np.float32))
    whole = float((p * np.log(p / q)).sum())
    of_some = [divergence(expected, {int(token): float(np.log(q[token])) for token in np.argsort(-q)[:count]}) for count in (10, 30, 50)]
    assert 0 < of_some[0] < of_some[1] < of_some[2] < whole
    same = {int(token): float(np.log(p[token])) for token in order[:20]}
    assert divergence(expected, same) == pytest.approx(0, abs=1e-6)


def test_memory_is_that_of_the_process_and_of_those_below(peer: Place) -> None:
    assert peer.resident_bytes >= real._pss(os.getpid()) // 2 > 0
