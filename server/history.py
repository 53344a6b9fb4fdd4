"""Keep the last hour of the metrics that the console draws, in memory. A sample stores only the values that have changed since the sample
before."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from prometheus_client.samples import Sample

log = logging.getLogger(__name__)

INTERVAL_S = 5.0
KEPT_S = 3600.0
MOST_VALUES = 250_000  # limit on the values in all samples together; with many busy models, the history is shorter than KEPT_S

Series = tuple[str, tuple[tuple[str, str], ...]]  # name and labels
Values = dict[Series, float | None]  # None: the series has ended


@dataclass(frozen=True, slots=True)
class Change:
    """The values that differ from those of the sample before."""

    time_s: float
    values: Values


class History:
    """The samples of the last hour."""

    def __init__(
        self, read: Callable[[], Iterable[Sample]], measure: Callable[[], Awaitable[None]], clock: Callable[[], float] = time.time
    ) -> None:
        """`read` returns the present values of the metrics. `measure` measures values that take long to get; `run` calls it before each
        sample."""
        self._read = read
        self._measure = measure
        self._clock = clock
        self._first: Values = {}  # the values before the oldest change
        self._last: Values = {}
        self._changes: deque[Change] = deque()
        self._num_values = 0

    async def run(self) -> None:
        """Take samples until cancelled. If a sample cannot be taken, log why, unless the previous try failed with the same error, and
        continue."""
        known = ""
        while True:
            try:
                await self._measure()
                self.take()
                known = ""
            except Exception as error:
                if known != (known := f"{type(error).__name__}: {error}"):
                    log.exception("the history of metrics lacks a sample")
            await asyncio.sleep(INTERVAL_S)

    def take(self) -> None:
        """Take a sample. Forget the oldest samples while they are older than KEPT_S, or while there are more than MOST_VALUES values."""
        now: Values = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in self._read()}
        changed: Values = {series: value for series, value in now.items() if self._last.get(series) != value}
        changed |= {series: None for series in self._last if series not in now}
        self._last = now
        self._changes.append(Change(self._clock(), changed))
        self._num_values += len(changed)
        while len(self._changes) > 1 and (self._changes[-1].time_s - self._changes[0].time_s > KEPT_S or self._num_values > MOST_VALUES):
            self._forget(self._changes.popleft())

    def _forget(self, oldest: Change) -> None:
        """Remove the oldest sample. Add its values to `_first`."""
        self._num_values -= len(oldest.values)
        self._first = {series: value for series, value in (self._first | oldest.values).items() if value is not None}

    def samples(self) -> list[Change]:
        """Return the samples, oldest first. The first one has the values of all series, the others only those that have changed."""
        if not self._changes:
            return []
        oldest = self._changes[0]
        whole: Values = {series: value for series, value in (self._first | oldest.values).items() if value is not None}
        return [Change(oldest.time_s, whole), *list(self._changes)[1:]]
