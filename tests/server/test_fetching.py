"""Images are fetched only from hosts that the operator allows, and no URL leads to a private address."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from server.fetching import IMAGES, Fetcher, FetchFault
from server.settings import ServerSettings, SettingsError

IMAGE = b"\x89PNG not really"
MOST = 1000


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        port = self.server.server_address[1]
        redirects = {
            "/here": "/image.png",
            "/round": "/round",
            "/away": "http://elsewhere.example/image.png",
            "/file": "file:///etc/passwd",
        }
        if self.path in redirects:
            self.send_response(302)
            self.send_header("location", redirects[self.path])
            self.end_headers()
        elif self.path == "/slow":
            self.server.released.wait(60)
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            while not self.server.released.is_set():
                try:
                    self.wfile.write(b"x" * 256)
                except OSError:
                    return
        elif self.path == "/declared":
            self.send_response(200)
            self.send_header("content-length", str(MOST + 1))
            self.end_headers()
        elif self.path == "/rubbish":
            self.wfile.write(b"SSH-2.0-OpenSSH\r\n\r\n")
        elif self.path == "/absent":
            self.send_error(404)
        else:
            assert self.headers["host"] == f"images.example:{port}" and "authorization" not in self.headers
            self.send_response(200)
            self.end_headers()
            self.wfile.write(IMAGE)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Serve as images.example on the loopback, which counts as a public address for this test."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    server.released = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    resolve = socket.getaddrinfo
    known = {"images.example": "127.0.0.1", "private.example": "10.0.0.7", "mixed.example": "127.0.0.1"}

    def resolved(host: str, *args: object, **kwargs: object) -> list[tuple[object, ...]]:
        if host == "nowhere.example":
            raise socket.gaierror("unknown")
        found = resolve(known.get(host, host), *args, **kwargs)
        return [*found, *resolve("192.168.1.1", *args, **kwargs)] if host == "mixed.example" else found

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr("server.fetching.is_public", lambda address: str(address) == "127.0.0.1")
    yield server.server_address[1]
    server.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def fetch(port: int) -> Callable[..., bytes]:
    def fetched(url: str, *hosts: str, patience_s: float = 30.0) -> bytes:
        allowed = [host.replace("PORT", str(port)) for host in hosts or ("images.example:PORT",)]

        async def get() -> bytes:
            return await Fetcher(IMAGES, allowed, MOST, patience_s).fetch(url.replace("PORT", str(port)))

        return asyncio.run(get())

    return fetched


@pytest.mark.parametrize("path", ["/image.png?size=1", "/here"])
@pytest.mark.parametrize("host", ["images.example:PORT", "*.example:PORT", "private+images.example:PORT"])
def test_an_image_of_an_allowed_host_is_fetched(fetch: Callable[..., bytes], path: str, host: str) -> None:
    assert fetch(f"http://images.example:PORT{path}", host) == IMAGE


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://images.example:PORT/absent", "status 404"),
        ("http://images.example:PORT/round", "redirects more than 3 times"),
        ("http://images.example:PORT/away", "fetches no images from 'elsewhere.example', port 80"),
        ("http://images.example:PORT/file", "expected http or https"),
        ("http://images.example:PORT/endless", "more than 1000 bytes"),
        ("http://images.example:PORT/declared", "more than 1000 bytes"),
        ("http://images.example:PORT/rubbish", "did not send it"),
        ("http://images.example/image.png", "port 80"),
        ("http://user:secret@images.example:PORT/image.png", "no user"),
        ("http://images.example:PORT/a b", "characters that no URL may have"),
        ("http://images.example:PORT/a\r\nhost: b", "characters that no URL may have"),
        ("http://images.example:99999/", "expected http or https, a host"),
        ("http://127.0.0.1:PORT/image.png", "fetches no images from '127.0.0.1'"),
        ("http://evil.images.example:PORT/image.png", "fetches no images from"),
        ("https://images.example:PORT/image.png", "did not send it|cannot be reached"),
    ],
)
def test_what_cannot_be_fetched_is_named(fetch: Callable[..., bytes], url: str, said: str) -> None:
    with pytest.raises(FetchFault, match=said):
        fetch(url)


@pytest.mark.parametrize("host", ["private.example", "mixed.example", "10.0.0.7", "169.254.169.254", "[::ffff:10.0.0.7]"])
def test_no_url_leads_to_a_private_address(fetch: Callable[..., bytes], host: str) -> None:
    with pytest.raises(FetchFault, match="private address"):
        fetch(f"http://{host}/image.png", "*")
    with pytest.raises(FetchFault, match="no address"):
        fetch("http://nowhere.example/", "*")


def test_a_slow_host_is_given_up(fetch: Callable[..., bytes]) -> None:
    with pytest.raises(FetchFault, match=r"within 0.2 s \(image_fetch_s\)"):
        fetch("http://images.example:PORT/slow", patience_s=0.2)


def test_nothing_is_fetched_by_default() -> None:
    with pytest.raises(FetchFault, match="image_hosts"):
        asyncio.run(Fetcher(IMAGES, (), MOST, 1.0).fetch("http://images.example/"))


@pytest.mark.parametrize("host", ["http://a", "a/b", "*a", "a:b", "", "user@a"])
def test_entries_of_other_forms_are_refused(host: str) -> None:
    with pytest.raises(SettingsError, match="image_hosts has"):
        ServerSettings(image_hosts=(host,))
