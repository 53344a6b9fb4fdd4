"""The events of prefix caches: an index that hears nothing else has exactly the pages of the cache."""

from __future__ import annotations

import random
from hashlib import blake2b

import msgspec
import pytest

from server.engine.loop import Engine
from server.engine.overlap import OverlappedEngine
from server.engine.scheduling.cache_log import CacheLog, hash_of
from server.engine.scheduling.cache_pool import CachePool, Held
from server.engine.step_model import GroupLimits, StepLimits
from server.fleet import wire
from server.fleet.cache_events import CacheEvents
from server.messages import CacheChanged, PagesRemoved, PagesStored, SamplingParams, Submit
from tests.doubles.model import NullModel
from tests.server.fleet.index import Index

PLAIN = (GroupLimits(60),)
GROUPS = (GroupLimits(60), GroupLimits(40, window=40), GroupLimits(12, keeps_states=True, page_size=64))


def limits_of(groups: tuple[GroupLimits, ...]) -> StepLimits:
    return StepLimits(vocab_size=400, max_context=512, max_tokens=64, max_seqs=8, groups=groups)


def digests_of(token_ids: list[int], salt: str = "") -> list[bytes]:
    """Compute the digests of all pages of 16 tokens, as `docs/decisions/0093` writes them down."""
    found, parent = [], blake2b(salt.encode(), digest_size=16).digest()
    for at in range(0, len(token_ids) // 16 * 16, 16):
        tokens = b"".join(token.to_bytes(4, "little") for token in token_ids[at : at + 16])
        parent = blake2b(parent + tokens, digest_size=16).digest()
        found.append(parent)
    return found


def assert_equal(index: Index, pool: CachePool) -> None:
    for group, one in enumerate(pool.pools):
        assert {hash_of(digest) for digest in one._page_of} == index.pages.get(group, {}).keys()


class Sent:
    """Collects what is sent, and feeds an index per topic."""

    def __init__(self) -> None:
        self.indices: dict[bytes, Index] = {}
        self.events: list[list[object]] = []

    def __call__(self, topic: bytes, number: int, batch: bytes) -> None:
        self.indices.setdefault(topic, Index()).feed(number, batch)
        self.events += msgspec.msgpack.decode(batch)[1]

    def index(self, model: str) -> Index:
        return self.indices[f"kv@me@{model}".encode()]

    def pages(self, model: str) -> set[int]:
        return set(self.index(model).pages.get(0, {}))


@pytest.mark.parametrize("groups", [PLAIN, GROUPS], ids=["one group", "windows and states"])
def test_an_index_has_the_pages_of_the_cache_after_10000_requests(groups) -> None:
    """There are 10,000 random requests with shared beginnings, some with salts or images. They reuse pages, write, publish, fork, are cut
    short and end. Sometimes the worker dies with its cache. One index hears all batches, another one asks now and then for those that it
    missed."""
    rng = random.Random(1)
    limits = limits_of(groups)
    sent, late = Sent(), Index()
    events = CacheEvents("me", sent)
    source = events.source_of("m")
    log = CacheLog(limits.groups)
    pool = CachePool.of(limits, log)
    beginnings = [[rng.randrange(400) for _ in range(rng.randrange(0, 200))] for _ in range(12)]
    images = [(), (), ((3, b"cat"),), ((3, b"dog"),), ((3, b"cat"), (40, b"dog"))]
    living: list[Held] = []
    for number in range(10_000):
        text = rng.choice(beginnings) + [rng.randrange(400) for _ in range(rng.randrange(1, 80))]
        held = Held.nothing(limits, rng.choice(["", "", "salt"]), rng.choice(images))
        start = pool.reuse(held, text, len(text) - 1)
        living.append(held)
        while start < len(text):
            stop = min(start + rng.randrange(1, 64), len(text))
            while pool.make_writable(held, start, stop) is None and len(living) > 1:
                pool.release(living.pop(0))
            pool.publish(held, text, stop)
            start = stop
        if rng.random() < 0.2:
            other = Held.nothing(limits, held.chain.salt.decode(), held.chain.marks)
            pool.fork(held, other, len(text))
            living.append(other)
        if rng.random() < 0.1:
            cut = text[: rng.randrange(1, len(text) + 1)]
            pool.rewind(held, cut, len(cut) - 1)
        while living and rng.random() < 0.6:
            pool.release(living.pop(rng.randrange(len(living))))
        if log.has_news:
            source.changed(log.take())
        if number % 100 == 0:
            assert_equal(sent.index("m"), pool)
            pool.check_integrity(living)
        if rng.random() < 0.01:
            for missed in events.replay(late.number):
                late.feed(*missed)
            assert_equal(late, pool)
        if number in (2_500, 7_000):
            source.cleared()
            log, living = CacheLog(limits.groups), []
            pool = CachePool.of(limits, log)
            assert_equal(sent.index("m"), pool)
    assert_equal(sent.index("m"), pool)
    assert sent.index("m").number > 5_000 and all(sent.index("m").pages[group] for group in range(len(groups)))
    assert sum(event == ["AllBlocksCleared"] for event in sent.events) == 2


def test_hashes_name_the_whole_beginning_of_a_prompt() -> None:
    text = list(range(100))
    pool = CachePool.of(limits_of(PLAIN), log := CacheLog(PLAIN))
    held = Held.nothing(limits_of(PLAIN), "salt")
    pool.make_writable(held, 0, 100)
    pool.publish(held, text, 100)
    (stored,) = log.take()
    assert isinstance(stored, PagesStored) and stored.parent is None and stored.token_ids == tuple(text[:96])
    assert stored.hashes == tuple(int.from_bytes(digest[-8:], "big") for digest in digests_of(text, "salt"))


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_an_engine_tells_all_before_it_rests(engine) -> None:
    """After its last request, nothing of the log is left in the engine, and the index has the pages of its cache. Tokens are the same as
    without the log."""
    rng, index = random.Random(2), Index()
    limits = StepLimits(320, max_context=512, max_tokens=128, max_seqs=8, groups=(GroupLimits(50),))
    prompts = [tuple(rng.randrange(1, 320) for _ in range(rng.randrange(1, 200))) for _ in range(40)]
    told: dict[bool, list[object]] = {False: [], True: []}
    for logs_cache in (False, True):
        one = engine(NullModel(limits), told[logs_cache].append, logs_cache=logs_cache)
        for i, prompt in enumerate(prompts):
            one.submit(Submit(str(i), prompt, SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)))
        while one.has_work:
            one.step()
        pool = one.scheduler.pool
        one.close()
    for message in told[True]:
        if isinstance(message, CacheChanged):
            index.feed(index.number, wire.batch(message.changes, 1.0))
    assert_equal(index, pool)
    assert index.pages[0] and not any(isinstance(message, CacheChanged) for message in told[False])
    assert _tokens(told[True]) == _tokens(told[False])


