"""Test that `Page.wait` goes on if the page in headless Chromium navigates while a test waits for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.lab.chromium import NavigatedError, Page

pytestmark = pytest.mark.xdist_group("web")
NEVER = "new Promise(() => {})"


class Titles(BaseHTTPRequestHandler):
    """Answers each path with a document that has the path as its text."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(f"<link rel=icon href=data:,><body>{self.path}".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def sites() -> Iterator[list[str]]:
    """Yield the addresses of two sites. Chromium runs documents of different sites in different processes."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Titles) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield [f"http://{host}:{server.server_port}" for host in ("127.0.0.1", "localhost")]
        server.shutdown()


@pytest.mark.parametrize("to", [0, 1], ids=["same site", "other site"])
def test_waiting_survives_a_navigation(page: Page, sites: list[str], to: int) -> None:
    page.open(f"{sites[0]}/first")
    second = f"{sites[to]}/second"
    leave = f"(location.href = {json.dumps(second)}, {NEVER})"
    with pytest.raises(NavigatedError):
        page.js(leave)
    page.open(f"{sites[0]}/first")
    page.wait(f"location.pathname === '/second' || {leave}")
    page.see("/second")
    assert page.js("location.href") == second
