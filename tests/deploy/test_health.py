"""The health check of a container finds the server wherever it listens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from deploy import health
from deploy.health import lives
from deploy.listening import listen

TIMEOUT_S = 60.0
OWN = [Path(f"/proc/{os.getpid()}")]


class Health(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health/live" else 404)
        self.send_header("content-length", "0")
        self.end_headers()


@contextmanager
def served(host: str, status: int = 200) -> Generator[int]:
    """Serve the path of the health check, and yield the port."""
    with listen(host, 0) as sock:
        server = HTTPServer(("", 0), type("Answering", (Health,), {"status": status}), bind_and_activate=False)
        server.socket.close()
        server.socket = sock
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield sock.getsockname()[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_server_is_found_on_any_address_and_port(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Container engines may give a proxy to every container, by variables that Python's library obeys."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with served(host):
        assert lives(OWN)


def test_what_is_no_server_that_lives_does_not_count() -> None:
    assert not lives(OWN)
    with served("127.0.0.1", status=503):
        assert not lives(OWN)
    with listen("127.0.0.1", 0):  # accepts connections, and answers nothing
        assert not lives(OWN)


def test_another_socket_beside_the_server_does_not_matter() -> None:
    with listen("127.0.0.1", 0), served("127.0.0.1"), listen("127.0.0.1", 0):
        assert lives(OWN)


def test_a_server_is_found_while_other_sockets_answer_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    waited: list[bool] = []

    def answers(place: tuple[str, int]) -> bool:
        if place[1] != port:
            waited.append(over.wait(TIMEOUT_S))
        return place[1] == port

    monkeypatch.setattr(health, "_answers", answers)
    with ExitStack() as sockets:
        for _ in range(50):  # more than a pool has threads by default
            sockets.enter_context(listen("127.0.0.1", 0))
        port = sockets.enter_context(listen("127.0.0.1", 0)).getsockname()[1]
        sockets.callback(over.set)
        assert lives(OWN) and not waited


def test_the_check_ends_while_other_sockets_answer_nothing() -> None:
    patient = f"from deploy import health; health.WAIT_S = {10 * TIMEOUT_S}; health.main()"
    with listen("127.0.0.1", 0), served("127.0.0.1"):
        assert subprocess.run([sys.executable, "-c", patient], check=False, timeout=TIMEOUT_S).returncode == 0


def test_the_module_looks_at_all_processes() -> None:
    with served("127.0.0.1"):
        assert subprocess.run([sys.executable, "-m", "deploy.health"], check=False).returncode == 0
