"""An engine that takes pages from another one computes the same tokens, whatever arrives of them."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from runtime.cache_groups import PAGE_SIZE
from server.constraints.isolated import IsolatedMatcher
from server.engine import page_exchange
from server.engine.intake import open_request
from server.engine.loop import Engine
from server.engine.overlap import OverlappedEngine
from server.engine.scheduling.pace import Measured, Pace
from server.engine.step_model import GroupLimits, StepLimits
from server.messages import Abort, Constraint, ConstraintKind, PagesGiven, Peering, SamplingParams, Submit
from server.peers.taking import Arrival
from server.peers.wire import Offer
from tests.doubles.model import NullModel, null_page_bytes
from tests.doubles.transfers import GIVER, PEERING, exchange_with
from tests.server.constraints.processes import wait_until
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


def test_no_page_is_taken_for_a_choice_that_has_ended() -> None:
    """An earlier worker has finished the first choice, whose answer is long."""
    _, taker = pair((WHOLE,))
    (one,) = with_giver([submit("a", 40)])
    taker.engine.submit(msgspec.structs.replace(one, num_choices=2, emitted=((5,) * 100, ()), finished=(0,)))
    assert [taking.transfer.ask.num_tokens for taking in taker.engine.exchange.takings] == [2 * PAGE_SIZE]


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
            [offer, b"", *pages, end],
            [offer, *pages[:1], b"", *pages[1:], end],
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
    counts = taker.engine.exchange.counts
    assert not taker.engine.has_work and not taker.engine.exchange.takings
    assert counts.num_failed == 1 and counts.waited_s > 0


@pytest.mark.parametrize("engine", [Engine, OverlappedEngine])
def test_a_request_is_scheduled_once_when_all_that_it_waits_for_ends_at_once(constraints, monkeypatch, engine) -> None:
    """Its pages have arrived. Before the next step, the choice is aborted whose constraint is still compiled; the other one was ready."""
    monkeypatch.setattr(page_exchange, "FRAME_BYTES", BYTES)
    giver = Rig(limits=limits(WHOLE))
    one = msgspec.structs.replace(submit("a", 60, constraint=Constraint(ConstraintKind.REGEX, "a+")), num_choices=2)
    whole = Rig(engine, limits=limits(WHOLE), constraints=constraints).run([one])
    exchange = exchange_with(giver.model, giver.engine, lambda _arrivals: [])
    taker, poll = Rig(engine, limits=limits(WHOLE), constraints=constraints, exchange=exchange), IsolatedMatcher.poll
    taker.engine.submit(*with_giver([one]))
    late, ready = taker.engine._requests.living["a"].sequences
    monkeypatch.setattr(IsolatedMatcher, "poll", lambda self: self is not late.matcher and poll(self))
    wait_until(lambda: not taker.step() and list(taker.engine._requests._compiling) == [late])
    (taking,) = taker.engine.exchange.takings
    taking.transfer.arrivals.put(None)
    taker.step()
    assert not taker.engine.exchange.takings and ready not in taker.engine.scheduler.queue
    taker.engine.abort(Abort("a", 0))
    monkeypatch.undo()
    outcomes = taker.run([submit("b", 40)])
    assert outcomes["a", 1] == whole["a", 1] and outcomes["b", 0].end is not None
    assert not len(taker.engine.scheduler.queue) and taker.engine.scheduler.queue.head() is None


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
    exchange.give(page_exchange.GivePages("g", b"".join(chain.digests), 0, 0))
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
    exchange.give(page_exchange.GivePages("g", b"".join(chain.digests), 0, 1))
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
    while exchange.takings:
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


def asked(giver: Rig, prompt_ids: tuple[int, ...], num_frames: int) -> page_exchange.GivePages:
    chain = page_exchange.Chain(b"")
    chain.digest(len(prompt_ids) // PAGE_SIZE - 1, prompt_ids)
    return page_exchange.GivePages("g", b"".join(chain.digests), 0, num_frames)


def test_a_giver_reads_as_many_frames_as_it_may_in_one_portion(monkeypatch: pytest.MonkeyPatch) -> None:
    """One page fills a frame, as it does with most models. The front need not ask for each of them."""
    monkeypatch.setattr(page_exchange, "FRAME_BYTES", BYTES)
    monkeypatch.setattr(page_exchange, "PORTION_S", 0.0045)
    one, giver = submit("a", 300), Rig(limits=limits(WHOLE))
    giver.run([one])
    model, sent = SlowModel(limits(WHOLE)), list[PagesGiven]()
    exchange = page_exchange.PageExchange(
        model, giver.engine.scheduler, sent.append, peering=PEERING, fingerprint="", clock=lambda: model.now_s
    )
    exchange.give(asked(giver, one.prompt_ids, 8))
    assert exchange.work() and len(sent) - 1 == 5, "a page takes a millisecond, and the fifth one exceeds the portion"
    assert exchange.work() and len(sent) - 1 == 8, "no more frames may be on the way"
    assert not exchange.work() and not exchange.has_work
    exchange.more("g")
    assert exchange.work() and len(sent) - 1 == 9
    assert not exchange.work() and not exchange.has_work


def test_an_idle_giver_does_not_pause_between_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_exchange, "PORTION_S", 60.0)  # so that one portion has all pages on a busy machine, too
    one, giver = submit("a", 300), Rig(limits=limits(WHOLE), exchange=exchange_with(NullModel(limits(WHOLE)), Rig().engine))
    giver.run([one])
    assert giver.engine.exchange is not None
    giver.engine.exchange.give(asked(giver, one.prompt_ids, 8))
    assert giver.engine.step(), "a step that has read pages counts as work"
    giver.stats = None
    assert not giver.engine.step() and giver.stats is not None and giver.stats.pages.num_given == 299 // PAGE_SIZE
    assert sum(len(message.data) for message in giver.given) == 299 // PAGE_SIZE * BYTES


def test_no_name_of_a_page_is_made_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt may have thousands of pages, and the engine must not wait for all of their names."""
    one, giver, num_names = submit("a", 300), Rig(limits=limits(WHOLE)), 0
    giver.run([one])
    exchange = page_exchange.PageExchange(
        giver.model, giver.engine.scheduler, lambda _: None, peering=PEERING, fingerprint="", clock=lambda: 0.0
    )
    (pool,) = giver.engine.scheduler.pool.pools
    monkeypatch.setattr(type(giver.engine.scheduler.pool), "touch", lambda _pool, _chain, _ids, most: most)
    name = type(pool).name

    def counted(*args) -> bytes:
        nonlocal num_names
        num_names += 1
        return name(*args)

    monkeypatch.setattr(type(pool), "name", counted)
    exchange.give(asked(giver, one.prompt_ids, 8))
    assert num_names == 0
    exchange.work()
    assert num_names == 299 // PAGE_SIZE


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_page_that_cannot_be_written_ends_only_its_transfer(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    one, (giver, taker) = submit("a", 300), pair(groups)
    expected, number, write = giver.run([one]), 0, taker.model.write_page

    def broken_after_five(*args) -> None:
        nonlocal number
        number += 1
        if number > 5:
            raise RuntimeError("the device has no memory for this copy")
        write(*args)

    monkeypatch.setattr(taker.model, "write_page", broken_after_five)
    assert taker.run(with_giver([one])) == expected
    counts = taker.engine.exchange.counts
    assert (counts.num_taken, counts.num_failed, number) == (5, 1, 6)


def test_transfers_do_not_evict_each_others_pages() -> None:
    """There is space for either transfer, but not for both. The second one fails, and evicts no page of the first."""
    giver = Rig(limits=limits(WHOLE))
    submits = [submit("a", 300), submit("b", 310)]
    expected = giver.run(submits)
    small = GroupLimits(31, page_bytes=BYTES)
    taker = Rig(limits=limits(small), exchange=exchange_with(giver.model, giver.engine))
    assert taker.run(with_giver(submits)) == expected
    counts = taker.engine.exchange.counts
    assert (counts.num_tries, counts.num_failed) == (2, 1) and counts.num_taken == 299 // PAGE_SIZE


def test_the_beginning_of_a_prompt_that_was_taken_is_evicted_last() -> None:
    giver = Rig(limits=limits(WHOLE))
    one = submit("a", 300)
    giver.run([one])
    taker = Rig(limits=limits(GroupLimits(41, page_bytes=BYTES)))
    exchange = exchange_with(giver.model, giver.engine)(taker.model, taker.engine.scheduler, lambda _: None)
    request = open_request(*with_giver([one]), 0, limits=taker.limits, eos_ids=())
    assert exchange.begin(request)
    while exchange.takings:
        exchange.work()
    taker.run([submit("b", 400)])  # needs 27 of 40 pages, 22 of which are free
    short = msgspec.structs.replace(one, request_id="c", prompt_ids=one.prompt_ids[: 10 * PAGE_SIZE])
    taker.run([short])
    assert taker.num_cached["c"] >= 9 * PAGE_SIZE


def test_a_giver_that_has_failed_is_left_out_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    giver = Rig(limits=limits(WHOLE))
    submits = [submit(f"r{at}", 100 + at) for at in range(4)]
    expected, now_s = giver.run(submits), 100.0
    exchange = exchange_with(
        giver.model, giver.engine, lambda arrivals: [b"pages before the offer", *arrivals], Peering("a secret of tests", 1e18, 600.0, 5.0)
    )
    taker = Rig(limits=limits(WHOLE), exchange=lambda *args: exchange(*args, clock=lambda: now_s))
    assert taker.engine.exchange is not None
    found, tries = {}, []
    for one, pause_s in zip(submits, (0.0, 4.0, 2.0, 0.0), strict=True):
        now_s += pause_s
        found |= taker.run(with_giver([one]))
        tries.append(taker.engine.exchange.counts.num_tries)
    assert tries == [1, 1, 2, 2] and taker.engine.exchange.counts.num_left_out == 2
    assert found == expected
