"""Give pages of the prefix cache to other servers, and take pages from them, in small portions between steps.

A page that is taken is published in the pool as if it had been computed here, and the scheduler finds it like any other. Neither side holds
pages back: a page that is evicted meanwhile is not given, or computed again. So what arrives late, broken or never costs time, and nothing
else.
"""

from __future__ import annotations

import logging
import queue
import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from server.engine.outbox import Publish
from server.engine.request import Request, Sequence
from server.engine.scheduling.page_pool import PAGE_SIZE, Chain
from server.engine.scheduling.scheduler import Scheduler
from server.engine.step_model import StepModel
from server.messages import GivePages, PageCounts, PagesGiven, Peering
from server.peers.named import Giver
from server.peers.taking import Transfer
from server.peers.wire import DIGEST_BYTES, FRAME_BYTES, NONCE_BYTES, Ask, Offer, PeerFault, Proofs, digests_in

log = logging.getLogger(__name__)

PORTION_S = 0.002  # time for reading and writing pages between two steps; each transfer may have one page more
MOST_TRANSFERS = 8  # requests that wait for pages at a time; others compute their prompts


ExchangeOf = Callable[[StepModel, Scheduler, Publish], "PageExchange"]


@dataclass(slots=True, eq=False)
class _Giving:
    """Pages that another server asks for."""

    request_id: str
    names: list[tuple[int, bytes]]  # of the pages that are left: cache group and digest, the first one last
    wants: bool = True  # the front asks for the next pages
    data: list[bytes] = field(default_factory=list[bytes])
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class Taking:
    """Pages that a request waits for."""

    seq: Sequence
    transfer: Transfer
    began_s: float
    pages: list[tuple[int, int]] | None = None  # cache group and index of those that have not arrived, the first one last; None: no offer
    data: memoryview = field(default_factory=lambda: memoryview(b""))  # has arrived, and is not written


