"""Images are fetched only from hosts that the operator allows, and no URL leads to a private address."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from server.errors import ApiError
from server.fetching import AT_ONCE, AT_ONCE_OF_HOST, AUDIO, IMAGES, Fetcher, FetchFault, FileKind
from server.settings import ServerSettings, SettingsError
from tests.server.audio.test_hostile import MeasuredLoop

IMAGE = b"\x89PNG not really"
MOST = 1000
MOST_BUSY_S = 0.05  # processor time of one iteration of the event loop


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        redirects = {
            "/here": "/image.png",
            "/round": "/round",
            "/away": "http://elsewhere.example/image.png",
            "/file": "file:///etc/passwd",
            "/broken": "http://[/image.png",
            "/user": "//user:secret@images.example/image.png",
            "/inward": "http://127.0.0.1/image.png",
            "/slowly": f"http://slow.example:{port}/slow",
        }
        if self.path in redirects:
            self.send_response(302)
            self.send_header("location", redirects[self.path])
            self.end_headers()
        elif self.path == "/slow":
            self.server.slow.append(self.path)
            self.server.released.wait(60)
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            while not self.server.released.is_set():
                try:
                    self.wfile.write(b"x" * 256)
                except OSError:
                    return
        elif self.path in ("/pieces", "/continues"):
            piece = b"1\r\nx\r\n" if self.path == "/pieces" else b"HTTP/1.1 100 C\r\n\r\n"
            if self.path == "/pieces":
                self.send_response(200)
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
            with suppress(OSError):  # the client has gone
                for _ in range(8):
                    self.wfile.write(piece * 10_000)
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
        """Write no log."""


class Host(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.released = threading.Event()
        self.slow: list[str] = []  # targets of the requests that wait until it is released


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """Serve as images.example on the loopback, which counts as a public address for this test."""
    server = Host()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    resolve = socket.getaddrinfo
    known = {"images.example": "127.0.0.1", "slow.example": "127.0.0.1", "private.example": "10.0.0.7", "mixed.example": "127.0.0.1"}

    def resolved(host: str, *args: object, **kwargs: object) -> list[tuple[object, ...]]:
        if host == "nowhere.example":
            raise socket.gaierror("unknown")
        found = resolve(known.get(host, host), *args, **kwargs)
        return [*found, *resolve("192.168.1.1", *args, **kwargs)] if host == "mixed.example" else found

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr("server.fetching.is_public", lambda address: str(address) == "127.0.0.1")
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def port(server: Host) -> int:
    return server.server_address[1]


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
        ("http://images.example:PORT/broken", "redirects to 'http://\\[/image.png'; expected a URL"),
        ("http://images.example:PORT/user", "no user"),
        ("http://images.example:PORT/inward", "fetches no images from '127.0.0.1', port 80"),
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


@pytest.mark.parametrize(
    "host",
    ["private.example", "mixed.example", "10.0.0.7", "169.254.169.254", "[::ffff:10.0.0.7]", "2886729729", "0xc0.0250.1", "[::10.0.0.7]"],
)
def test_no_url_leads_to_a_private_address(fetch: Callable[..., bytes], host: str) -> None:
    with pytest.raises(FetchFault, match="private address"):
        fetch(f"http://{host}/image.png", "*")
    with pytest.raises(FetchFault, match="no address"):
        fetch("http://nowhere.example/", "*")


@pytest.mark.parametrize("path", ["/pieces", "/continues"])
def test_a_host_that_sends_tiny_pieces_holds_up_nobody(port: int, path: str) -> None:
    with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
        with pytest.raises(FetchFault):
            runner.run(Fetcher(IMAGES, [f"images.example:{port}"], 1 << 20, 5.0).fetch(f"http://images.example:{port}{path}"))
        loop = runner.get_loop()
        assert isinstance(loop, MeasuredLoop) and loop.busy_s < MOST_BUSY_S


def test_certificates_are_read_once_and_on_no_event_loop(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def contexts() -> ssl.SSLContext:
        threads.append(threading.current_thread())
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    async def fetch() -> None:
        fetcher = Fetcher(IMAGES, [f"images.example:{port}"], MOST, 30.0)
        for _ in range(2):
            with pytest.raises(FetchFault):
                await fetcher.fetch(f"https://images.example:{port}/image.png")

    monkeypatch.setattr(ssl, "create_default_context", contexts)
    asyncio.run(fetch())
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


def test_a_slow_host_is_given_up(fetch: Callable[..., bytes]) -> None:
    with pytest.raises(FetchFault, match=r"within 0.2 s \(image_fetch_s\)"):
        fetch("http://images.example:PORT/slow", patience_s=0.2)


@pytest.mark.parametrize("hosts", [("slow.example", "images.example"), ("*.example",), ("*",)])
@pytest.mark.parametrize("slow", ["slow.example:PORT/slow", "images.example:PORT/slowly"])
def test_a_slow_host_holds_up_no_other(server: Host, port: int, hosts: tuple[str, ...], slow: str) -> None:
    """Fetches are counted by host, even if one entry allows both hosts, or if the other host redirects to this one."""

    async def fetch() -> bytes:
        fetcher = Fetcher(IMAGES, [f"{name}:{port}" for name in hosts], MOST, 600.0)
        waiting = [asyncio.create_task(fetcher.fetch(f"http://{slow.replace('PORT', str(port))}")) for _ in range(3 * AT_ONCE)]
        while len(server.slow) < AT_ONCE_OF_HOST:
            assert not any(task.done() for task in waiting)
            await asyncio.sleep(0.01)
        found = await fetcher.fetch(f"http://images.example:{port}/image.png")
        assert len(server.slow) == AT_ONCE_OF_HOST and not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return found

    assert asyncio.run(fetch()) == IMAGE


@pytest.mark.parametrize("lacking", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, socket.EAI_MEMORY])
@pytest.mark.parametrize("kind", [IMAGES, AUDIO])
@pytest.mark.parametrize("step", ["resolve", "connect", "read"])
def test_a_server_without_descriptors_does_not_blame_the_url(
    port: int, kind: FileKind, step: str, lacking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(lacking, os.strerror(lacking))

    async def refuse_later(*_args: object, **_options: object) -> None:
        refuse()

    match step:
        case "resolve":
            monkeypatch.setattr(socket, "getaddrinfo", refuse)
        case "connect":
            monkeypatch.setattr(asyncio, "open_connection", refuse_later)
        case _:
            monkeypatch.setattr(asyncio.StreamReader, "read", refuse_later)
    with pytest.raises(ApiError, match=os.strerror(lacking)) as caught:
        asyncio.run(Fetcher(kind, [f"images.example:{port}"], MOST, 30.0).given(f"http://images.example:{port}/image.png", "url"))
    assert caught.value.kind is kind.not_decoded and caught.value.kind.status == 503 and caught.value.param == "url"


def test_the_turns_of_hosts_are_forgotten(port: int) -> None:
    """A wildcard allows any number of names, so the server must not store something for each name that it ever fetched from."""

    async def fetch() -> None:
        fetcher = Fetcher(IMAGES, [f"*:{port}"], MOST, 600.0)
        assert await fetcher.fetch(f"http://images.example:{port}/image.png") == IMAGE
        assert not fetcher._turns_of

    asyncio.run(fetch())


def test_nothing_is_fetched_by_default() -> None:
    with pytest.raises(FetchFault, match="image_hosts"):
        asyncio.run(Fetcher(IMAGES, (), MOST, 1.0).fetch("http://images.example/"))


@pytest.mark.parametrize("host", ["http://a", "a/b", "*a", "a:b", "", "user@a"])
def test_entries_of_other_forms_are_refused(host: str) -> None:
    with pytest.raises(SettingsError, match="image_hosts has"):
        ServerSettings(image_hosts=(host,))
