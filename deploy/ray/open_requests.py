"""The open requests of this process, by the name of the replica that has them."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection

HEARD_S = 1.0  # a report of a replica is taken to arrive within so many seconds


class OpenRequests:
    """Counts the open requests of this process by replica. A replica reports the number of all its requests, those of this process among
    them. The report arrives a little later, and may count a request of this process that has ended meanwhile. So the directory subtracts
    `most_lately` from the report, not the present number, and does not take this request for one of another process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers: Counter[str] = Counter()
        # Each replica has the times in the last HEARD_S at which a request ended, each with the number of requests open before. An entry is
        # dropped as soon as a later one has at least the same number, so the first entry has the largest.
        self._before: defaultdict[str, deque[tuple[float, int]]] = defaultdict(deque)
        self._lock = threading.Lock()  # requests begin and end in the event loop, reports may arrive in another thread

    def __getitem__(self, replica: str) -> int:
        return self._numbers[replica]

    def begin(self, replica: str) -> None:
        with self._lock:
            self._numbers[replica] += 1

    def end(self, replica: str) -> None:
        with self._lock:
            before, num_before = self._recent(replica), self._numbers[replica]
            while before and before[-1][1] <= num_before:
                before.pop()
            before.append((self._clock(), num_before))
            self._numbers[replica] -= 1

    def most_lately(self, replica: str) -> int:
        """Return the largest number of requests that were open at once in the last HEARD_S seconds."""
        with self._lock:
            before = self._recent(replica)
            return max(self._numbers[replica], before[0][1] if before else 0)

    def forget(self, replicas: Collection[str]) -> None:
        """Forget all replicas except `replicas` and those with open requests."""
        with self._lock:
            for name in self.replicas.difference(replicas):
                if not self._numbers[name]:
                    self._numbers.pop(name, None)
                    self._before.pop(name, None)

    @property
    def replicas(self) -> set[str]:
        """The replicas that are not forgotten."""
        return {*self._numbers, *self._before}

    def _recent(self, replica: str) -> deque[tuple[float, int]]:
        before = self._before[replica]
        while before and before[0][0] < self._clock() - HEARD_S:
            before.popleft()
        return before
