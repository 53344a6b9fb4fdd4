"""A replica tells routers what its prefix cache has evicted."""

from __future__ import annotations

from deploy.ray.cache_watch import CacheWatch
from server.fleet import wire
from server.messages import PagesRemoved, PagesStored

TOPIC = b"kv@here@demo"


class Clock:
    now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


def stored(*hashes: int, group: int | None = None) -> PagesStored:
    return PagesStored(hashes, None, tuple(range(16 * len(hashes))), 16, group)


def test_what_was_used_before_an_evicted_page_was_stored_is_gone() -> None:
    clock = Clock()
    watch = CacheWatch(clock)
    watch.take(TOPIC, 0, wire.batch([stored(1, 2)], 0.0))
    clock.now_s = 20.0
    watch.take(TOPIC, 1, wire.batch([stored(3), stored(1, group=1)], 0.0))
    assert watch.kept_since_s == 0.0
    assert watch.kept_s() is None
    watch.take(TOPIC, 2, wire.batch([PagesRemoved((1, 2))], 0.0))
    assert watch.kept_since_s == 10.0
    assert watch.kept_s() == 10.0
    clock.now_s = 30.0
    watch.take(TOPIC, 3, wire.batch([PagesRemoved((1,), 1)], 0.0))
    assert watch.kept_since_s == 20.0


def test_a_cleared_cache_and_a_lost_batch_make_all_uncertain() -> None:
    clock = Clock()
    watch = CacheWatch(clock)
    watch.take(TOPIC, 5, wire.batch([stored(1)], 0.0))  # a watch that begins late has lost nothing
    assert watch.kept_since_s == 0.0
    watch.take(b"kv@here@other", 9, wire.cleared(0.0))
    assert watch.kept_since_s == 10.0
    clock.now_s = 40.0
    watch.take(TOPIC, 7, wire.batch([stored(2)], 0.0))
    assert watch.kept_since_s == 40.0
    watch.take(TOPIC, 8, wire.batch([PagesRemoved((1, 2))], 0.0))
    assert watch.kept_since_s == 40.0


def test_models_with_the_same_tokens_have_pages_of_their_own() -> None:
    """The hash of a page says nothing of its model."""
    clock = Clock()
    watch = CacheWatch(clock)
    watch.take(TOPIC, 0, wire.batch([stored(1)], 0.0))
    clock.now_s = 20.0
    watch.take(b"kv@here@other", 0, wire.batch([stored(1)], 0.0))
    watch.take(TOPIC, 1, wire.batch([PagesRemoved((1,))], 0.0))
    assert watch.kept_since_s == 10.0
    watch.take(b"kv@here@other", 1, wire.batch([PagesRemoved((1,))], 0.0))
    assert watch.kept_since_s == 20.0