class PageExchange:
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
        """`fingerprint` is that of the model: only servers with the same one exchange pages."""
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
        self._num_given = self._num_taken = self._num_tries = self._num_failed = self._num_left_out = 0
        self._waited_s = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._takings) or any(giving.wants for giving in self._givings.values())

    @property
    def is_giving(self) -> bool:
        return bool(self._givings)

    @property
    def counts(self) -> PageCounts:
        return PageCounts(self._num_given, self._num_taken, self._num_tries, self._num_failed, self._num_left_out, self._waited_s)

    # --- give ------------------------------------------------------------------------------------------------------------

    def give(self, asked: GivePages) -> None:
        pools, chain = self._scheduler.pool.pools, Chain(b"", digests=digests_in(asked.digests))
        num_tokens = self._scheduler.pool.touch(chain, (), len(chain.digests) * PAGE_SIZE)
        firsts = tuple(
            max(pool.first_needed(num_tokens), 0 if group.window is not None else asked.num_held // group.page_size)
            for pool, group in zip(pools, self._groups, strict=True)
        )
        offer = Offer(num_tokens, firsts) if num_tokens > asked.num_held else Offer(0, (0,) * len(pools))
        order = offer.order([group.page_size for group in self._groups])
        names = [(group, pools[group].name(chain, index, ())) for group, index in reversed(order)]
        self._givings[asked.request_id] = _Giving(asked.request_id, names, wants=False)
        self._send(PagesGiven(asked.request_id, offer))

    def more(self, request_id: str) -> None:
        if (giving := self._givings.get(request_id)) is not None:
            giving.wants = True

    def stop(self, request_id: str) -> None:
        self._givings.pop(request_id, None)

    def _read(self, giving: _Giving) -> None:
        """Read the next page, and send what was read if that is enough."""
        page = None
        if giving.names:
            group, digest = giving.names.pop()
            page = self._scheduler.pool.pools[group].page_of(digest)
            if page is None:
                giving.names.clear()  # it is evicted, and what follows would be of no use
            else:
                giving.data.append(self._model.read_page(group, page))
                giving.num_bytes += len(giving.data[-1])
        if giving.names and giving.num_bytes < FRAME_BYTES:
            return
        self._num_given += len(giving.data)
        self._send(PagesGiven(giving.request_id, data=b"".join(giving.data)))
        if not giving.data:
            self.stop(giving.request_id)
        giving.data, giving.num_bytes, giving.wants = [], 0, False

    # --- take ------------------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> bool:
        """Begin to take pages of the prompt from the server that a request names. Return whether the request is to wait for them."""
        giver, submit = request.submit.giver, request.submit
        seq = next((seq for seq in request.sequences if seq.num_reusable >= PAGE_SIZE), None)
        if giver is None or seq is None or (giver.computes and request.crops):
            return False
        num_tokens = seq.num_reusable // PAGE_SIZE * PAGE_SIZE
        num_held = self._scheduler.pool.touch(seq.held.chain, seq.token_ids, num_tokens)
        if num_tokens <= num_held:
            return False
        computing_s = self._scheduler.pace.prompt_s(num_tokens - num_held)
        is_slow = computing_s and self._bytes_of(num_tokens - num_held) > computing_s * self._peering.rate_bytes
        if is_slow or len(self._takings) >= MOST_TRANSFERS:
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
        """Stop taking pages for a request, which has ended."""
        if (taking := self._takings.pop(request, None)) is not None:
            taking.transfer.cancel()

    @property
    def takings(self) -> Collection[Taking]:
        return self._takings.values()

    def is_taking(self, request: Request) -> bool:
        return request in self._takings

    def arrived(self) -> list[Request]:
        """Return the requests that need not wait any more, each once."""
        done, self._done = self._done, []
        return done

    def _bytes_of(self, num_tokens: int) -> int:
        counts = ((num_tokens if group.window is None else min(num_tokens, group.window)) // group.page_size for group in self._groups)
        return sum(count * group.page_bytes for count, group in zip(counts, self._groups, strict=True))

    def _write(self, request: Request, taking: Taking) -> bool:
        """Write the next page that has arrived. Return whether there was one."""
        if not taking.data and not self._receive(request, taking):
            return False
        assert taking.pages
        group, index = taking.pages.pop()
        page_bytes = self._groups[group].page_bytes
        data, taking.data = taking.data[:page_bytes], taking.data[page_bytes:]
        pool, seq = self._scheduler.pool.pools[group], taking.seq
        page = pool.adopt(seq.held.chain, index, seq.token_ids)
        if page is not None:
            self._model.write_page(group, page, data)
            self._num_taken += 1
        if not taking.pages and not taking.data:
            self._end(request, taking, "")
        return True

    def _receive(self, request: Request, taking: Taking) -> bool:
        """Look for the next arrival. Return whether there are pages to write."""
        try:
            arrival = taking.transfer.arrivals.get_nowait()
        except queue.Empty:
            if time.monotonic() >= taking.transfer.end_s:
                self._end(request, taking, f"it took longer than {taking.transfer.ask.limit_s:.3g} s")
            return False
        try:
            match arrival:
                case None:
                    self._end(request, taking, taking.transfer.fault or "it ended before the last page")
                case Offer():
                    taking.pages = self._pages_of(arrival, taking)
                    if not taking.pages:
                        self._end(request, taking, "")
                case bytes():
                    self._require_whole(taking, len(arrival))
                    taking.data = memoryview(arrival)
                    return True
        except PeerFault as error:
            self._end(request, taking, str(error))
        return False

    def _pages_of(self, offer: Offer, taking: Taking) -> list[tuple[int, int]]:
        """Return the pages of an offer, the first one last. Raise PeerFault if it offers what was not asked for."""
        ask, pools = taking.transfer.ask, self._scheduler.pool.pools
        if offer.num_tokens > ask.num_tokens or len(offer.firsts) != len(self._groups):
            raise PeerFault(f"it offers {offer.num_tokens} tokens in {len(offer.firsts)} cache groups, which nobody asked for")
        order = offer.order([group.page_size for group in self._groups])
        for number, pool in enumerate(pools):
            # Pages that are taken must not evict each other, so all of them must fit beside those that sequences hold.
            if sum(group == number for group, _ in order) + ask.num_held // pool.page_size > pool.num_available:
                raise PeerFault("the pages do not fit into this server's cache now")
        return order[::-1]

    def _require_whole(self, taking: Taking, num_bytes: int) -> None:
        """Raise PeerFault unless so many bytes are the next pages."""
        if taking.pages is None:
            raise PeerFault("it sent pages before its offer")
        at = len(taking.pages)
        while num_bytes > 0 and at > 0:
            at -= 1
            num_bytes -= self._groups[taking.pages[at][0]].page_bytes
        if num_bytes:
            raise PeerFault("it sent other bytes than the pages that it offers")

    def _end(self, request: Request, taking: Taking, fault: str) -> None:
        del self._takings[request]
        self._done.append(request)
        taking.transfer.cancel()
        self._waited_s += self._clock() - taking.began_s
        if fault:
            self._num_failed += 1
            giver = taking.transfer.giver
            log.warning("pages of %s:%d were not taken, and the prompt is computed here: %s", giver.host, giver.port, fault)

    # --- between steps ---------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Write pages that have arrived and read pages that are wanted, for about PORTION_S."""
        if not self.has_work:
            return
        end_s = self._clock() + PORTION_S
        has_more = True
        while has_more:
            has_more = False
            for request, taking in list(self._takings.items()):
                has_more |= self._write(request, taking)
            for giving in list(self._givings.values()):
                if giving.wants:
                    self._read(giving)
                    has_more |= giving.wants
            has_more &= self._clock() < end_s

    def close(self) -> None:
        for taking in self._takings.values():
            taking.transfer.cancel()


assert DIGEST_BYTES == 16  # as in `Chain`
