"""A real nginx with the configuration of deploy/nginx in front of a server: streams, and the console below a prefix."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.api.request.fields import MAX_NAMES
from server.http.auth import METRICS_PATHS
from tests.conftest import serving_demo
from tests.debian import program
from tests.deploy.test_host_configuration import NGINX, whole

CONSOLE = Path(__file__).parents[2] / "server" / "console"
# as docs/deployment.md says
BELOW = re.sub(r"(location (?:= )?)/", r"\1/llm/", NGINX).replace('"(?s)^(', '"(?s)^/llm(')
PATIENCE_S = 60.0


@contextmanager
def nginx_before(upstream: str, folder: Path, text: str = NGINX) -> Iterator[Path]:
    """Start an nginx that passes requests on to `upstream`, a host and a port. Yield the socket at which it listens."""
    place = folder / "socket"
    path = whole(folder, f"listen unix:{place};", upstream=upstream, text=text)
    with subprocess.Popen([program("nginx"), "-c", path]) as process:
        try:
            until = time.monotonic() + PATIENCE_S
            while not place.exists():
                assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()
                time.sleep(0.01)
            yield place
        finally:
            process.terminate()


@pytest.fixture
def front(tmp_path: Path) -> Callable[..., Any]:
    """Return a context manager: an HTTP client of an nginx that passes requests on to `upstream`, a host and a port."""

    @contextmanager
    def start(upstream: str, text: str = NGINX) -> Iterator[httpx.Client]:
        with (
            nginx_before(upstream, tmp_path, text) as place,
            httpx.Client(transport=httpx.HTTPTransport(uds=str(place)), base_url="http://localhost", timeout=PATIENCE_S) as client,
        ):
            yield client

    return start


def test_events_arrive_while_the_stream_goes_on(front: Callable[..., Any]) -> None:
    """The server sends its second event only after the client has received the first one."""
    has_first = threading.Event()

    class Events(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None: ...

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for data in (b"data: first\n\n", b"data: second\n\n"):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
                has_first.wait(PATIENCE_S)
            self.wfile.write(b"0\r\n\r\n")

    with ThreadingHTTPServer(("127.0.0.1", 0), Events) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            with front(f"127.0.0.1:{server.server_port}") as client, client.stream("GET", "/v1/events") as answer:
                pieces = answer.iter_raw()
                assert b"first" in next(pieces) and not has_first.is_set()
                has_first.set()
                assert b"second" in b"".join(pieces)
        finally:
            has_first.set()
            server.shutdown()


def test_the_longest_header_of_the_server_passes(front: Callable[..., Any]) -> None:
    """The header names the fields that the server ignores: MAX_NAMES names of 64 characters, each of which may take 12 bytes."""
    names = ", ".join(["%F0%9F%98%80" * 64] * MAX_NAMES)

    class Ignoring(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None: ...

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("x-ignored-params", names)
            self.send_header("content-length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Ignoring) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            with front(f"127.0.0.1:{server.server_port}") as client:
                answer = client.get("/v1/models")
                assert (answer.status_code, answer.headers.get("x-ignored-params")) == (200, names)
        finally:
            server.shutdown()


@pytest.mark.xdist_group("demo server")
def test_a_chat_streams_through_nginx(front: Callable[..., Any], demo_server: Any) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "stream": True}
    with front(demo_server.url.removeprefix("http://")) as client:
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            events = [line for line in answer.iter_lines() if line.startswith("data: ")]
        for path in METRICS_PATHS:
            assert client.get(path).status_code == 403, "only Prometheus and routers ask for these, and they ask the server itself"
    assert len(events) > 3 and events[-1] == "data: [DONE]" and any("Paris" in event for event in events)


def test_the_console_works_below_a_prefix(front: Callable[..., Any], cache_folder: Path) -> None:
    """Every file that the pages and their modules name is found below the prefix. What is denied is denied there, too."""
    names = [path.relative_to(CONSOLE).as_posix() for path in CONSOLE.rglob("*") if path.suffix in (".js", ".css", ".svg")]
    with serving_demo(cache_folder, "--root-path", "/llm") as server, front(server.url.removeprefix("http://"), BELOW) as client:
        for page in ("/llm/", "/llm/docs"):
            named = re.findall(r'(?:href|src)="([^"#]+)"', client.get(page).text)
            assert named and [name for name in named if client.get(f"/llm/{name}").status_code != 200] == []
        assert [name for name in names if client.get(f"/llm/console/{name}").status_code != 200] == []
        assert client.get("/llm/v1/models").json()["data"][0]["id"] == "demo"
        denied = ("/admin/models", "/models", "/v1/models/demo/unload", "/sleep", "/api/delete", *METRICS_PATHS)
        assert {path: client.get(f"/llm{path}").status_code for path in denied} == dict.fromkeys(denied, 403)
        assert client.get("/v1/models").status_code == 404, "nothing else of this host goes to the server"
        asked = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        assert "sec-websocket-key is absent" in client.get("/llm/v1/realtime", headers=asked).json()["error"]["message"]
