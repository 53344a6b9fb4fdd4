"""Follow the events of a server's prefix cache, to find a time: all pages that the server has used since then are still in its cache.

A replica sends its routers this time, one number, instead of a list of its pages. Pages are evicted in the order of their last use, so
pages used after the latest evicted page was stored are taken to be in the cache, and pages used before to be gone. The number is sent as an
age in seconds, because the clocks of machines differ and jump.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec


class CacheWatch:
    """Computes `kept_since_s`, a time of `clock`: the server still has all pages that it has used since then. 0: it has evicted none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.kept_since_s = 0.0
        self._clock = clock
        self._stored_s: dict[tuple[bytes, int, int], float] = {}  # time at which a page was stored, by topic, cache group and hash
        self._numbers: dict[bytes, int] = {}  # number of the last batch, by topic

    def kept_s(self) -> float | None:
        """Return how long ago the latest evicted page was stored, or None if none was evicted."""
        return self._clock() - self.kept_since_s if self.kept_since_s else None

    def take(self, topic: bytes, number: int, batch: bytes) -> None:
        """Read a batch of events in vLLM's wire format. If a batch was lost, or if an event is of an unknown kind or says that the cache
        was cleared, take all pages used so far to be gone."""
        if number != self._numbers.get(topic, number - 1) + 1:
            self._clear()  # a batch was lost, maybe one with evictions
        self._numbers[topic] = number
        for event in msgspec.msgpack.decode(batch)[1]:
            match event:
                case ["BlockStored", hashes, _, _, _, _, _, *more]:
                    group = more[2] if len(more) > 2 else 0
                    self._stored_s.update(dict.fromkeys(((topic, group, page) for page in hashes), self._clock()))
                case ["BlockRemoved", hashes, _, *more]:
                    group = more[0] if more else 0
                    stored = [self._stored_s.pop((topic, group, page), 0.0) for page in hashes]
                    self.kept_since_s = max([self.kept_since_s, *stored])
                case _:
                    self._clear()

    def _clear(self) -> None:
        self._stored_s.clear()
        self.kept_since_s = self._clock()


def follow(watch: CacheWatch, address: str) -> threading.Thread:
    """Let a thread read the events that are published at `address`, until the process ends."""
    import zmq

    heard = zmq.Context.instance().socket(zmq.SUB)
    heard.setsockopt(zmq.SUBSCRIBE, b"kv@")
    heard.connect(address)

    def read() -> None:
        while True:
            topic, number, batch = heard.recv_multipart()
            watch.take(topic, int.from_bytes(number, "big"), batch)

    thread = threading.Thread(target=read, name="cache-watch", daemon=True)
    thread.start()
    return thread
