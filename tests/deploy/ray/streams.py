"""Streams of all APIs for tests of fleets. Equal requests have equal streams, apart from ids, times and counts of cached tokens."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx

from deploy.replicas.process import ServerProcess

AT_ONCE = 16
NUM_TOKENS = 160
TIMEOUT_S = 300.0

# These fields differ between two runs of one request: ids, times, and counts of tokens that a prefix cache had.
OWN = re.compile(
    rb'(?<=")(chatcmpl|cmpl|gen|msg|resp|rs|fc|call)[-_]\w+(?=")'
    rb'|"(created|created_at|completed_at)":("[^"]*"|\d+)'
    rb'|"(total_duration|load_duration|prompt_eval_duration|eval_duration)":\d+'
    rb'|"(cached_tokens|cache_read_input_tokens|input_tokens)":\d+'
)


def request(at: int) -> tuple[str, dict[str, Any]]:
    """Return a request of one of the APIs. It is sampled with a seed of its own."""
    text = f"You are helper {at % 4}. " * 10 + f"Tell story {at}."
    said = [{"role": "user", "content": text}]
    sampled = {"model": "demo", "stream": True, "temperature": 0.8}
    match at % 5:
        case 0:
            return "/v1/chat/completions", {**sampled, "messages": said, "max_tokens": NUM_TOKENS, "seed": at, "ignore_eos": True}
        case 1:
            return "/v1/completions", {**sampled, "prompt": text, "max_tokens": NUM_TOKENS // 2, "seed": at, "n": 2, "ignore_eos": True}
        case 2:
            return "/v1/messages", {**sampled, "messages": said, "max_tokens": NUM_TOKENS, "temperature": 0}
        case 3:
            return "/v1/responses", {**sampled, "input": text, "max_output_tokens": NUM_TOKENS, "temperature": 0}
        case _:
            return "/api/chat", {**sampled, "messages": said, "options": {"num_predict": NUM_TOKENS, "seed": at}}


def comparable(stream: bytes) -> list[bytes]:
    """Return the events of a stream without comments, the choices one after the other."""
    events = [line for line in OWN.sub(b"", stream).split(b"\n") if line and not line.startswith(b":")]
    choice = re.compile(rb'"choices":\[\{"index":(\d+)')
    return sorted(events, key=lambda event: int(found[1]) if (found := choice.search(event)) else -1)


async def stream(client: httpx.AsyncClient, at: int) -> bytes:
    path, body = request(at)
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        return b"".join([data async for data in answer.aiter_raw()])


async def streams(url: str, num: int, at_once: int = AT_ONCE) -> list[bytes]:
    turns = asyncio.Semaphore(at_once)

    async def one(at: int) -> bytes:
        async with turns:
            return await stream(client, at)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:
        return await asyncio.gather(*(one(at) for at in range(num)))


def require_whole(found: bytes) -> None:
    ends = (b"data: [DONE]\n\n", b'"message_stop"}\n\n', b"}\n", b"}\n\n")
    assert found.endswith(ends) and b'"error":{' not in found, found[-500:]


def undisturbed(num: int) -> list[list[bytes]]:
    """Return the streams of a server that is not in a fleet and computes all layers itself, as `comparable` returns them."""
    server = ServerProcess(["demo"], {}, address="127.0.0.1", num_threads=1)
    try:
        server.wait_until_ready()
        return [comparable(one) for one in asyncio.run(streams(server.url, num))]
    finally:
        server.stop()
