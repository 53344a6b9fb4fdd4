"""Fixtures that start a real server on localhost, in a thread of the test process. Its models compute nothing."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import uvicorn.server

from server.app import create_app
from server.http.server import Server
from server.interfaces import ProgressCallback
from server.models.library import Library
from server.models.model import Footprint, FormEstimate, Identify, IsCached, MakeWorker, Preflight, Weigh
from server.models.publications import Export, Publications
from server.models.registry import Registry
from server.models.state import ModelSpec
from server.settings import ServerSettings
from tests.doubles.worker import ByteTokenizer, NullScript, NullWorker


@dataclass
class Running:
    """A running server. By default it has one model, called `null`. `workers` and `scripts` map model names to the fake worker and its
    script."""

    settings: ServerSettings
    registry: Registry
    server: Server
    script: NullScript
    scripts: dict[str, NullScript]
    workers: dict[str, NullWorker]
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    clients: list[Any] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.server.servers[0].sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def worker(self) -> NullWorker:
        return self.workers["null"]

    def openai(self, **options: Any) -> openai.OpenAI:
        transport = openai.DefaultHttpxClient(verify=False)  # loading certificates would take longer than most tests
        defaults = {"api_key": "unused", "max_retries": 0, "timeout": 60, "http_client": transport}
        client = openai.OpenAI(base_url=f"{self.url}/v1", **{**defaults, **options})
        self.clients.append(client)
        return client

    def http(self, **options: Any) -> httpx.Client:
        client = httpx.Client(base_url=self.url, timeout=60, verify=False, **options)
        self.clients.append(client)
        return client

    def chat(self, **body: Any) -> httpx.Response:
        return self.http().post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **body})

    def complete(self, **body: Any) -> httpx.Response:
        return self.http().post("/v1/completions", json={"prompt": "hi", **body})

    def connect(self) -> socket.socket:
        """Open a plain socket to the server. Tests use it to send requests that HTTP clients refuse to send."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    @staticmethod
    def read_all(sock: socket.socket) -> bytes:
        """Return all bytes that the server sends until it closes the connection."""
        answer = b""
        try:
            while data := sock.recv(1 << 16):
                answer += data
        except ConnectionResetError:
            pass  # the server closed the connection before it read the whole request, but its answer has already arrived
        return answer

    def stop(self) -> None:
        for client in self.clients:
            client.close()
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()


Serve = Callable[..., Running]
LOOK_S = 0.005  # longest pause between two looks of a server for its end; uvicorn pauses for 0.1 s, up to three times


@pytest.fixture(scope="session", autouse=True)
def _brief_pauses() -> Iterator[None]:
    """Let the servers of this process stop at once: many tests start one of their own, and wait until it has stopped."""

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(min(seconds, LOOK_S))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
        yield


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that starts a server with the options that `_start` describes. All servers stop at the end of the test."""
    running: list[Running] = []

    def start(**options: Any) -> Running:
        running.append(_start(tmp_path, **options))
        return running[-1]

    yield start
    for one in running:
        one.stop()


@pytest.fixture(scope="module")
def shared_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield one server that all tests of a module share. A module passes options of `_start` by indirect parametrization."""
    running = _start(tmp_path_factory.mktemp("server"), **getattr(request, "param", {}))
    yield running
    running.stop()


@pytest.fixture
def server(shared_server: Running) -> Running:
    """Return the module's shared server. Only tests that do not change the server may use it."""
    shared_server.worker.submits.clear()
    shared_server.worker.aborted.clear()
    return shared_server


def _start(
    folder: Path,
    *,
    script: NullScript | None = None,
    scripts: dict[str, NullScript] | None = None,
    tokenizer: ByteTokenizer | None = None,
    initial: Sequence[ModelSpec] = (ModelSpec("null", "null"),),
    footprints: dict[str, Footprint] | None = None,
    make_worker: MakeWorker | None = None,
    identify: Identify = lambda _source: "",
    is_cached: IsCached = lambda _spec: False,
    preflight: Preflight | None = None,
    weigh: Weigh = lambda _spec: 0,
    library: Library | None = None,
    forms: dict[str, list[FormEstimate]] | None = None,
    export: Export | None = None,
    **options: Any,
) -> Running:
    """Start a server. A model's worker behaves as `scripts[name]` says, or else as `script` says. `footprints` are the memory estimates of
    each model's load; `forms` are the formats of each source, by the last part of its path; `identify` returns the identity of a source's
    files, which changes when the files change; `preflight` plans loads in place of `footprints`; `weigh` estimates the bytes of weights;
    `options` are settings of the server."""
    (folder / "models").mkdir(exist_ok=True)
    settings = ServerSettings(**{"port": 0, "model_root": folder / "models", "drain_s": 5.0, **options})
    common, named = script or NullScript(), scripts or {}
    workers: dict[str, NullWorker] = {}
    begun: Future[Running] = Future()

    def make_null(spec: ModelSpec, progress: ProgressCallback) -> NullWorker:
        workers[spec.name] = NullWorker(named.get(spec.name, common), progress)
        return workers[spec.name]

    async def footprint(spec: ModelSpec) -> Footprint:
        return (footprints or {})[spec.name]

    async def compare_forms(source: str) -> list[FormEstimate]:
        return (forms or {})[Path(source).name]

    async def main() -> None:
        registry = Registry(
            settings,
            make_worker or make_null,
            lambda _source: tokenizer or ByteTokenizer(),
            identify=identify,
            is_cached=is_cached,
            preflight=footprint if preflight is None and footprints is not None else preflight,
            compare_forms=None if forms is None else compare_forms,
            weigh=weigh,
            library=library,
            initial=initial,
            publications=Publications(settings.publish, export, folder / "web"),
        )
        server = Server(create_app(settings, registry), settings, registry)
        serving = asyncio.create_task(server.serve())
        while not (serving.done() or (server.started and _settled(registry))):
            await asyncio.sleep(0.002)
        begun.set_result(
            Running(settings, registry, server, common, named, workers, asyncio.get_running_loop(), threading.current_thread())
        )
        await serving

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            if begun.done():
                raise
            begun.set_exception(error)

    threading.Thread(target=run, name="server", daemon=True).start()
    return begun.result(60)


def _settled(registry: Registry) -> bool:
    return all(operation.ended_at is not None for operation in registry.operations.all())


def with_answer(answer: str | bytes, *, step: int = 1, **fields: Any) -> NullScript:
    """Return a script by which a model answers `answer`, with `step` bytes in each event."""
    data = answer.encode() if isinstance(answer, str) else answer
    steps = [list(data[at : at + step]) for at in range(0, len(data), step)]
    return replace(NullScript(), answer=lambda _submit, _choice: steps, **fields)


@pytest.fixture
def answering() -> Callable[..., NullScript]:
    return with_answer
