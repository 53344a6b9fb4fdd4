"""Play a trace to a real fleet or to servers, and record when each request got its first token and its end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

from deploy.bench.fleet.traces import BLOCK_TOKENS, Arrival
from deploy.streams import post_stream

VOCAB = 200  # every model has at least so many token ids
NUM_SESSIONS = 1_000_000  # more than a trace has


@dataclass(frozen=True, slots=True)
class Answered:
    first_s: float  # seconds from the arrival to the first token
    whole_s: float  # seconds from the arrival to the end
    num_tokens: int
    num_cached: int  # prompt tokens that the prefix cache had

    @property
    def token_s(self) -> float:
        """The time per token after the first."""
        return (self.whole_s - self.first_s) / max(1, self.num_tokens - 1)


def ids_of(arrival: Arrival) -> list[int]:
    """Return the token ids of a prompt. Prompts with the same first keys have the same first tokens."""
    ids: list[int] = []
    for key in arrival.keys:
        ids += random.Random(key).choices(range(3, VOCAB), k=BLOCK_TOKENS)
    rest = random.Random(f"{arrival.session} {arrival.at_s}")
    return ids + rest.choices(range(3, VOCAB), k=arrival.num_prompt - len(ids))


def salted(trace: Sequence[Arrival], salt: int) -> list[Arrival]:
    """Return the same trace with other tokens, for caches that already have the prompts of the first one."""

    def of(key: bytes) -> bytes:
        return blake2b(key, digest_size=len(key), key=b"%d" % salt).digest()

    return [replace(one, session=one.session + NUM_SESSIONS * salt, keys=tuple(map(of, one.keys))) for one in trace]


def play(url: str, model: str, trace: Sequence[Arrival], *others: str) -> tuple[list[Answered], float]:
    """Send the requests to one server, or in turn to it and to others. Return the answers, and the seconds from the first arrival to the
    last token."""

    async def timed() -> tuple[list[Answered], float]:
        began_s = time.perf_counter()
        return await played((url, *others), model, trace), time.perf_counter() - began_s

    return asyncio.run(timed())


async def played(urls: Sequence[str], model: str, trace: Sequence[Arrival]) -> list[Answered]:
    prompts = [ids_of(arrival) for arrival in trace]
    origin_s = time.perf_counter() - trace[0].at_s

    async def one(at: int, arrival: Arrival) -> Answered:
        await asyncio.sleep(max(0.0, origin_s + arrival.at_s - time.perf_counter()))
        began_s, first_s, usage = time.perf_counter(), 0.0, dict[str, int]()
        async for event in _stream(urls[at % len(urls)], model, prompts[at], arrival.num_new):
            first_s = first_s or time.perf_counter() - began_s
            usage = event.get("usage") or usage
        details: dict[str, int] = usage.get("prompt_tokens_details") or {}  # pyright: ignore[reportAssignmentType]
        return Answered(first_s, time.perf_counter() - began_s, usage["completion_tokens"], details.get("cached_tokens", 0))

    return await asyncio.gather(*(one(at, arrival) for at, arrival in enumerate(trace)))


@asynccontextmanager
async def kept_busy(urls: Sequence[str], model: str, trace: Sequence[Arrival]) -> AsyncGenerator[None]:
    """Keep one request running at each of these addresses, which may repeat. The requests have the sizes of those of a trace, in a random
    order, and prompts of their own. The body of the context runs once each address has sent a token."""
    begun = [asyncio.Event() for _ in urls]

    async def ask(url: str, number: int) -> None:
        while True:
            one = random.choice(trace)
            async for _ in _stream(url, model, random.choices(range(3, VOCAB), k=one.num_prompt), one.num_new):
                begun[number].set()

    running = [asyncio.create_task(ask(url, number)) for number, url in enumerate(urls)]
    try:
        all_begun = asyncio.gather(*(one.wait() for one in begun))
        await asyncio.wait((all_begun, *running), return_when=asyncio.FIRST_COMPLETED)  # `ask` completes only if a request fails
        all_begun.cancel()
        yield
    finally:
        for task in running:
            task.cancel()
        ends = await asyncio.gather(*running, return_exceptions=True)
    for error in ends:
        if not isinstance(error, asyncio.CancelledError):
            raise RuntimeError("a request in the background has failed") from error


def _stream(url: str, model: str, prompt: Sequence[int], num_new: int) -> AsyncGenerator[dict[str, Any]]:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None, url
    # Without the ids, a token that completes no character has no event, so the first event may be that of a later token.
    fields = {"model": model, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    return post_stream(parts.hostname, parts.port, {**fields, "prompt": prompt, "max_tokens": num_new})
