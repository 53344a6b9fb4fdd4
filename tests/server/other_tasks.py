"""Count how often another task of the event loop gets its turn while some work runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def turns_during(work: Coroutine[Any, Any, None]) -> int:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> None:
        other = asyncio.create_task(count())
        await work
        other.cancel()

    asyncio.run(run())
    return turns
