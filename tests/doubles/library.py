"""A library of models that downloads nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from server.models.library import Listed, Pulled, Stored


class Shelf:
    """A fake model hub that offers every model. `held` lists the models that were downloaded."""

    names = frozenset({"known"})
    catalogue = (Listed("known", "a model with a short name", "MIT"),)

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.num_open = 0
        self.error: Exception | None = None
        self.pause_s = 0.0

    async def stored(self) -> list[Stored]:
        return [Stored(source, 300, 1.0, ("known",) if source in ("known", "org/known") else ()) for source in sorted(self.held)]

    async def pull(self, source: str) -> AsyncGenerator[Pulled, None]:
        self.num_open += 1
        try:
            for part in range(4):
                await asyncio.sleep(self.pause_s)
                yield Pulled(300, 100 * part)
            if self.error is not None:
                raise self.error
            self.held.add(source)
        finally:
            self.num_open -= 1

    async def remove(self, source: str) -> int:
        if source not in self.held:
            return 0
        self.held.remove(source)
        return 300
