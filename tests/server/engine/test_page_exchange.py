"""An engine that takes pages from another one computes the same tokens, whatever arrives of them."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from runtime.cache_groups import PAGE_SIZE
from server.engine import page_exchange
from server.engine.intake import open_request
from server.engine.loop import Engine
from server.engine.overlap import OverlappedEngine
from server.engine.scheduling.pace import Measured, Pace
from server.engine.step_model import GroupLimits, StepLimits
from server.messages import Abort, PagesGiven, Peering, SamplingParams, Submit
from server.peers.taking import Arrival
from server.peers.wire import Offer
from tests.doubles.model import NullModel, null_page_bytes
from tests.doubles.transfers import GIVER, PEERING, exchange_with
from tests.server.engine.conftest import VOCAB, Rig

BYTES = null_page_bytes(PAGE_SIZE)
WHOLE = GroupLimits(600, page_bytes=BYTES)
WINDOW = GroupLimits(300, window=50, page_bytes=BYTES)
STATES = GroupLimits(100, window=4 * PAGE_SIZE + 1, keeps_states=True, page_size=4 * PAGE_SIZE, page_bytes=null_page_bytes(4 * PAGE_SIZE))
GROUPS = {"whole": (WHOLE,), "window": (WHOLE, WINDOW), "states": (WHOLE, STATES)}


def limits(*groups: GroupLimits) -> StepLimits:
    return StepLimits(VOCAB, max_context=512, max_tokens=128, max_seqs=32, groups=groups)


def pair(
    groups: tuple[GroupLimits, ...],
    change: Callable[[list[Arrival]], list[Arrival]] = lambda arrivals: arrivals,
    engine: type[Engine] = Engine,
) -> tuple[Rig, Rig]:
    """Return a rig, and another one that takes pages from it."""
    giver = Rig(engine, limits=limits(*groups))
    taker = Rig(engine, limits=limits(*groups), exchange=exchange_with(giver.model, giver.engine, change))
    return giver, taker


def with_giver(submits: list[Submit]) -> list[Submit]:
    return [msgspec.structs.replace(submit, giver=GIVER) for submit in submits]


def submit(name: str, num_tokens: int, **params) -> Submit:
    rng = random.Random(num_tokens)
    ids = tuple(rng.randrange(1, VOCAB) for _ in range(num_tokens))
    return Submit(name, ids, SamplingParams(max_tokens=20, ignore_eos=True, seed=3, **params))


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_answers_are_the_same_after_transfers(groups, engine, random_submits) -> None:
    submits = random_submits(60, 5)
    submits = [one for one in submits if one.params.constraint is None]
    giver, taker = pair(groups, engine=engine)
    giver.run(submits)
    expected = Rig(engine, limits=limits(*groups)).run(submits)
    assert taker.run(with_giver(submits), per_step=2) == expected
    counts = taker.engine.exchange.counts
    assert counts.num_taken > 20 and counts.num_tries > 10 and counts.num_failed == 0


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_the_prompt_is_not_computed_again(groups) -> None:
    one = submit("a", 300)
    giver, taker = pair(groups)
    assert giver.run([one]) == taker.run(with_giver([one]))
    stride = max(group.page_size for group in groups)
    assert taker.num_cached["a"] == 299 // stride * stride


def test_a_page_that_is_here_is_not_taken() -> None:
    giver, taker = pair((WHOLE,))
    one = submit("a", 300)
    short = msgspec.structs.replace(one, request_id="b", prompt_ids=one.prompt_ids[:200])
    giver.run([one])
    taker.run([short])
    taker.run(with_giver([one]))
    assert taker.engine.exchange.counts.num_taken == 299 // PAGE_SIZE - 200 // PAGE_SIZE


def test_tenants_do_not_share() -> None:
    giver, taker = pair((WHOLE,))
    one = submit("a", 300)
    giver.run([msgspec.structs.replace(one, cache_salt="alice")])
    taker.run(with_giver([msgspec.structs.replace(one, cache_salt="bob")]))
    assert taker.num_cached["a"] == 0 and taker.engine.exchange.counts.num_taken == 0


def broken(random_of: random.Random) -> Callable[[list[Arrival]], list[Arrival]]:
    """Return a change that a lost or confused giver might make. The contents of pages are as they should be: their proof says so."""

    def change(arrivals: list[Arrival]) -> list[Arrival]:
        offer, *pages, end = arrivals
        assert isinstance(offer, Offer)
        many = tuple(first + random_of.choice((-1, 1, 5)) for first in offer.firsts)
        choices: tuple[list[Arrival], ...] = (
            [],
            [end],
            [offer, end],
            [*pages, end],
            [offer, offer, *pages, end],
            [offer, *pages[: random_of.randrange(len(pages) + 1)], end],
            [offer, *(page[: random_of.randrange(len(page))] for page in pages if page), end],
            [offer, *pages, b"more", end],
            [Offer(offer.num_tokens + PAGE_SIZE, offer.firsts), *pages, end],
            [Offer(1 << 40, offer.firsts), *pages, end],
            [Offer(offer.num_tokens, ()), *pages, end],
            [Offer(offer.num_tokens, tuple(max(0, first) for first in many)), end],
        )
        found = random_of.choice(choices)
        return found or [end]

    return change


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_broken_transfers_change_nothing(groups, random_submits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_exchange, "FRAME_BYTES", 2 * BYTES)
    submits = [one for one in random_submits(80, 6) if one.params.constraint is None]
    giver, taker = pair(groups, broken(random.Random(1)))
    expected = giver.run(submits)
    assert taker.run(with_giver(submits), per_step=2) == expected
    assert taker.engine.exchange.counts.num_failed > 10


def test_the_beginning_of_a_broken_transfer_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_exchange, "FRAME_BYTES", BYTES)
    giver, taker = pair((WHOLE,), lambda arrivals: [*arrivals[:8], None])
    one = submit("a", 300)
    assert giver.run([one]) == taker.run(with_giver([one]))
    assert taker.num_cached["a"] == 7 * PAGE_SIZE


def test_a_giver_that_never_answers_is_waited_for_in_vain() -> None:
    giver, taker = pair((WHOLE,), lambda _arrivals: [])
    one, other = submit("a", 300), submit("b", 100)
    expected = giver.run([one, other])
    (waiting,) = with_giver([one])
    taker.engine.submit(waiting)
    taker.engine.submit(other)
    taker.until(lambda: taker.outcomes[("b", 0)].end is not None if ("b", 0) in taker.outcomes else False)
    assert ("a", 0) not in taker.outcomes
    (taking,) = taker.engine.exchange.takings
    taking.transfer.end_s = 0.0
    assert taker.run() == expected


def test_a_request_that_ends_takes_nothing_more() -> None:
    giver, taker = pair((WHOLE,), lambda _arrivals: [])
    giver.run([submit("a", 300)])
    taker.engine.submit(*with_giver([submit("a", 300)]))
    taker.step()
    taker.engine.abort(Abort("a"))
    taker.run()
    assert not taker.engine.has_work and not taker.engine.exchange.takings


def test_a_small_cache_is_not_emptied_for_pages(random_submits) -> None:
    """The taker's cache holds one long prompt at a time, and its running requests come first."""
    small = GroupLimits(40, page_bytes=BYTES)
    submits = [one for one in random_submits(60, 7) if one.params.constraint is None]
    giver = Rig(limits=limits(WHOLE))
    expected = giver.run(submits)
    taker = Rig(limits=limits(small), exchange=exchange_with(giver.model, giver.engine))
    assert taker.run(with_giver(submits), per_step=3) == expected


