"""A server of files over HTTP: the path of a file is its number."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serving_files(files: Sequence[bytes]) -> Generator[str]:
    """Serve the files. Yield the host and the port."""

    class Files(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(files[int(self.path[1:])])

        def log_message(self, format: str, *args: object) -> None:
            """Write no log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Files) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{http.server_address[1]}"
        http.shutdown()
