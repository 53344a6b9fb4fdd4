"""Clients of a model that record when each token arrives, for an engine in this process or a server over HTTP.

`run` sends prompts that arrive together, and possibly a late prompt, which arrives once all other sequences decode.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol
from urllib.parse import urlsplit

from deploy.bound import end_with
from deploy.logs import configure
from deploy.serve import serve
from server.engine.overlap import OverlappedEngine
from server.engine.worker import LoadedModel
from server.interfaces import LoadError
from server.messages import ErrorCode, Failed, FromWorker, SamplingParams, Submit, Tokens
from server.models.registry import Registry
from server.models.state import ModelSpec
from server.settings import ServerSettings

LATE_AFTER = 24  # the late prompt arrives when every other stream has this number of tokens


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: tuple[int, ...]
    num_new: int
    at_s: float = 0.0  # time of arrival in seconds since the beginning of the run


@dataclass(slots=True)
class Stream:
    """The tokens that one client received. Over HTTP, a token has no arrival time if it completes no character, unless it is the last."""

    began_s: float
    num_tokens: int = 0
    times_s: list[float] = field(default_factory=list[float])
    num_at_first: int = 1  # tokens that the client had at the first time of `times_s`: more than one if the first ones have no text
    has_ended: bool = False

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.began_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]

    @property
    def decoding_rate(self) -> float:
        """Tokens per second from the first to the last time of `times_s`."""
        return (self.num_tokens - self.num_at_first) / (self.times_s[-1] - self.times_s[0])

    def hear(self, event: Mapping[str, Any]) -> bool:
        """Count the tokens of an event that arrives now, of a completion or a chat. Return whether it has text or ends the stream."""
        if usage := event.get("usage"):
            self.num_tokens = usage["completion_tokens"]
        if not any(choice.get("text") or choice.get("delta", {}).get("content") or choice["finish_reason"] for choice in event["choices"]):
            return False
        if not self.times_s:
            self.num_at_first = max(1, self.num_tokens)
        self.times_s.append(time.perf_counter())
        return True


class Driver(Protocol):
    def run(self, prompts: Sequence[Prompt], late: Prompt | None = None) -> list[Stream]:
        """Send the prompts, and return one stream per prompt. The stream of the late prompt comes last."""
        ...


def percentile(values: Sequence[float], share: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(len(ranked) * share))]


class Beside(Protocol):
    """Work that runs in turns with the engine."""

    def catch_up(self, num_tokens: int) -> None:
        """Compute tokens until the next step would exceed `num_tokens`, the number of tokens that the engine has computed in this run."""
        ...


class InProcess:
    """Drives the engine as a worker does, but without a socket. The arrival time of a token is when the engine publishes it."""

    def __init__(self, loaded: LoadedModel, *, temperature: float) -> None:
        assert loaded.step_model is not None
        self.engine = OverlappedEngine(loaded.step_model, self._hear, eos_ids=loaded.eos_ids, pace=loaded.pace)
        self._temperature = temperature
        self._streams: dict[str, Stream] = {}
        self._num_sent = 0
        self._beside_s = 0.0  # seconds spent on other work so far

    def run(self, prompts: Sequence[Prompt], late: Prompt | None = None, beside: Beside | None = None) -> list[Stream]:
        """Run the engine until all streams have ended. Times of streams do not include the time of `beside`. If there is a late prompt,
        `beside` begins when it arrives."""
        self._streams = {}
        began_s, num_before = self._now_s(), self.engine.timing.num_tokens
        coming = deque(sorted(prompts, key=lambda prompt: prompt.at_s))
        while coming or self.engine.has_work:
            while coming and began_s + coming[0].at_s <= self._now_s():
                prompt = coming.popleft()
                self._submit(prompt, began_s + prompt.at_s)
            if not self.engine.has_work:
                time.sleep(max(0.0, began_s + coming[0].at_s - self._now_s()))
                continue
            self.engine.step()
            if beside is not None and late is None:
                self._let(beside, self.engine.timing.num_tokens - num_before)
            if late is not None and not coming and all(len(stream.times_s) >= LATE_AFTER for stream in self._streams.values()):
                self._submit(late, self._now_s())
                late, num_before = None, self.engine.timing.num_tokens
        self.engine.check_integrity()
        return list(self._streams.values())

    def _let(self, beside: Beside, num_tokens: int) -> None:
        began_s = time.perf_counter()
        beside.catch_up(num_tokens)
        self._beside_s += time.perf_counter() - began_s

    def _now_s(self) -> float:
        return time.perf_counter() - self._beside_s

    def close(self) -> None:
        self.engine.close()

    def _submit(self, prompt: Prompt, began_s: float) -> None:
        self._num_sent += 1
        request_id = str(self._num_sent)
        params = SamplingParams(prompt.num_new, temperature=self._temperature, ignore_eos=True, seed=self._num_sent)
        self._streams[request_id] = Stream(began_s)
        self.engine.submit(Submit(request_id, prompt.ids, params))

    def _hear(self, message: FromWorker) -> None:
        now_s = self._now_s()
        if isinstance(message, Failed):
            raise RuntimeError(f"request {message.request_id} failed: {message.message}")
        if isinstance(message, Tokens):
            for event in message.events:
                stream = self._streams[event.request_id]
                if not stream.times_s:
                    stream.num_at_first = len(event.token_ids)
                stream.times_s += [now_s] * len(event.token_ids)
                stream.num_tokens += len(event.token_ids)


class OverHttp:
    """Sends streaming requests to `/v1/completions`. The arrival time of a token is that of its event; a token that completes no character
    has no event, unless it is the last."""

    def __init__(self, url: str, model: str, *, temperature: float, cache_salt: str = "") -> None:
        """With a `cache_salt`, prompts share no prefix cache with those of drivers that have another one."""
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None, url
        self._address = parts.hostname, parts.port
        self._body: dict[str, Any] = {"model": model, "temperature": temperature, "ignore_eos": True}
        self._body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # other servers ignore the second one
        self._body |= {"cache_salt": cache_salt} if cache_salt else {}

    def run(self, prompts: Sequence[Prompt], late: Prompt | None = None) -> list[Stream]:
        return asyncio.run(self._run(prompts, late))

    async def _run(self, prompts: Sequence[Prompt], late: Prompt | None) -> list[Stream]:
        early = [Stream(0.0) for _ in prompts]
        deep = asyncio.Event()

        def look() -> None:
            if all(stream.has_ended or len(stream.times_s) >= LATE_AFTER for stream in early):
                deep.set()

        running = asyncio.gather(*(self._follow(p, s, look) for p, s in zip(prompts, early, strict=True)))
        if late is None:
            await running
            return early
        waiting = asyncio.ensure_future(deep.wait())
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if running.done():
            running.result()  # raises the error of a stream that has failed
        last = Stream(0.0)
        await asyncio.gather(running, self._follow(late, last, look))
        return [*early, last]

    async def _follow(self, prompt: Prompt, stream: Stream, look: Callable[[], None]) -> None:
        await asyncio.sleep(prompt.at_s)
        stream.began_s = time.perf_counter()
        async for event in post_stream(*self._address, {**self._body, "prompt": prompt.ids, "max_tokens": prompt.num_new}):
            if stream.hear(event):
                look()
        stream.has_ended = True
        look()


async def post_stream(
    host: str, port: int, body: Mapping[str, Any], key: str = "", path: str = "/v1/completions"
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a streamed answer. Raise RuntimeError for any answer that is not a complete stream, or that reports an error."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        content = json.dumps({**body, "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
        permission = f"authorization: Bearer {key}\r\n" if key else ""
        writer.write(f"{head}{permission}\r\n".encode() + content)
        if b" 200 " not in (status := await reader.readline()):
            raise RuntimeError(f"the server answered {status.decode().strip()}: {(await reader.read(2000)).decode()}")
        is_chunked = False
        while line := (await reader.readline()).strip():
            is_chunked |= line.lower().startswith(b"transfer-encoding:") and line.lower().endswith(b"chunked")
        rest = b""
        while piece := await (_chunk(reader) if is_chunked else reader.read(1 << 16)):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise RuntimeError(f"the server reports within a stream: {event['error'].get('message')}")
                    yield event
        raise RuntimeError("the server closed the connection within a stream")
    except asyncio.IncompleteReadError as error:
        raise RuntimeError("the server closed the connection within a stream") from error
    finally:
        writer.close()


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    """Read the next chunk of a body; the last one is empty."""
    size = int((await reader.readline()).partition(b";")[0] or b"0", 16)
    return (await reader.readexactly(size + 2))[:size]


@contextmanager
def served(spec: ModelSpec, log_level: str = "warning") -> Generator[str]:
    """Start a server with this model in a separate process, which ends with this one, and yield its address. Raise LoadError if the model
    cannot be loaded."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(spec, log_level, os.getpid(), sender))
    process.start()
    sender.close()
    try:
        yield _greeting(receiver.recv, spec.name)
    finally:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGTERM)
        process.join()


def _greeting(receive: Callable[[], tuple[str, str]], name: str) -> str:
    """Wait until the server is ready, and return its address. Raise LoadError if it sends a fault, or ends."""
    try:
        url, fault = receive()
    except EOFError:
        url, fault = "", f"the server of {name} ended before it was ready; its log says why"
    if fault:
        raise LoadError(ErrorCode.LOAD_FAILED, fault)
    return url


def _serve(spec: ModelSpec, log_level: str, parent: int, sender: Connection) -> None:
    end_with(parent)
    configure(log_level, "text")

    async def greet(registry: Registry, url: str) -> bool:
        while not registry.ready:
            if faults := [operation.error.message for operation in registry.operations.all() if operation.error is not None]:
                sender.send(("", faults[0]))
                return False
            await asyncio.sleep(0.02)
        sender.send((url, ""))
        return True

    serve(ServerSettings(port=0, log_level=log_level), [spec], greet)