def test_a_giver_evicts_while_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The giver reads a page at a time, and its cache changes between two of them."""
    monkeypatch.setattr(page_exchange, "FRAME_BYTES", 1)
    small, sent = GroupLimits(40, page_bytes=BYTES), []
    giver = Rig(limits=limits(small))
    one = submit("a", 300)
    giver.run([one])
    exchange = page_exchange.PageExchange(giver.model, giver.engine.scheduler, sent.append, peering=PEERING, fingerprint="")
    chain = page_exchange.Chain(b"")
    chain.digest(299 // PAGE_SIZE - 1, one.prompt_ids)
    exchange.give(page_exchange.GivePages("g", b"".join(chain.digests), 0))
    for _ in range(5):
        exchange.more("g")
        exchange.work()
    giver.run([submit("b", 480)])  # takes most pages, those of the end first
    while exchange.is_giving:
        exchange.more("g")
        exchange.work()
    assert 5 <= len([message for message in sent if message.data]) < 299 // PAGE_SIZE and not sent[-1].data


class SlowModel(NullModel):
    """A model that needs a millisecond of the engine's clock to read or write a page."""

    now_s = 0.0

    def read_page(self, group: int, page: int) -> bytes:
        self.now_s += 0.001
        return super().read_page(group, page)

    def write_page(self, group: int, page: int, data: bytes | memoryview) -> None:
        self.now_s += 0.001
        super().write_page(group, page, data)


