"""One connection of the HTTP server: uvicorn's protocol, with limits on slow and greedy clients.

The parser gets the head of one request, and nothing that follows. The body goes through `server/http/body_framing.py`. Bytes of further
requests wait unparsed, in a buffer of bounded size, until the answer is complete.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import proxy

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.errors import BAD_REQUEST, HEADERS_TOO_LARGE, TOO_MANY_CONNECTIONS, ApiError
from server.http.answer_framing import UPGRADED, framed
from server.http.body_framing import Body, MeasuredBody, body_of
from server.http.connections import PROBES, Connections
from server.http.turns import Turns
from server.http.websocket import asks_for_socket
from server.http.write_coalescing import CoalescingTransport, PendingWrites
from server.settings import ServerSettings

MAX_HEADERS = 128
MAX_UNREAD_BYTES = 64 << 10  # received bytes that may wait to be parsed; beyond this number, reading pauses
HEAD_END = b"\r\n\r\n"
HALF_CLOSED = "relaxserve.half_closed"  # key of a request's scope; the value is an event, set once the client has stopped sending
ENDLESS = 1 << 62  # length of the body, which has no end, of a request that asks to become a WebSocket
PROBE_S = 0.1  # seconds between two writes by which `_probe` finds out whether a client has left
STILL_WORKING = b"HTTP/1.1 100 Continue\r\n\r\n"  # may be sent any number of times before an answer
LINGER_S = 10.0  # seconds for which a refused body is still read, so that the client reads the error before it sees a reset
LATE_S = 1.0  # seconds in which a connection may send a request if it was accepted while the server began to stop
LINGER_BODIES = 2  # a refused body is read up to this multiple of the largest allowed size


class _Transport(CoalescingTransport):
    """The transport that uvicorn sees. uvicorn pauses reading when a body waits for the application; the protocol then decodes no more of
    it, but still reads up to `MAX_UNREAD_BYTES`. Otherwise the protocol could not see the client leave."""

    def __init__(self, transport: asyncio.Transport, pending: PendingWrites, protocol: GuardedProtocol) -> None:
        super().__init__(transport, pending)
        self._protocol = proxy(protocol)  # a weak reference, so that reference counts free transport and protocol

    def close(self) -> None:
        """Close the connection, unless it begins to linger, that is, to read and drop what the client still sends."""
        if not self._protocol.lingers():
            super().close()

    def is_closing(self) -> bool:
        return self._protocol.is_lingering or super().is_closing()

    def pause_reading(self) -> None:
        """Do nothing: the protocol sees that the flow is paused, and decodes no more of the body."""

    def resume_reading(self) -> None:
        """Let the protocol continue with the received bytes, in a turn."""
        self._protocol.wait_for_turn()


class GuardedProtocol(HttpToolsProtocol):
    """A connection with limits. The connection is closed if no request arrives, if headers take too long or too much space, or if the
    client reads nothing. Clients of HTTP/1.0 get answers that they understand."""

    limits: ServerSettings  # set on a subclass, because uvicorn makes the instances
    pending: PendingWrites
    held: Connections
    turns: Turns

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_lingering = False  # the connection is closing, and bytes that the client still sends are dropped: see `lingers`
        self._received = bytearray()  # bytes that were received and not parsed
        self._body: Body | None = None  # body of the request whose head has been parsed; None: the next bytes are a head
        self._head_tail = b""  # the last bytes of the head so far, in which the empty line may begin
        self._num_head_bytes = 0
        self._waits_for_turn = False
        self._is_fresh = True  # the request did not wait for an earlier answer
        self._is_reading = True
        self._is_late = False  # the connection was accepted while the server began to stop
        self._eof = asyncio.Event()  # the client has closed its sending half
        self._num_lingering_bytes = 0  # bytes that were received while lingering
        self._is_refused = False  # `_refuse` was called
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    # the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # the type is as narrow as uvicorn's
        """Count the connection. It is closed if no request arrives in time."""
        self._socket = transport
        self._outgoing = _Transport(transport, self.pending, self)
        super().connection_made(self._outgoing)
        self._is_late = self.held.is_stopping
        wait_s = LATE_S if self._is_late else self.limits.keep_alive_s
        self._header_timer = self.loop.call_later(wait_s, transport.abort)
        self.held.opened(self)

    def shutdown(self) -> None:
        """Close the connection because the server stops: at once, after its answer, or after the client had time to send a request."""
        if not self._is_late:
            super().shutdown()

    def leave(self) -> None:
        """Close the connection when all that was written has been sent."""
        self._outgoing.flush()
        self._socket.close()

    def give_way(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.held.closed(self)
        for timer in (self._header_timer, self._write_timer, self._probe_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._received.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Keep received bytes, and parse them if it is their turn. While the connection lingers, drop them instead, and close the
        connection once the dropped bytes would fill more than LINGER_BODIES bodies of the largest allowed size."""
        if self.is_lingering:
            self._num_lingering_bytes += len(data)
            if self._num_lingering_bytes > LINGER_BODIES * self.limits.max_body_bytes:
                self.transport.close()
            return
        self._is_fresh = not (self._waits_for_turn or self._is_answering)
        self._received += data
        self._advance()

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn returns None and closes
        """Parse the rest of the received bytes. Return whether to keep the connection open to send pending answers; over TLS, or while the
        connection lingers, close it. The client has closed its sending half, or both halves: TCP does not tell which."""
        self._eof.set()
        if self.transport.get_extra_info("ssl_object") is not None or self.is_lingering:
            self.transport.close()  # sends the delayed end of an answer first; asyncio's own close, after False, would drop it
            return False
        if self._is_answering and not self._received:
            self.cycle.keep_alive = False
        self._advance()
        return not self.transport.is_closing()

    def _probe(self) -> None:
        """Find out whether a client that waits for its answer has left. Reading does not show that a client has left if the client has
        closed its sending half, or has sent so much that reading is paused. So write to it: a client that does not read any more resets the
        connection. Write nothing once the answer has begun, because the answer itself is written then: a silent stream sends heartbeats. To
        a client of HTTP/1.0 nothing can be written before the answer, so `_give_up` follows instead."""
        self._probe_timer = None
        if not self._waits_for_answer or self.transport.is_closing() or (self._is_reading and not self._eof.is_set()):
            return
        if self.cycle.scope["http_version"] == "1.0":  # HTTP/1.0 has no interim answers
            self._probe_timer = self.loop.call_later(self.limits.header_timeout_s, self._give_up)
            return
        if not self.cycle.response_started:
            self.transport.write(STILL_WORKING)
        self._probe_timer = self.loop.call_later(PROBE_S, self._probe)

    def _give_up(self) -> None:
        """Close the connection of a client of HTTP/1.0 if reading still does not show whether the client has left, unless its answer has
        begun."""
        self._probe_timer = None
        if self._waits_for_answer and not self.cycle.response_started and (self._eof.is_set() or not self._is_reading):
            self.transport.abort()

    def lingers(self) -> bool:
        """If the client may still be sending, begin to linger: close only the sending half, and read what arrives, for at most LINGER_S.
        Return whether lingering began now; otherwise the connection may be closed. Closing a connection while the client sends would reset
        it, and a reset may destroy the answer on its way."""
        is_sending = bool(self._received) or self._body is not None or self._is_refused
        if self.is_lingering or self._eof.is_set() or self._socket.is_closing() or not is_sending:
            return False
        self._outgoing.flush()
        self.is_lingering = True
        self._received.clear()
        self._read(True)
        with suppress(OSError):  # the client may have reset the connection already, which asyncio reports on reading
            if self._socket.can_write_eof():
                self._socket.write_eof()
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)
        return True

    def pause_writing(self) -> None:
        """Wait for the client to read, and close the connection if the client does not read within `write_timeout_s`."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().resume_writing()

    # received bytes

    @property
    def _is_answering(self) -> bool:
        """Whether a request is being answered."""
        return bool(self.cycle) and not self.cycle.response_complete

    @property
    def _waits_for_answer(self) -> bool:
        """Whether the whole request has arrived, and its answer is not complete."""
        return self._is_answering and self._body is None

    @property
    def _is_blocked(self) -> bool:
        """Whether received bytes must wait: for the end of the answer, or until the application takes the decoded part of the body."""
        return self.flow.read_paused or self._waits_for_answer

    def wait_for_turn(self) -> None:
        """Continue with the received bytes after other connections had their turns."""
        if (self._received or self._eof.is_set()) and not self._waits_for_turn:
            self._waits_for_turn = True
            self.turns.add(self._take_turn, is_fresh=False)

    def _take_turn(self) -> None:
        """Continue with the received bytes. It is this connection's turn, so one piece of a chunked body may be decoded."""
        self._waits_for_turn = False
        self._advance(may_decode=True)

    def _advance(self, *, may_decode: bool = False) -> None:
        """Parse received bytes as far as possible. One piece of a chunked body is decoded if `may_decode`. Other pieces wait for turns,
        because many small chunks take long. Then close the connection if the client has stopped sending and no bytes wait. Otherwise read
        on, unless too many bytes wait, and begin to probe whether the client has left."""
        while self._received and not (self._waits_for_turn or self._is_blocked or self.transport.is_closing()):
            num_before = len(self._received)
            if self._body is None:
                self._take_head()
            elif isinstance(self._body, MeasuredBody) or may_decode:
                may_decode = False
                self._take_body(self._body)
            else:
                self.wait_for_turn()
            if len(self._received) == num_before:
                break
        if self.transport.is_closing():
            return
        if self._eof.is_set() and not (self._waits_for_turn or self._is_blocked):
            self.transport.close()
            return
        self._read(len(self._received) < MAX_UNREAD_BYTES)
        if self._probe_timer is None:
            self._probe()

    def _read(self, wanted: bool) -> None:
        """Read from the socket, or pause reading."""
        if wanted != self._is_reading and not self._socket.is_closing():
            self._is_reading = wanted
            (self._socket.resume_reading if wanted else self._socket.pause_reading)()

    def _take_head(self) -> None:
        """Give the parser the received part of the head, but nothing beyond it. Refuse a head that is too large or malformed."""
        self._unset_keepalive_if_required()
        if not self._num_head_bytes:
            self.parser = httptools.HttpRequestParser(self)
            if self._header_timer is not None:
                self._header_timer.cancel()
            self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self.transport.abort)
        most = self.limits.max_header_bytes - self._num_head_bytes
        window = self._head_tail + self._received[: most + 1]
        end = window.find(HEAD_END)
        num_bytes = len(window) - len(self._head_tail) if end < 0 else end + len(HEAD_END) - len(self._head_tail)
        piece = bytes(self._received[:num_bytes])
        self._head_tail = bytes(window[-len(HEAD_END) + 1 :])
        self._num_head_bytes += num_bytes
        del self._received[:num_bytes]
        if num_bytes > most:
            self._refuse(self._headers_too_large())
            return
        if end >= 0:
            self._head_tail = b""
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            pass  # a server may ignore an upgrade and answer in HTTP/1.1
        except httptools.HttpParserError as error:
            cause = error.__context__  # the error that a callback below has raised
            self._refuse(cause if isinstance(cause, ApiError) else ApiError(BAD_REQUEST, f"the request is not valid HTTP: {error}"))

    def _take_body(self, body: Body) -> None:
        """Decode a piece of the body, and pass it to the application. Refuse a body whose framing is malformed or too large."""
        try:
            data = body.take(self._received)
        except ApiError as error:
            self._refuse(error)
            return
        if data:
            self.on_body(data)
        if body.is_complete:
            self._body = None
            super().on_message_complete()

    # the parser's calls

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Raise ApiError if there are too many headers."""
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise self._headers_too_large()

    def on_headers_complete(self) -> None:
        """Begin the request. Raise ApiError if its headers are not valid, or if the server has too many connections."""
        self._num_head_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
        version = self.parser.get_http_version()
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (version == "1.1" and not num_hosts):
            raise ApiError(BAD_REQUEST, f"the request has {num_hosts} host headers; expected one")
        is_socket = version == "1.1" and asks_for_socket(self.parser.get_method().decode(), self.url.partition(b"?")[0], self.headers)
        body = MeasuredBody(ENDLESS) if is_socket else body_of(self.headers, version, self.limits.max_header_bytes)
        if not self.held.takes(self, self.url.partition(b"?")[0]):
            raise ApiError(TOO_MANY_CONNECTIONS, f"all {self.held.most} connections of this server are busy; retry later")
        self.held.works(self)
        super().on_headers_complete()
        self.cycle.scope[HALF_CLOSED] = self._eof  # type: ignore[typeddict-unknown-key]  # an entry of our own
        self.cycle.scope[UPGRADED] = is_socket  # type: ignore[typeddict-unknown-key]
        if version == "1.0":
            self.cycle.keep_alive = self.parser.should_keep_alive()
            self.cycle.waiting_for_100_continue = False
        if self.held.is_stopping:
            self.cycle.keep_alive = False  # uvicorn did this only for the connections that it had when it began to stop
        if body.is_complete:
            super().on_message_complete()
        else:
            self._body = body

    def on_message_complete(self) -> None:
        """Do nothing, because the parser sees no bodies."""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Start the application in a turn. Two kinds of requests start at once: a pipelined request, which has had its turn already, and a
        probe."""
        app = framed(app, cycle)
        if not self._is_fresh or cycle.scope["raw_path"] in PROBES:
            super()._start_asgi_task(cycle, app)
        else:
            self.turns.add(partial(self._start_fresh, cycle, app), is_fresh=True)

    def _start_fresh(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Start the application, unless the client has left meanwhile."""
        if not cycle.disconnected:
            super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Mark the connection as idle, and continue with bytes that have arrived meanwhile, unless the connection is closing."""
        super().on_response_complete()
        if self._probe_timer is not None:  # the next request gets a timer of its own
            self._probe_timer.cancel()
            self._probe_timer = None
        if self.transport.is_closing():
            return
        self.held.rests(self)
        self.wait_for_turn()

    # refusals

    def _headers_too_large(self) -> ApiError:
        """Return the error for headers beyond a limit."""
        return ApiError(HEADERS_TOO_LARGE, f"the headers exceed {self.limits.max_header_bytes} bytes or {MAX_HEADERS} fields")

    def _refuse(self, error: ApiError) -> None:
        """Refuse a request that is not valid HTTP, exceeds a limit, or arrives when there are too many connections: send the error in
        OpenAI's shape, unless an answer has begun, and close the connection."""
        self._is_refused = True
        if self._is_answering:
            self.cycle.disconnected = True  # the application gets no more of the body, and sends no answer
            self.cycle.message_event.set()
        if not (self._is_answering and self.cycle.response_started):
            body = error.body()
            headers = {"content-type": "application/json", "content-length": len(body), "connection": "close", **error.response_headers()}
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            self.transport.write(f"HTTP/1.1 {error.kind.status} {error.kind.code}\r\n{lines}\r\n".encode() + body)
        self.transport.close()
