"""chat.html in headless Chromium: it loads, answers, keeps the weights, and asks nobody for anything afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.browser.chromium import Page
from tests.deploy.export.test_web import ANSWER, QUESTION

pytestmark = pytest.mark.xdist_group("web")


class Files(SimpleHTTPRequestHandler):
    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript", ".wasm": "application/wasm"}  # noqa: RUF012

    def log_message(self, *_: object) -> None:
        pass

    def log_request(self, *_: object) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]


@pytest.fixture
def served(site: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of the site, and the paths asked for so far."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(site))) as server:
        server.asked = asked = list[str]()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def test_the_page_chats(page: Page, served: tuple[str, list[str]]) -> None:
    address, asked = served
    page.open(f"{address}/chat.html")
    page.see("Ready, wasm-relaxed", "#status")
    loaded = len(asked)
    page.fill("#prompt", QUESTION)
    page.click("#send")
    page.see(ANSWER, ".assistant")
    page.see("per second", "#status")
    assert asked[loaded:] == [], "after loading, nothing is asked for"
    page.reload()
    page.see("Ready, wasm-relaxed", "#status")
    assert sum("weights-" in path for path in asked) == 1, "the second visit takes the weights from the browser's files"
