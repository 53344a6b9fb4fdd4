"""Merge the steps of several prompts into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from server.api.answer.generate import Generation, Step

TURN = 8  # prompts submitted to the worker before other tasks may run; submitting one takes long if it bans a thousand words


async def merged(generations: Sequence[Generation], per_prompt: int) -> AsyncGenerator[Step, None]:
    """Yield the steps of all generations. Each prompt has `per_prompt` choices, which are numbered consecutively over all prompts. If one
    generation raises an error, raise it. When the iteration ends, for whatever reason, all generations end."""
    if len(generations) == 1:
        async with aclosing(generations[0].steps()) as steps:
            async for step in steps:
                yield step
        return
    arrived: asyncio.Queue[Step | BaseException | None] = asyncio.Queue(maxsize=64)

    async def forward(generation: Generation, number: int) -> None:
        """Put the steps of one generation into the queue, then None, or the error that the generation raises. Generation `number` begins
        after `number // TURN` turns of the event loop."""
        for _ in range(number // TURN):
            await asyncio.sleep(0)
        try:
            async with aclosing(generation.steps()) as steps:
                async for step in steps:
                    await arrived.put(replace(step, choice=number * per_prompt + step.choice))
            await arrived.put(None)
        except Exception as error:
            await arrived.put(error)

    tasks = [asyncio.create_task(forward(generation, number)) for number, generation in enumerate(generations)]
    try:
        num_open = len(tasks)
        while num_open:
            match await arrived.get():
                case Step() as step:
                    yield step
                case None:
                    num_open -= 1
                case error:
                    raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
