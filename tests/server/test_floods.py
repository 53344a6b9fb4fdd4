"""Floods of connections without a key delay no other request.

A delay is the CPU time of the event loop's thread between two turns of the loop. It depends neither on other processes nor on the flood
itself, which another thread sends.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.lab.serving.floods import RATE, SHAPES, Budget, attack

NUM_CONNECTIONS = 40
SECONDS = 0.3
MOST_S = 0.05
ATTEMPTS = 3  # other work in this process, such as garbage collection, may disturb one of them
KEY = "the-key-of-others"

pytestmark = pytest.mark.parametrize("shared_server", [{"api_keys": (KEY,)}], indirect=True, ids=[""], scope="module")


@contextmanager
def turns(server) -> Iterator[list[float]]:
    """Yield a list to which each turn of the server's event loop appends the CPU time of its thread since the previous turn."""
    found: list[float] = []

    async def count() -> None:
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now_s = time.thread_time()
            found.append(now_s - last_s)
            last_s = now_s

    counting = asyncio.run_coroutine_threadsafe(count(), server.loop)
    try:
        yield found
    finally:
        counting.cancel()


def flood(server, name: str) -> None:
    async def send() -> None:
        budget = Budget(RATE)
        attacks = [asyncio.create_task(attack(("127.0.0.1", server.port), SHAPES[name], budget)) for _ in range(NUM_CONNECTIONS)]
        await asyncio.sleep(SECONDS)
        for one in attacks:
            one.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)

    asyncio.run(send())


@pytest.mark.parametrize("name", SHAPES)
def test_no_flood_holds_up_others(shared_server, name):
    worst = []
    for _ in range(ATTEMPTS):
        gc.collect()
        with turns(shared_server) as found:
            flood(shared_server, name)
        worst.append(max(found))
        if worst[-1] <= MOST_S:
            return
    raise AssertionError(f"{name}: a turn of the event loop takes {1000 * min(worst):.0f} ms of processor time")