def test_pages_move_in_small_portions() -> None:
    """Between two steps, both sides need PORTION_S and no more than one further page."""
    one, most_s = submit("a", 300), page_exchange.PORTION_S + 0.001
    giver = Rig(limits=limits(WHOLE))
    giver.run([one])
    models = [SlowModel(limits(WHOLE)) for _ in range(2)]
    given, taken = models

    def clock_of(model: SlowModel) -> Callable[[], float]:
        return lambda: model.now_s

    sent: list[PagesGiven] = []
    exchange = page_exchange.PageExchange(
        given, giver.engine.scheduler, sent.append, peering=PEERING, fingerprint="", clock=clock_of(given)
    )
    chain = page_exchange.Chain(b"")
    chain.digest(299 // PAGE_SIZE - 1, one.prompt_ids)
    exchange.give(page_exchange.GivePages("g", b"".join(chain.digests), 0))
    exchange.more("g")
    num_portions = 0
    while exchange.has_work:
        before_s = given.now_s
        exchange.work()
        num_portions += 1
        assert given.now_s - before_s <= most_s
    assert num_portions > 5
    taker = Rig(limits=limits(WHOLE))
    transfers = exchange_with(giver.model, giver.engine)
    exchange = transfers(taken, taker.engine.scheduler, sent.append, clock=clock_of(taken))
    request = open_request(*with_giver([one]), 0, limits=taker.limits, eos_ids=())
    assert exchange.begin(request)
    while exchange.is_taking(request):
        before_s = taken.now_s
        exchange.work()
        assert taken.now_s - before_s <= most_s
    assert exchange.counts.num_taken == 299 // PAGE_SIZE


@pytest.mark.parametrize(("transfer_s", "num_tries"), [(9.0, 1), (11.0, 0)])
def test_pages_that_would_take_longer_than_computing_are_not_asked_for(transfer_s: float, num_tries: int) -> None:
    """The prompt has 18 full pages, which are computed within 10 seconds."""
    one, peering = submit("a", 300), Peering("a secret of tests", 18 * BYTES / transfer_s, 600.0)
    giver = Rig(limits=limits(WHOLE))
    giver.run([one])
    taker = Rig(
        limits=limits(WHOLE),
        pace=Pace(128, Measured({1: 0.001, 128: 128 / 28.8}), 60.0),
        exchange=exchange_with(giver.model, giver.engine, peering=peering),
    )
    taker.run(with_giver([one]))
    counts = taker.engine.exchange.counts
    assert (counts.num_tries, counts.num_left_out) == (num_tries, 1 - num_tries)


def test_only_so_many_requests_wait_for_pages() -> None:
    _, taker = pair((WHOLE,), lambda _arrivals: [])
    for number in range(page_exchange.MOST_TRANSFERS + 3):
        taker.engine.submit(*with_giver([submit(f"r{number}", 50 + number)]))
    assert len(taker.engine.exchange.takings) == page_exchange.MOST_TRANSFERS
    assert taker.engine.exchange.counts.num_left_out == 3
    for number in range(page_exchange.MOST_TRANSFERS):
        taker.engine.abort(Abort(f"r{number}"))
    taker.run()
    assert not taker.engine.exchange.takings
