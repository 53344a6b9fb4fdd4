"""Strike a part of a fleet while its streams run: not before a server computes, and not after the last stream has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx

from server.process_state import fields_of
from tests.deploy.ray.cluster import START_S, Cluster
from tests.deploy.ray.streams import AT_ONCE, TIMEOUT_S, streams

LOOK_S = 0.02


class Blow:
    """Calls `strike`, and measures how long ago that was."""

    def __init__(self, strike: Callable[[], None]) -> None:
        self._strike = strike
        self._struck_s: float | None = None

    def strike(self) -> None:
        self._strike()
        self._struck_s = time.monotonic()

    def seconds_ago(self) -> float:
        assert self._struck_s is not None, "no blow"
        return time.monotonic() - self._struck_s


def num_running(urls: list[str]) -> int:
    """Return how many requests run on these servers."""
    return sum(httpx.get(f"{url}/load", timeout=TIMEOUT_S).json()["server_load"] for url in urls)


def url_of(fleet: Cluster, struck: int) -> str:
    """Return the address of a replica, of which `struck` is the server or the actor."""
    (url,) = (url for pid, url in fleet.servers().items() if struck in (pid, _parent_of(pid)))
    return url


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {START_S:g} s: {what}"
        time.sleep(LOOK_S)


async def struck_streams(
    fleet: Cluster, num: int, strike: Callable[[], None], *, on: list[str] | None = None, at_once: int = AT_ONCE
) -> list[bytes]:
    """Return streams during which `strike` is called, as soon as the servers `on` compute some of them: by default any server."""
    urls = [*fleet.servers().values()] if on is None else on
    running = asyncio.create_task(streams(fleet.url, num, at_once=at_once))
    try:
        await asyncio.to_thread(wait_until, lambda: running.done() or num_running(urls) > 0, "a server computes")
        if running.done():
            running.result()  # raises the error, if there is one
        await asyncio.to_thread(strike)
        assert not running.done(), "the streams had ended before the blow"
        async with asyncio.timeout(START_S):
            return await running
    finally:
        running.cancel()


def _parent_of(pid: int) -> int:
    return int(fields_of(pid)[1])