def _tokens(messages: list[object]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for event in (event for message in messages for event in getattr(message, "events", ())):
        found.setdefault(event.request_id, []).extend(event.token_ids)
    return found


# --- the stream of a model ------------------------------------------------------------------------------------------------


def stored(*hashes: int, parent: int | None = None) -> PagesStored:
    return PagesStored(hashes, parent, tuple(range(16 * len(hashes))), 16)


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def events(sent: Sent) -> CacheEvents:
    return CacheEvents("me", sent)


def test_each_model_counts_for_itself(events, sent) -> None:
    a, b = events.source_of("a"), events.source_of("b")
    a.changed([stored(1, 2)])
    b.changed([stored(3)])
    a.changed([PagesRemoved((2,)), stored(4, parent=1)])
    assert sent.pages("a") == {1, 4} and sent.pages("b") == {3}
    assert [number for number, _ in events.replay(0)] == [0, 1] and [number for number, _ in events.replay(1)] == [1]
    assert [number for number, _ in events.replay(0, b"kv@me@b")] == [0] and events.replay(0, b"kv@me@c") == []


def test_the_cache_of_a_dead_worker_is_cleared(events, sent) -> None:
    """`AllBlocksCleared` clears all that a router knows about a replica. So it is sent only if no other model has pages."""
    a, b = events.source_of("a"), events.source_of("b")
    a.changed([stored(1, 2)])
    b.changed([stored(3)])
    a.cleared()
    assert sent.pages("a") == set() and sent.pages("b") == {3}
    assert sent.events[-1][0] == "BlockRemoved" and sorted(sent.events[-1][1]) == [1, 2]
    num_sent = len(sent.events)
    a.cleared()
    assert len(sent.events) == num_sent, "nothing is left to clear"
    b.cleared()
    assert sent.pages("b") == set() and sent.events[-1] == ["AllBlocksCleared"]
    a.changed([stored(5)])
    assert sent.pages("a") == {5}


def test_a_replaced_model_keeps_the_pages_that_either_has(events, sent) -> None:
    old, new = events.source_of("a"), events.source_of("a")
    old.changed([stored(1, 2)])
    new.changed([stored(2, 3)])
    old.changed([PagesRemoved((1,)), PagesRemoved((2,))])
    assert sent.pages("a") == {2, 3}, "the new model has page 2 too"
    old.changed([stored(4)])
    old.cleared()
    assert sent.pages("a") == {2, 3}
    new.cleared()
    assert sent.pages("a") == set()


def test_only_the_last_batches_are_kept(sent) -> None:
    events = CacheEvents("me", sent, most_kept=3)
    source = events.source_of("a")
    for page in range(5):
        source.changed([stored(page)])
    assert [number for number, _ in events.replay(0)] == [2, 3, 4]
    size = len(events.replay(4)[0][1])
    events = CacheEvents("me", Sent(), most_kept_bytes=2 * size + 1)
    source = events.source_of("a")
    for page in range(5):
        source.changed([stored(page)])
    assert [number for number, _ in events.replay(0)] == [3, 4]


def test_of_a_model_that_has_ended_only_the_end_is_kept(events, sent) -> None:
    """Each version of a model may have a name of its own: a server that runs for a year must not keep the batches of all of them. But the
    numbers of a topic go on when a model comes back."""
    for version in range(40):
        source = events.source_of(f"v{version}")
        for page in range(50):
            source.changed([stored(page)])
        assert len(events.replay(0, f"kv@me@v{version}".encode())) == 50
        source.cleared()
    kept = [events.replay(0, f"kv@me@v{version}".encode()) for version in range(40)]
    assert [[number for number, _ in batches] for batches in kept] == [*[[50]] * 39, list(range(51))]
    assert all(msgspec.msgpack.decode(batches[-1][1])[1] == [["AllBlocksCleared"]] for batches in kept)
    events.source_of("v0").changed([stored(1)])
    assert [number for number, _ in events.replay(0, b"kv@me@v0")] == [50, 51] and sent.pages("v0") == {1}


def test_groups_are_told_apart_on_the_wire() -> None:
    states = PagesStored((7,), 6, (1, 2), 2, 2, keeps_states=True)
    window = PagesStored((7,), None, (1, 2), 2, 1, window=40)
    batch = wire.batch([states, window, PagesStored((7,), None, (1, 2), 2, 0), PagesRemoved((7,), 1)], 2.0)
    time_s, events, rank = msgspec.msgpack.decode(batch)
    assert (time_s, rank) == (2.0, 0)
    assert events == [
        ["BlockStored", [7], 6, [1, 2], 2, None, "GPU", None, None, 2, "mamba", None],
        ["BlockStored", [7], None, [1, 2], 2, None, "GPU", None, None, 1, "sliding_window", 40],
        ["BlockStored", [7], None, [1, 2], 2, None, "GPU", None, None, 0, "full_attention", None],
        ["BlockRemoved", [7], "GPU", 1],
    ]
