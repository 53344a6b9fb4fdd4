"""Give pages of the prefix cache to other servers, and fetch pages from them, in small portions between steps.

A fetched page is published in the pool as if this server had computed it, and the scheduler finds it like any other page. Neither side
reserves pages: the giver does not send a page that it has evicted, and the taker computes again the pages that it has evicted. So if a page
arrives late or damaged, or does not arrive, the request only takes longer.
"""

from __future__ import annotations

import logging
import queue
import secrets
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

from server.engine.outbox import Publish
from server.engine.request import Request, Sequence, Stage
from server.engine.scheduling.page_pool import PAGE_SIZE, Chain
from server.engine.scheduling.scheduler import Scheduler
from server.engine.step_model import StepModel
from server.messages import GivePages, PageCounts, PagesGiven, Peering
from server.peers.named import Giver
from server.peers.taking import Transfer
from server.peers.wire import DIGEST_BYTES, FRAME_BYTES, NONCE_BYTES, Ask, Offer, PeerFault, Proofs, digests_in

log = logging.getLogger(__name__)

PORTION_S = 0.002  # time for reading and writing pages between two steps, exceeded by at most the time for one page of each transfer
MOST_TRANSFERS = 8  # most requests that wait for pages at a time; further requests compute their prompts


ExchangeOf = Callable[[StepModel, Scheduler, Publish], "PageExchange"]


@dataclass(slots=True, eq=False)
class _Giving:
    """Pages that another server asks for."""

    request_id: str
    chain: Chain
    order: Iterator[tuple[int, int]]  # cache group and index of the pages that are left
    credit: int  # number of messages with pages that may still be sent; `more` adds one
    data: list[bytes] = field(default_factory=list[bytes])  # pages that were read and are not yet sent
    num_bytes: int = 0  # size of `data`


@dataclass(slots=True, eq=False)
class Taking:
    """Pages that a request waits for."""

    seq: Sequence
    transfer: Transfer
    began_s: float
    pages: list[tuple[int, int]] | None = None  # cache group and index of pages not yet written, the next one last; None: no offer yet
    room: list[int] = field(default_factory=list[int])  # number of the prompt's pages per cache group, those held before included
    data: memoryview = field(default_factory=lambda: memoryview(b""))  # bytes of pages that have arrived and are not yet written


