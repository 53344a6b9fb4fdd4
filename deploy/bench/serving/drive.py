"""Clients of a model, and when each of their tokens came: an engine in this process, or a server behind HTTP.

A pattern is a set of prompts that arrive together and at most one more that arrives once all of these decode.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol
from urllib.parse import urlsplit

from deploy.serve import serve
from server.engine.overlap import OverlappedEngine
from server.engine.worker import LoadedModel
from server.messages import Failed, FromWorker, SamplingParams, Submit, Tokens
from server.models.registry import Registry
from server.models.state import ModelSpec
from server.settings import ServerSettings

LATE_AFTER = 24  # tokens of each stream, when the late prompt arrives


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: tuple[int, ...]
    num_new: int


@dataclass(slots=True)
class Stream:
    """What one client saw. Over HTTP, tokens that end no character have no time of their own."""

    began_s: float
    num_tokens: int = 0
    times_s: list[float] = field(default_factory=list[float])

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.began_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]


class Driver(Protocol):
    def run(self, prompts: Sequence[Prompt], late: Prompt | None = None) -> list[Stream]:
        """One stream per prompt, the late one last."""
        ...


def percentile(values: Sequence[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(len(ranked) * share))]


class InProcess:
    """The engine as a worker runs it, without a socket. Times are those at which it publishes."""

    def __init__(self, loaded: LoadedModel, *, temperature: float) -> None:
        assert loaded.step_model is not None
        self.engine = OverlappedEngine(loaded.step_model, self._hear, eos_ids=loaded.eos_ids, pace=loaded.pace)
        self._temperature = temperature
        self._streams: dict[str, Stream] = {}
        self._num_sent = 0

    def run(self, prompts: Sequence[Prompt], late: Prompt | None = None) -> list[Stream]:
        self._streams = {}
        for prompt in prompts:
            self._submit(prompt)
        early = list(self._streams.values())
        while self.engine.has_work:
            self.engine.step()
            if late is not None and all(len(stream.times_s) >= LATE_AFTER for stream in early):
                self._submit(late)
                late = None
        self.engine.check_integrity()
        return list(self._streams.values())

    def close(self) -> None:
        self.engine.close()

    def _submit(self, prompt: Prompt) -> None:
        self._num_sent += 1
        request_id = str(self._num_sent)
        params = SamplingParams(prompt.num_new, temperature=self._temperature, ignore_eos=True, seed=self._num_sent)
        self._streams[request_id] = Stream(time.perf_counter())
        self.engine.submit(Submit(request_id, prompt.ids, params))

    def _hear(self, message: FromWorker) -> None:
        now_s = time.perf_counter()
        if isinstance(message, Failed):
            raise RuntimeError(f"request {message.request_id} failed: {message.message}")
        if isinstance(message, Tokens):
            for event in message.events:
                stream = self._streams[event.request_id]
                stream.times_s += [now_s] * len(event.token_ids)
                stream.num_tokens += len(event.token_ids)


class OverHttp:
    """Streams of `/v1/completions`. A time is that of an event: one per token whose text is complete with it."""

    def __init__(self, url: str, model: str, *, temperature: float) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None, url
        self._address = parts.hostname, parts.port
        self._body: dict[str, Any] = {"model": model, "temperature": temperature, "ignore_eos": True}
        self._body |= {"stream_options": {"include_usage": True}}

    def run(self, prompts: Sequence[Prompt], late: Prompt | None = None) -> list[Stream]:
        return asyncio.run(self._run(prompts, late))

    async def _run(self, prompts: Sequence[Prompt], late: Prompt | None) -> list[Stream]:
        early = [Stream(0.0) for _ in prompts]
        deep = asyncio.Event()

        def look() -> None:
            if all(len(stream.times_s) >= LATE_AFTER for stream in early):
                deep.set()

        tasks = [asyncio.create_task(self._follow(p, s, look)) for p, s in zip(prompts, early, strict=True)]
        if late is None:
            await asyncio.gather(*tasks)
            return early
        await deep.wait()
        last = Stream(0.0)
        await asyncio.gather(*tasks, self._follow(late, last, look))
        return [*early, last]

    async def _follow(self, prompt: Prompt, stream: Stream, look: Callable[[], None]) -> None:
        stream.began_s = time.perf_counter()
        async for event in post_stream(*self._address, {**self._body, "prompt": prompt.ids, "max_tokens": prompt.num_new}):
            if any(choice["text"] for choice in event["choices"]):
                stream.times_s.append(time.perf_counter())
                look()
            if usage := event.get("usage"):
                stream.num_tokens = usage["completion_tokens"]


async def post_stream(host: str, port: int, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """The events of `/v1/completions`. RuntimeError for any answer that is not a whole stream."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        content = json.dumps({**body, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
        writer.write(f"{head}\r\n\r\n".encode() + content)
        if b" 200 " not in (status := await reader.readline()):
            raise RuntimeError(f"the server answered {status.decode().strip()}: {(await reader.read(2000)).decode()}")
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))
        raise RuntimeError("the server closed the connection within a stream")
    finally:
        writer.close()


@contextmanager
def served(spec: ModelSpec) -> Generator[str]:
    """The address of a server of its own with this model."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(spec, sender))
    process.start()
    sender.close()
    try:
        yield receiver.recv()  # EOFError: the server has said why
    finally:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGTERM)
        process.join()


def _serve(spec: ModelSpec, sender: Connection) -> None:
    async def greet(registry: Registry, url: str) -> bool:
        while not registry.ready:
            if any(operation.error is not None for operation in registry.operations.all()):
                return False
            await asyncio.sleep(0.02)
        sender.send(url)
        return True

    serve(ServerSettings(port=0), [spec], greet)
