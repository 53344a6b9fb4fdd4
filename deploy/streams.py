"""A client of a server's streams over HTTP, which records when the tokens arrive.

`run` sends each prompt at its time, and possibly a late prompt, which is sent once every other stream has had LATE_AFTER arrivals or has
ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

LATE_AFTER = 24  # the late prompt is sent when every other stream has this number of arrival times (`Stream.times_s`), or has ended


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of token ids to send."""

    ids: tuple[int, ...]
    num_new: int  # number of tokens to generate
    at_s: float = 0.0  # when it is sent, in seconds since the beginning of the run, or for the late prompt since its condition was met


@dataclass(slots=True)
class Stream:
    """The tokens that one client received. Over HTTP, a token has no arrival time if it completes no character, unless it is the last, and
    tokens that arrive in one event share one time."""

    began_s: float  # when the request is sent, by the same clock as `times_s`
    num_tokens: int = 0  # tokens of the answer so far, as the server counts them
    times_s: list[float] = field(default_factory=list[float])  # arrival times of tokens; over HTTP, of events with text and of the last one
    num_at_first: int = 1  # tokens that the client had at the first time of `times_s`: more than one if the first ones have no text
    has_ended: bool = False

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to the first time of `times_s`, of which there must be one."""
        return self.times_s[0] - self.began_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between neighbouring times of `times_s`."""
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]

    @property
    def decoding_rate(self) -> float:
        """Tokens per second from the first to the last time of `times_s`, of which there must be two different ones."""
        return (self.num_tokens - self.num_at_first) / (self.times_s[-1] - self.times_s[0])

    @property
    def admits_late(self) -> bool:
        """Whether the late prompt need not wait for this stream any more."""
        return self.has_ended or len(self.times_s) >= LATE_AFTER

    def hear(self, event: Mapping[str, Any]) -> bool:
        """Read the number of tokens from an event of a completion or a chat that arrives now. Return whether the event has text or ends the
        stream; only then add the current time to `times_s`."""
        if usage := event.get("usage"):
            self.num_tokens = usage["completion_tokens"]
        if not any(choice.get("text") or choice.get("delta", {}).get("content") or choice["finish_reason"] for choice in event["choices"]):
            return False
        if not self.times_s:
            self.num_at_first = max(1, self.num_tokens)
        self.times_s.append(time.perf_counter())
        return True


class OverHttp:
    """Sends streaming requests to `/v1/completions` and records a Stream for each. Answers do not end at an end-of-sequence token, so each
    has `num_new` tokens."""

    def __init__(self, url: str, model: str, *, temperature: float, cache_salt: str = "") -> None:
        """With a `cache_salt`, these requests find no pages in the prefix cache that requests with another salt have computed."""
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None, url
        self._address = parts.hostname, parts.port
        self._body: dict[str, Any] = {"model": model, "temperature": temperature, "ignore_eos": True}
        self._body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # other servers ignore the second one
        self._body |= {"cache_salt": cache_salt} if cache_salt else {}

    def run(self, prompts: Sequence[Prompt], late: Prompt | None = None) -> list[Stream]:
        """Send all prompts, wait until all streams have ended, and return the streams in the order of the prompts, that of the late prompt
        last. Raise RuntimeError or OSError if a stream fails."""
        return asyncio.run(self._run(prompts, late))

    async def _run(self, prompts: Sequence[Prompt], late: Prompt | None) -> list[Stream]:
        early = [Stream(0.0) for _ in prompts]
        deep = asyncio.Event()

        def look() -> None:
            if all(stream.admits_late for stream in early):
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
        """Send a prompt at its time, and record its answer in `stream`. Call `look` after each time recorded and at the end."""
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
    """Post a body to a server, without TLS, and yield the events of the streamed answer. Raise RuntimeError for any answer that is not a
    complete stream, or that reports an error, and OSError if the connection fails."""
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
    """Read the next chunk of a body; the last one is empty. Raise IncompleteReadError if the connection ends before the end of the
    chunk."""
    size = int((await reader.readline()).partition(b";")[0] or b"0", 16)
    return (await reader.readexactly(size + 2))[:size]
