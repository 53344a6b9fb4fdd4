"""Publish the cache events of each model in numbered batches, and keep the batches for routers that missed some.

Each model has a topic `kv@NAME@MODEL`, as llm-d's indexer expects it, and numbers of its own, so that a gap shows a lost batch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from server.fleet import wire
from server.messages import CacheChange, PagesRemoved, PagesStored

MOST_KEPT = 10_000  # batches of a model that can be replayed: as many as vLLM keeps
MOST_KEPT_BYTES = 32 << 20  # bytes of the batches of a model that can be replayed

Send = Callable[[bytes, int, bytes], None]  # topic, number, batch


Pages = dict[int | None, set[int]]  # the hashes of the pages in a prefix cache, by cache group; None: the model has only one group


@dataclass(slots=True, eq=False)
class _Stream:
    """The batches of one model."""

    topic: bytes
    kept: deque[tuple[int, bytes]]  # number and batch
    kept_bytes: int = 0
    number: int = 0  # number of the next batch
    caches: dict[CacheSource, Pages] = field(default_factory=dict)  # two while a new version of the model replaces the old one


class CacheEvents:
    """Publishes the changes of all models' caches. `changed` and `cleared` run on one thread, `replay` may run on another."""

    def __init__(
        self,
        name: str,
        send: Send,
        *,
        most_kept: int = MOST_KEPT,
        most_kept_bytes: int = MOST_KEPT_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`name`: the name of this replica in the topics. `most_kept` and `most_kept_bytes` limit the batches of each model that are kept
        for replays."""
        self._name = name
        self._send = send
        self._most_kept = most_kept
        self._most_kept_bytes = most_kept_bytes
        self._clock = clock
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()  # protects `kept` and `number` of the streams

    def source_of(self, model: str) -> CacheSource:
        """Return a new listener for one worker of `model`. While a new version of the model replaces the old one, the model has two
        listeners."""
        return CacheSource(self, model)

    def replay(self, first: int, topic: bytes | None = None) -> list[tuple[int, bytes]]:
        """Return the kept batches of a topic from number `first` on; none if the topic is unknown. Without a topic, return batches of the
        model whose stream began first."""
        with self._lock:
            found = (stream for stream in self._streams.values() if topic in (None, stream.topic))
            stream = next(found, None)
            return [] if stream is None else [(number, batch) for number, batch in stream.kept if number >= first]

    def changed(self, source: CacheSource, changes: Sequence[CacheChange]) -> None:
        """Record changes of a worker's cache, and publish those that are changes for the whole model: a page counts as removed once no
        cache of the model has it."""
        stream = self._stream(source.model)
        entered = [_enter(stream, source, change) for change in changes]
        told = [change for change in entered if change is not None]
        if told:
            self._add(stream, wire.batch(told, self._clock()))

    def cleared(self, source: CacheSource) -> None:
        """Publish that the cache of a worker is gone, unless it was empty. `AllBlocksCleared` applies to all models of a replica, so if
        other caches have pages, publish instead which pages no cache of the model has any more."""
        stream = self._stream(source.model)
        pages = stream.caches.pop(source, {})
        if not any(pages.values()):
            return
        if not any(hashes for other in self._streams.values() for cache in other.caches.values() for hashes in cache.values()):
            self._add(stream, wire.cleared(self._clock()))
            return
        removed = [_removed_everywhere(stream, PagesRemoved(tuple(hashes), group)) for group, hashes in pages.items()]
        if told := [change for change in removed if change.hashes]:
            self._add(stream, wire.batch(told, self._clock()))

    def _stream(self, model: str) -> _Stream:
        """Return the stream of a model. If there is none, begin one, and let the streams of models without a worker keep only their last
        batch. A router that missed earlier batches sees the gap in the numbers, as if it had missed more batches than are kept."""
        if model not in self._streams:
            with self._lock:
                for ended in (stream for stream in self._streams.values() if not stream.caches):
                    while len(ended.kept) > 1:
                        ended.kept_bytes -= len(ended.kept.popleft()[1])
                self._streams[model] = _Stream(f"kv@{self._name}@{model}".encode(), deque())
        return self._streams[model]

    def _add(self, stream: _Stream, batch: bytes) -> None:
        """Number a batch, keep it, and send it. Drop the oldest batches beyond the limits."""
        with self._lock:
            number, stream.number = stream.number, stream.number + 1
            stream.kept.append((number, batch))
            stream.kept_bytes += len(batch)
            while len(stream.kept) > self._most_kept or stream.kept_bytes > self._most_kept_bytes:
                stream.kept_bytes -= len(stream.kept.popleft()[1])
        self._send(stream.topic, number, batch)


def _enter(stream: _Stream, source: CacheSource, change: CacheChange) -> CacheChange | None:
    """Record a change of one worker's cache. Return the resulting change for the whole model, or None if other caches of the model still
    have all pages that this cache has removed."""
    hashes = stream.caches.setdefault(source, {}).setdefault(change.group, set())
    match change:
        case PagesStored():
            hashes.update(change.hashes)
            return change
        case PagesRemoved():
            hashes.difference_update(change.hashes)
            removed = _removed_everywhere(stream, change)
            return removed if removed.hashes else None


def _removed_everywhere(stream: _Stream, removed: PagesRemoved) -> PagesRemoved:
    """Return `removed` without the pages that a cache of the model still has."""
    others = [cache[removed.group] for cache in stream.caches.values() if removed.group in cache]
    return PagesRemoved(tuple(page for page in removed.hashes if not any(page in hashes for hashes in others)), removed.group)


@dataclass(slots=True, eq=False)
class CacheSource:
    """Listens to the changes of one worker's cache. Implements `server.interfaces.CacheListener`."""

    events: CacheEvents
    model: str

    def changed(self, changes: Sequence[CacheChange]) -> None:
        self.events.changed(self, changes)

    def cleared(self) -> None:
        self.events.cleared(self)
