"""One request on its way through the ingress: it is sent to one replica after another until one serves it or the ingress gives up.

The bytes of the answer come directly from the replica's server, not through Ray. The ingress gives each request a nonce from which the
servers derive the values that the request leaves open, such as ids and the seed (`server/open_values.py`). So a request that is sent again
gets an answer with the same bytes, and the ingress leaves out the bytes that the client has.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

import aiohttp
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from deploy.ray.open_requests import OpenRequests
from deploy.ray.progress import Progress
from deploy.ray.refusal import refusal
from deploy.ray.wish import RESPONSES, Lease, Reading, Wish, place_of
from deploy.replicas.events import Events, is_comment
from server.api.answer.sse import run_until_disconnect
from server.errors import NO_REPLICA, REPLICA_LOST, ApiError
from server.open_values import HEADER
from server.peers.named import HEADER as GIVER_HEADER
from server.peers.named import header_of

log = logging.getLogger(__name__)

PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # seconds between the first two attempts, doubled after each attempt up to the longest pause
# Number of times that a request may find a full queue or, unless it is a POST, a replica that is away, before the client gets the answer of
# the replica.
MOST_BUSY = 2
MOST_LOST = 5  # number of replicas that may break off a request; then it is given up, because it may be the cause
QUEUE_FULL, SHUTTING_DOWN = b'"queue_full"', b'"shutting_down"'
RESPONSE_ID = re.compile(rb'"id":"(resp_[0-9a-f]+)"')
STREAMS = ("text/event-stream", "application/x-ndjson")
HELD = ("application/json", "text/plain")  # types of answers that are passed on only when complete: until then, another replica can answer
# Headers of one connection, and headers that the ingress itself writes. They are not passed on to a replica.
OWN_HEADERS = frozenset(
    {
        "connection",
        "keep-alive",
        "transfer-encoding",
        "te",
        "trailer",
        "upgrade",
        "proxy-authorization",
        "proxy-connection",
        "expect",
        HEADER,
        GIVER_HEADER,
    }
)

LEFT_OUT = OWN_HEADERS | {"date", "server", "x-request-id"}  # not passed on from an answer: Ray's HTTP proxy writes its own

# Leases a replica, or returns None if there was none in time. May be called again.
Borrow = Callable[[Wish], Awaitable[Lease | None]]
Move = Callable[[str, str], None]  # gets the id of a response, and the name of the replica that continues its stream


class GivenUp(Exception):
    """Raised if no replica continues a stream that the client has begun to get."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The answer of a replica that cannot serve a request now."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    async def send_to(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


@dataclass(slots=True, eq=False)
class Passage(Response):
    """An ASGI response: the answer of the replica that serves the request."""

    client: aiohttp.ClientSession
    borrow: Borrow
    open_requests: OpenRequests
    method: str
    target: str  # path and query of the request
    given: Headers  # headers of the request
    content: bytes  # body of the request
    reading: Reading
    patience_s: float
    move: Move  # called when a replica continues the stream of another replica's response
    started: bool = False  # whether the client has begun to get an answer
    nonce: bytes = b""  # the servers derive from it what the request leaves open; empty before the first attempt
    created_s: int = field(default_factory=lambda: int(time.time()))
    fingerprint: str = ""  # fingerprint of the model whose stream the client has begun to get
    progress: Progress = field(default_factory=Progress)
    failed: set[str] = field(default_factory=set[str])  # replicas that have failed this request
    lost: set[str] = field(default_factory=set[str])  # those of `failed` that may be gone; the others are busy, or lack the model
    num_busy: int = 0  # number of times that the request found a full queue or, unless it is a POST, a replica that was away
    refusal: _Refusal | None = None  # the last answer of a busy replica, which the client gets if no other replica is left
    # Time from which the wait for a replica counts: when the request arrived, or when the last replica that had it broke off. The time that
    # replicas took to refuse the request is added to it, so that this time does not count as waiting.
    waiting_since_s: float = field(default_factory=time.monotonic)
    num_pauses: int = 0  # pauses since the client got something new
    num_lost: int = 0  # replicas that have broken off since the client got something new

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(self.run(send), receive)

    async def run(self, send: Send) -> None:
        """Send the request to one replica after another until one serves it, and pass on the answer. If none serves it, send the answer of
        a busy replica or an error. Raise GivenUp, or what `_attempt` raises, if a stream that has begun cannot continue."""
        while True:
            lease = await self._leased()
            if self.refusal is not None and (lease is None or lease.replica in self.failed):
                await self.refusal.send_to(send)
                return
            if lease is not None and await self._attempt(lease, send):
                return
            why = ""
            if self.num_lost >= MOST_LOST:
                why = f"{self.num_lost} replicas have ended while they had this request, so no other one gets it"
            elif self._left_s <= 0:
                why = f"no replica has answered within {self.patience_s:g} s; try again later"
            if why and self.started:
                raise GivenUp(f"{self.method} {self.target}: {why}")
            if why:
                await self._send_error(ApiError(NO_REPLICA, why), send)
                return
            await asyncio.sleep(min(LONGEST_PAUSE_S, PAUSE_S * 2**self.num_pauses))
            self.num_pauses += 1

    async def _leased(self) -> Lease | None:
        """Ask for a lease, and wait for it as long as the request may wait. Return None if there was none in time."""
        wish = replace(self.reading.wish, avoided=frozenset(self.failed), lost=frozenset(self.lost))
        try:
            async with asyncio.timeout(self._left_s):
                return await self.borrow(wish)
        except TimeoutError:
            return None

    @property
    def _left_s(self) -> float:
        """The time for which this request may still wait for a replica."""
        return self.waiting_since_s + self.patience_s - time.monotonic()

    async def _send_error(self, error: ApiError, send: Send) -> None:
        await refusal(self.target.partition("?")[0], error)({"type": "http"}, _nothing, send)

    async def _attempt(self, lease: Lease, send: Send) -> bool:
        """Send the request to a replica. Return whether the client has a whole answer now. Raise Departure if the replica cannot continue
        the stream, or the connection's error if the answer has begun and the request must not be sent twice."""
        self.open_requests.begin(lease.replica)
        began_s = time.monotonic()
        try:
            if not self.started:  # the ids of the answer name the replica that gives it
                self.nonce = place_of(lease.replica) + secrets.token_bytes(12)
            headers = [(name, value) for name, value in self.given.items() if name not in OWN_HEADERS]
            headers.append((HEADER, f"{lease.key} {self.nonce.hex()} {self.created_s}"))
            if lease.giver:
                headers.append((GIVER_HEADER, header_of(lease.key, lease.giver, computes=lease.computes)))
            if self.fingerprint:
                headers = [(name, value) for name, value in headers if name != "if-match"] + [("if-match", self.fingerprint)]
            async with self.client.request(
                self.method,
                URL(lease.url + self.target, encoded=True),
                headers=headers,
                data=self.content or None,
                allow_redirects=False,
                skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
            ) as answer:
                is_served = await self._pass(answer, lease, send)
                self.waiting_since_s += time.monotonic() - began_s
                return is_served
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            self._lose(lease.replica)  # the replica has not got the request
            return False
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            self._lose(lease.replica)
            log.warning("replica %s broke off %s %s: %s", lease.replica, self.method, self.target, type(error).__name__)
            self.waiting_since_s = time.monotonic()  # until now the replica had the request
            self.num_lost += 1
            self.failed &= self.lost  # replicas that were busy before may have room now
            self.refusal = None
            if self.reading.repeatable:
                return False
            if self.started:
                raise
            why = "the replica ended, and this request cannot be sent twice; see what it has done"
            await self._send_error(ApiError(REPLICA_LOST, why), send)
            return True
        finally:
            self.open_requests.end(lease.replica)

    def _lose(self, replica: str) -> None:
        self.failed.add(replica)
        self.lost.add(replica)

    async def _pass(self, answer: aiohttp.ClientResponse, lease: Lease, send: Send) -> bool:
        """Send the answer of a replica to the client. Return False, and send nothing, if the request should go to another replica: because
        this one is busy or away, or cannot continue the stream that the client gets."""
        is_stream, is_held = answer.content_type in STREAMS, answer.content_type in HELD
        whole = await answer.read() if is_held else b""
        if answer.status == 503 and SHUTTING_DOWN in whole:  # other codes mean that the replica is busy, or that a model is not ready
            self.lost.add(lease.replica)
        if self.started and answer.status != 200:
            self.failed.add(lease.replica)
            return False
        is_away = answer.status == 503 and self.reading.repeatable
        is_busy = is_away or (answer.status == 429 and QUEUE_FULL in whole)
        is_busy = is_busy and place_of(lease.replica) != self.reading.wish.place  # only this one has the earlier response
        waits = is_away and self.method == "POST"  # a GET may be a probe, which must learn that a server is away
        if is_busy and (waits or self.num_busy < MOST_BUSY):
            self.failed.add(lease.replica)
            self.num_busy += not waits
            self.refusal = None if waits else _Refusal(answer.status, _passed(answer.headers), whole)
            return False
        heir = lease.replica if self.started else ""
        if not self.started:
            self.fingerprint = answer.headers.get(HEADER, "")
            await send({"type": "http.response.start", "status": answer.status, "headers": _passed(answer.headers)})
            self.started, self.refusal = True, None
        if is_stream:
            await self._stream(answer, heir, send)
        elif not is_held:
            self.reading = replace(self.reading, repeatable=False)
            async for data in answer.content.iter_any():
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": whole, "more_body": False})
        return True

    async def _stream(self, answer: aiohttp.ClientResponse, heir: str, send: Send) -> None:
        """Send the events that the client does not have. `heir`: the name of the replica if it continues the stream of another one, else
        empty."""
        events = Events(answer.content_type)
        self.progress.again()
        moves = heir and self.target.partition("?")[0] == RESPONSES
        async for data in answer.content.iter_any():
            arrived = events.push(data)
            if moves and (found := next(filter(None, map(RESPONSE_ID.search, arrived)), None)):
                self.move(found[1].decode(), heir)
                moves = False
            new = [event for event in arrived if is_comment(event) or self.progress.takes(event)]
            if not all(map(is_comment, new)):
                self.num_pauses = self.num_lost = 0
            if new:
                await send({"type": "http.response.body", "body": b"".join(new), "more_body": True})


def _passed(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items() if name.lower() not in LEFT_OUT]


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