class PageExchange:
    """Gives and takes pages between the steps of an engine. The front passes on the pages that other servers ask for."""

    def __init__(
        self,
        model: StepModel,
        scheduler: Scheduler,
        send: Publish,
        *,
        peering: Peering,
        fingerprint: str,
        clock: Callable[[], float] = time.perf_counter,
        transfer_of: Callable[[Giver, Ask, Proofs], Transfer] = Transfer,
    ) -> None:
        """`fingerprint` is that of the model: only servers with equal fingerprints exchange pages."""
        self._transfer_of = transfer_of
        self._model = model
        self._scheduler = scheduler
        self._send = send
        self._peering = peering
        self._proofs = Proofs(peering.secret)
        self._fingerprint = fingerprint
        self._clock = clock
        self._groups = model.limits.groups
        self._givings: dict[str, _Giving] = {}
        self._takings: dict[Request, Taking] = {}
        self._done: list[Request] = []
        self._has_moved = False  # the last call of `work` read or wrote pages
        self._failed_s: dict[tuple[str, int], float] = {}  # time when a server failed last, by host and port
        self._num_given = self._num_taken = self._num_tries = self._num_failed = self._num_left_out = 0
        self._waited_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether `work` may have something to do, or its last call read or wrote pages."""
        return bool(self._takings) or any(giving.credit for giving in self._givings.values()) or self._has_moved

    @property
    def is_giving(self) -> bool:
        """Whether pages are being given, or the last call of `work` read or wrote pages. While this is true, the front is sent
        statistics."""
        return bool(self._givings) or self._has_moved

    @property
    def counts(self) -> PageCounts:
        """The numbers of pages and of transfers since the worker started, and the time for which requests waited for pages."""
        return PageCounts(self._num_given, self._num_taken, self._num_tries, self._num_failed, self._num_left_out, self._waited_s)

    # --- give ------------------------------------------------------------------------------------------------------------

    def give(self, asked: GivePages) -> None:
        """Begin to give the pages that another server asks for. Send an offer, which says which of these pages this server has. The offer
        is empty if the pages that this server has cover no more tokens than the other server has already."""
        pools, chain = self._scheduler.pool.pools, Chain(b"", digests=digests_in(asked.digests))
        num_tokens = self._scheduler.pool.touch(chain, (), len(chain.digests) * PAGE_SIZE)
        firsts = tuple(
            max(pool.first_needed(num_tokens), 0 if group.window is not None else asked.num_held // group.page_size)
            for pool, group in zip(pools, self._groups, strict=True)
        )
        offer = Offer(num_tokens, firsts) if num_tokens > asked.num_held else Offer(0, (0,) * len(pools))
        order = offer.order([group.page_size for group in self._groups])
        self._givings[asked.request_id] = _Giving(asked.request_id, chain, order, asked.num_frames)
        self._send(PagesGiven(asked.request_id, offer))

    def more(self, request_id: str) -> None:
        """Allow one more message with pages, because the front has passed on one of the messages that were sent. Do nothing if the transfer
        has ended."""
        if (giving := self._givings.get(request_id)) is not None:
            giving.credit += 1

    def stop(self, request_id: str) -> None:
        """Stop giving pages for a request."""
        self._givings.pop(request_id, None)

    def _read(self, giving: _Giving) -> None:
        """Read the next page of a transfer. Once the pages that were read fill a frame, or no page is left, send them. The transfer ends at
        a page that was evicted, because the taker could not use the pages after it."""
        group, index = next(giving.order, (0, None))
        pool = self._scheduler.pool.pools[group]
        page = None if index is None else pool.page_of(pool.name(giving.chain, index, ()))
        if page is not None:
            giving.data.append(self._model.read_page(group, page))
            giving.num_bytes += len(giving.data[-1])
            if giving.num_bytes < FRAME_BYTES:
                return
        if giving.data:
            self._num_given += len(giving.data)
            self._send(PagesGiven(giving.request_id, data=b"".join(giving.data)))
            giving.data, giving.num_bytes = [], 0
            giving.credit -= 1
        if page is None:
            self._send(PagesGiven(giving.request_id))
            self.stop(giving.request_id)

    # --- take ------------------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> bool:
        """Begin to fetch pages of the prompt from the server that a request names. Return True if the request has to wait for them. Fetch
        nothing and return False in each of these cases: the request names no server; no unfinished choice may reuse a whole page
        (`Sequence.num_reusable`); this server holds all whole pages already; the named server would have to compute a prompt with images or
        audio; computing the pages here is probably faster; MOST_TRANSFERS transfers are under way; the named server has failed in the last
        `Peering.avoid_s` seconds."""
        giver, submit = request.submit.giver, request.submit
        living = (seq for seq in request.sequences if seq.stage is not Stage.FINISHED)
        seq = next((seq for seq in living if seq.num_reusable >= PAGE_SIZE), None)
        if giver is None or seq is None or (giver.computes and request.excerpts):
            return False
        num_tokens = seq.num_reusable // PAGE_SIZE * PAGE_SIZE
        num_held = self._scheduler.pool.touch(seq.held.chain, seq.token_ids, num_tokens)
        if num_tokens <= num_held:
            return False
        computing_s = self._scheduler.pace.prompt_s(num_tokens - num_held)
        is_slow = computing_s and self._bytes_of(num_tokens - num_held) > computing_s * self._peering.rate_bytes
        if is_slow or len(self._takings) >= MOST_TRANSFERS or self._has_failed(giver):
            self._num_left_out += 1
            return False
        seq.held.chain.digest(num_tokens // PAGE_SIZE - 1, seq.token_ids)
        ask = Ask(
            self._fingerprint,
            tuple(group.page_bytes for group in self._groups),
            secrets.token_bytes(NONCE_BYTES),
            b"".join(seq.held.chain.digests[: num_tokens // PAGE_SIZE]),
            num_held,
            min(self._peering.patience_s + computing_s * (1 + giver.computes), 3600.0),
            time.time(),
            np.asarray(seq.token_ids[:num_tokens], "<i4").tobytes() if giver.computes else b"",
            submit.cache_salt if giver.computes else "",
            submit.fairness_key if giver.computes else "",
            submit.priority if giver.computes else 0,
        )
        transfer = self._transfer_of(giver, ask, self._proofs)
        transfer.begin()
        self._num_tries += 1
        self._takings[request] = Taking(seq, transfer, self._clock())
        return True

    def drop(self, request: Request) -> None:
        """Stop fetching pages for a request, which has ended."""
        if (taking := self._takings.get(request)) is not None:
            self._end(request, taking, "the request has ended", blames=False)

    @property
    def takings(self) -> Collection[Taking]:
        return self._takings.values()

    def has_waiting(self, request: Request) -> bool:
        """Return whether a request waits for pages: from `begin` until `arrived` returns it."""
        return request in self._takings or request in self._done

    def arrived(self) -> list[Request]:
        """Return the requests that need not wait for pages any longer. Each request is returned once."""
        done, self._done = self._done, []
        return done

    def _bytes_of(self, num_tokens: int) -> int:
        """Return how many bytes the pages of `num_tokens` tokens have, without those that a window excludes."""
        counts = ((num_tokens if group.window is None else min(num_tokens, group.window)) // group.page_size for group in self._groups)
        return sum(count * group.page_bytes for count, group in zip(counts, self._groups, strict=True))

    def _write(self, request: Request, taking: Taking) -> bool:
        """Write the next page that has arrived, and publish it. Return whether a page had arrived. Skip a page that is published already,
        or for which there is no room. End the transfer after its last page, or if a page cannot be written."""
        if not taking.data and not self._receive(request, taking):
            return False
        assert taking.pages
        group, index = taking.pages.pop()
        page_bytes = self._groups[group].page_bytes
        data, taking.data = taking.data[:page_bytes], taking.data[page_bytes:]
        pool, seq = self._scheduler.pool.pools[group], taking.seq
        page = pool.adopt(seq.held.chain, index, seq.token_ids)
        if page is not None:
            try:
                self._model.write_page(group, page, data)
            except Exception as error:
                pool.withdraw(page)
                log.exception("a page that another server has sent cannot be written")
                self._end(request, taking, f"page {index} of cache group {group} cannot be written: {error}", blames=False)
                return True
            self._num_taken += 1
        if not taking.pages and not taking.data:
            self._end(request, taking, "")
        return True

    def _receive(self, request: Request, taking: Taking) -> bool:
        """Handle the next arrival of a transfer, if there is one. Return True if there are pages to write, and False otherwise. End the
        transfer if it has failed, has ended before its last page, or takes too long. End it also if the giver offers nothing, offers more
        than fits, or sends something that it was not asked for or has not offered."""
        try:
            arrival = taking.transfer.arrivals.get_nowait()
        except queue.Empty:
            if time.monotonic() >= taking.transfer.end_s:
                self._end(request, taking, f"it took longer than {taking.transfer.ask.limit_s:.3g} s")
            return False
        try:
            match arrival:
                case None:
                    fault = taking.transfer.fault
                    self._end(request, taking, fault or "it ended before the last page", blames=bool(fault))
                case Offer():
                    self._plan(taking, arrival)
                    if not self._has_room():
                        self._end(request, taking, "the pages do not fit into this server's cache now", blames=False)
                    elif not taking.pages:
                        self._end(request, taking, "")
                case bytes():
                    self._require_whole(taking, len(arrival))
                    taking.data = memoryview(arrival)
                    return True
        except PeerFault as error:
            self._end(request, taking, str(error))
        return False

    def _plan(self, taking: Taking, offer: Offer) -> None:
        """Note which pages an offer announces. Raise PeerFault if it announces more tokens than were asked for, or another number of cache
        groups."""
        ask = taking.transfer.ask
        if offer.num_tokens > ask.num_tokens or len(offer.firsts) != len(self._groups):
            raise PeerFault(f"it offers {offer.num_tokens} tokens in {len(offer.firsts)} cache groups, which nobody asked for")
        sizes = [group.page_size for group in self._groups]
        pages = list(offer.order(sizes))[::-1]
        taking.room = [ask.num_held // size + sum(group == number for group, _ in pages) for number, size in enumerate(sizes)]
        taking.pages = pages

    def _has_room(self) -> bool:
        """Return whether the pages of all transfers together fit beside the pages that sequences hold. If they do not fit, the pages of one
        transfer would evict those of another."""
        needed = zip(*(taking.room for taking in self._takings.values() if taking.room), strict=True)
        return all(sum(room) <= pool.num_available for pool, room in zip(self._scheduler.pool.pools, needed, strict=True))

    def _require_whole(self, taking: Taking, num_bytes: int) -> None:
        """Raise PeerFault unless an offer has arrived and `num_bytes` is the size of one or more of the next expected pages."""
        if not num_bytes:
            raise PeerFault("it sent a frame without pages")
        if taking.pages is None:
            raise PeerFault("it sent pages before its offer")
        at = len(taking.pages)
        while num_bytes > 0 and at > 0:
            at -= 1
            num_bytes -= self._groups[taking.pages[at][0]].page_bytes
        if num_bytes:
            raise PeerFault("it sent other bytes than the pages that it offers")

    def _end(self, request: Request, taking: Taking, fault: str, *, blames: bool = True) -> None:
        """End a transfer: its request need not wait any longer. `fault` says why the transfer failed, or is empty if all pages of the offer
        have arrived, which may be none. If there is a fault, and the giver is to blame (`blames`), the giver is not asked again for
        `Peering.avoid_s` seconds."""
        del self._takings[request]
        taking.transfer.cancel()
        self._waited_s += self._clock() - taking.began_s
        if taking.pages is not None:  # the beginning of the prompt was written first; make it the last to be evicted
            self._scheduler.pool.touch(taking.seq.held.chain, taking.seq.token_ids, taking.transfer.ask.num_tokens)
        if not request.is_finished:
            self._done.append(request)
        if not fault:
            return
        self._num_failed += 1
        giver = taking.transfer.giver
        if blames:
            self._failed_s[giver.host, giver.port] = self._clock()
        if not request.is_finished:
            log.warning("pages of %s:%d were not taken, and the prompt is computed here: %s", giver.host, giver.port, fault)

    def _has_failed(self, giver: Giver) -> bool:
        """Return whether a server has failed in the last `Peering.avoid_s` seconds. Forget older failures."""
        since_s = self._clock() - self._peering.avoid_s
        self._failed_s = {other: failed_s for other, failed_s in self._failed_s.items() if failed_s > since_s}
        return (giver.host, giver.port) in self._failed_s

    # --- between steps ---------------------------------------------------------------------------------------------------

    def work(self) -> bool:
        """Write pages that have arrived, and read pages that other servers ask for, for about PORTION_S. Return whether there were such
        pages."""
        if not self.has_work:
            return False
        end_s = self._clock() + PORTION_S
        has_more, self._has_moved = True, False
        while has_more:
            has_more = False
            for request, taking in list(self._takings.items()):
                has_more |= self._write(request, taking)
            for giving in list(self._givings.values()):
                if giving.credit:
                    self._read(giving)
                    has_more = True
            self._has_moved |= has_more
            has_more &= self._clock() < end_s
        return self._has_moved

    def close(self) -> None:
        for taking in self._takings.values():
            taking.transfer.cancel()


assert DIGEST_BYTES == 16  # the size of the digests that `Chain` computes
