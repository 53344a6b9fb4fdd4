"""Serve a folder of static files on localhost."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Site(ThreadingHTTPServer):
    """A server that lists the paths of its requests."""

    asked: list[str]


class Files(SimpleHTTPRequestHandler):
    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript", ".wasm": "application/wasm"}  # noqa: RUF012

    def log_message(self, format: str, *args: object) -> None:
        pass

    def log_request(self, code: object = "-", size: object = "-") -> None:
        assert isinstance(self.server, Site)
        self.server.asked.append(self.path)


@contextmanager
def serving(folder: Path, files: type[Files] = Files) -> Generator[tuple[str, list[str]]]:
    """Yield the address of the folder over HTTP, and the list of paths requested so far."""
    with Site(("127.0.0.1", 0), partial(files, directory=str(folder))) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", server.asked
        finally:
            server.shutdown()
            thread.join()
