"""Play a trace to a real fleet or to servers, and record when each request got its first token and its end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from deploy.bench.fleet.traces import BLOCK_TOKENS, Arrival
from deploy.bench.serving.drive import post_stream

VOCAB = 200  # every model has at least so many token ids


@dataclass(frozen=True, slots=True)
class Answered:
    first_s: float  # seconds from the arrival to the first token
    whole_s: float  # seconds from the arrival to the end
    num_tokens: int
    num_cached: int  # prompt tokens that the prefix cache had


def ids_of(arrival: Arrival) -> list[int]:
    """Return the token ids of a prompt. Prompts with the same first keys have the same first tokens."""
    ids: list[int] = []
    for key in arrival.keys:
        ids += random.Random(key).choices(range(3, VOCAB), k=BLOCK_TOKENS)
    rest = random.Random(f"{arrival.session} {arrival.at_s}")
    return ids + rest.choices(range(3, VOCAB), k=arrival.num_prompt - len(ids))


def play(url: str, model: str, trace: Sequence[Arrival], *others: str) -> tuple[list[Answered], float]:
    """Send the requests to one server, or in turn to it and to others. Return the answers, and the seconds from the first arrival to the
    last token."""
    return asyncio.run(_play([_host_of(one) for one in (url, *others)], model, trace))


def _host_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None, url
    return parts.hostname, parts.port


async def _play(hosts: Sequence[tuple[str, int]], model: str, trace: Sequence[Arrival]) -> tuple[list[Answered], float]:
    prompts = [ids_of(arrival) for arrival in trace]
    fields = {"model": model, "temperature": 0.0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    origin_s = time.perf_counter() - trace[0].at_s

    async def one(arrival: Arrival, prompt: list[int], host: str, port: int) -> Answered:
        await asyncio.sleep(max(0.0, origin_s + arrival.at_s - time.perf_counter()))
        began_s, first_s, usage = time.perf_counter(), 0.0, dict[str, int]()
        async for event in post_stream(host, port, {**fields, "prompt": prompt, "max_tokens": arrival.num_new}):
            first_s = first_s or time.perf_counter() - began_s
            usage = event.get("usage") or usage
        details: dict[str, int] = usage.get("prompt_tokens_details") or {}  # pyright: ignore[reportAssignmentType]
        return Answered(first_s, time.perf_counter() - began_s, usage["completion_tokens"], details.get("cached_tokens", 0))

    pairs = enumerate(zip(trace, prompts, strict=True))
    answers = await asyncio.gather(*(one(arrival, prompt, *hosts[at % len(hosts)]) for at, (arrival, prompt) in pairs))
    return list(answers), time.perf_counter() - origin_s - trace[0].at_s
