"""Measure the processes of workers, and write the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from server.metrics import UNUSED, Metrics
from server.models.model import Model
from server.models.processes import resident_bytes, usage_of

T = TypeVar("T")


class Measuring:
    """Measures processes on a thread of its own, because a worker may have hundreds of processes for constraints. The thread also writes
    the metrics, because that takes long for a hundred models. It is no thread of the loop's executor, because all threads of the executor
    may be waiting for a disk."""

    def __init__(self, metrics: Metrics, models: Callable[[], Sequence[Model]]) -> None:
        self._metrics = metrics
        self._models = models
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="measure")
        self._scrape: asyncio.Task[bytes] | None = None  # the scrape that is written now, or was written last
        self._next_scrape: asyncio.Task[bytes] | None = None  # the scrape after it, for all requests that come meanwhile; None: no request

    async def measure(self) -> None:
        """Measure the memory and the CPU time of all workers, which the metrics and the descriptions of models then show."""
        models = self._models()
        pids = [model.pid for model in models]
        usages = await self._run(lambda: [UNUSED if pid is None else usage_of(pid) for pid in pids])
        for model, pid, usage in zip(models, pids, usages, strict=True):
            model.measured(pid, usage)

    async def exposition(self) -> bytes:
        """Return all metrics as Prometheus text. Requests that come while a scrape is written share the next scrape. So requests do not
        queue, and none gets figures that were measured before it came."""
        if self._next_scrape is None:
            self._next_scrape = asyncio.create_task(self._written(self._scrape))
        return await asyncio.shield(self._next_scrape)

    async def _written(self, before: asyncio.Task[bytes] | None) -> bytes:
        """Wait until the scrape `before` has ended, measure all workers, and write all metrics."""
        if before is not None:
            await asyncio.wait([before])
        self._scrape, self._next_scrape = self._next_scrape, None
        await self.measure()
        readings = self._metrics.readings()
        return await self._run(lambda: self._metrics.exposition(readings))

    async def resident_bytes(self) -> int:
        """Return the unshared memory of this process and of all workers."""
        return await self._run(resident_bytes)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
