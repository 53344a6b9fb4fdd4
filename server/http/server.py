"""The HTTP server around the application: uvicorn, with added limits on slow and greedy clients."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.errors import BAD_REQUEST, HEADERS_TOO_LARGE, TOO_MANY_CONNECTIONS, ApiError, ErrorKind
from server.http.connections import Connections
from server.http.write_coalescing import CoalescingTransport, Outbox
from server.models.registry import Registry
from server.settings import ServerSettings

log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 8  # connections accepted before the first of them is counted
HURRY_S = 3.0  # seconds to send errors to clients after a second interrupt
BACKLOG = 2048  # connections that wait to be accepted; they have no descriptor yet


class _Refused(Exception):
    """Raised to stop the parser at a refused request. uvicorn's `data_received` catches it."""


PROBE_S = 0.1  # seconds between writes to a client that has stopped sending: if it has stopped reading too, it resets the connection
STILL_WORKING = b"HTTP/1.1 100 Continue\r\n\r\n"  # may be sent any number of times before an answer


class GuardedProtocol(HttpToolsProtocol):
    """A connection with limits. It is closed if it sends no request, if its headers take too long or too much space, or if the client
    reads nothing. Clients of HTTP/1.0 get answers that they understand."""

    limits: ServerSettings  # set on a subclass, because uvicorn makes the instances
    outbox: Outbox
    held: Connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = True
        self._num_header_bytes = 0
        self._fault: ErrorKind = BAD_REQUEST
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._answering: list[RequestResponseCycle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # the type is as narrow as uvicorn's
        super().connection_made(CoalescingTransport(transport, self.outbox))
        self._header_timer = self.loop.call_later(self.limits.keep_alive_s, transport.abort)
        self.held.opened(self)

    def give_way(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.held.closed(self)
        for timer in (self._header_timer, self._write_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        for cycle in self._answering:  # uvicorn notifies only the last request of a pipeline
            cycle.disconnected = True
            cycle.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn returns None and closes
        """Return whether to keep the connection open to send pending answers. The client has closed its sending half, or both halves: TCP
        does not tell which."""
        waits = bool(self._unanswered) and not self.cycle.more_body and self.transport.get_extra_info("ssl_object") is None
        if waits:
            self.cycle.keep_alive = False
            self._probe()
        else:
            self.transport.close()  # sends the delayed end of an answer first; asyncio would close its own transport without it
        return waits

    @property
    def _unanswered(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._answering if not cycle.response_complete]

    def _probe(self) -> None:
        """Write to a client that has stopped sending. If it has stopped reading too, it resets the connection. Streams need no such
        writes, because they write often."""
        first = next(iter(self._unanswered), None)
        if first is None or self.transport.is_closing():
            return
        if first.scope["http_version"] == "1.0":  # HTTP/1.0 has no interim answers
            self._probe_timer = self.loop.call_later(self.limits.header_timeout_s, self.transport.abort)
            return
        if not first.response_started:
            self.transport.write(STILL_WORKING)
        self._probe_timer = self.loop.call_later(PROBE_S, self._probe)

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._num_header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._num_header_bytes > self.limits.max_header_bytes and not self.transport.is_closing():
            self._fault = HEADERS_TOO_LARGE
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._wait_for_headers()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._num_header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
        num_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)  # plus colon, space and line end
        if num_bytes > self.limits.max_header_bytes:
            self._fault = HEADERS_TOO_LARGE
            raise _Refused
        if not self.held.takes(self, self.url.partition(b"?")[0]):
            self._fault = TOO_MANY_CONNECTIONS
            raise _Refused
        self.held.works(self)
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            assert self.parser is not None
            self.cycle.keep_alive = self.parser.should_keep_alive()
            self.cycle.waiting_for_100_continue = False
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[method-assign]  # uvicorn makes the instances of this class, too
        self._answering = [cycle for cycle in (*self._answering, self.cycle) if not cycle.response_complete]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers = True  # the next request begins

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if all(cycle.response_complete for cycle in self._answering):
            self.held.rests(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Send an error for a request that is not valid HTTP, in the envelope of every other error."""
        messages = {
            HEADERS_TOO_LARGE: f"the headers exceed {self.limits.max_header_bytes} bytes",
            TOO_MANY_CONNECTIONS: f"all {self.held.most} connections of this server are busy; retry later",
        }
        error = ApiError(self._fault, messages.get(self._fault, msg))
        body = error.body()
        headers = {"content-type": "application/json", "content-length": len(body), "connection": "close", **error.response_headers()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(f"HTTP/1.1 {self._fault.status} {self._fault.code}\r\n{lines}\r\n".encode() + body)
        self.transport.close()

    def _wait_for_headers(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self.transport.abort)


def _without_chunks(cycle: RequestResponseCycle) -> Send:
    """Return a `send` for HTTP/1.0, which has no chunked encoding. An answer without a length ends when the connection closes. After an
    answer with a length, the connection stays open only if the client asked for that; a header then confirms it."""
    send: Send = cycle.send  # type: ignore[assignment]  # uvicorn's types of messages are narrower
    is_measured = True

    async def send_plainly(message: Message) -> None:
        nonlocal is_measured
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message["headers"]}
            is_measured = b"content-length" in names
            if not is_measured:
                cycle.chunked_encoding = cycle.keep_alive = False
            elif cycle.keep_alive and b"connection" not in names:
                message = {**message, "headers": [*message["headers"], (b"connection", b"keep-alive")]}
        elif not is_measured:
            cycle.expected_content_length = len(message.get("body", b""))  # uvicorn refuses a body of another length
        await send(message)

    return send_plainly


class Server(uvicorn.Server):
    """The server. At a signal to stop, it accepts no more requests and gives running requests `drain_s` to finish. After that time, or at
    a second interrupt, it ends the remaining requests with an error."""

    def __init__(self, app: FastAPI, settings: ServerSettings, registry: Registry, **options: Any) -> None:
        """`options` go to uvicorn, for example certificates. uvicorn's log lines go to the same log."""
        own = {"limits": settings, "outbox": Outbox(), "held": Connections(settings.max_connections)}
        protocol = type("LimitedProtocol", (GuardedProtocol,), own)
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=protocol,
                ws="none",
                backlog=ACCEPTED_AT_ONCE,
                lifespan="on",
                timeout_keep_alive=math.ceil(settings.keep_alive_s),
                timeout_graceful_shutdown=math.ceil(settings.drain_s),
                server_header=False,
                access_log=False,
                log_config=None,
                log_level="warning",
                **options,
            )
        )
        self._registry = registry
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hurries = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then set the length of the accept queue, because asyncio uses one number for that length and for the number of connections
        that it accepts in a row."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for listener in (listener for server in self.servers for listener in server.sockets):
            with socket.socket(fileno=os.dup(listener.fileno())) as same:
                same.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down, and log how many requests still run. At a terminal, only this line shows that the interrupt was received."""
        if num_running := len(self.server_state.tasks):
            drain_s = self.config.timeout_graceful_shutdown
            log.info("stopping: running requests (%d) have %s s to finish; a second interrupt ends them now", num_running, drain_s)
        else:
            log.info("stopping")
        await super().shutdown(sockets)
        log.info("stopped")
        for handler in logging.getLogger().handlers:
            handler.flush()  # the signal that stopped the server is raised again after this, and ends the process at once

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at a signal. A second interrupt ends running requests with an error to their clients; a third one exits at once."""
        self._registry.closing = True
        if self.should_exit and sig == signal.SIGINT and not self._hurries:
            self._hurries = True
            assert self._loop is not None, "signals are captured while the loop runs"
            self._loop.call_soon_threadsafe(self._end_running)
        else:
            super().handle_exit(sig, frame)

    def _end_running(self) -> None:
        log.info("ending %d running requests", len(self.server_state.tasks))
        for task in self.server_state.tasks:
            task.cancel()
        asyncio.get_running_loop().call_later(HURRY_S, setattr, self, "force_exit", True)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Treat a closed terminal like SIGTERM, unless the server was started to outlive it (`nohup`)."""
        with super().capture_signals():
            hears = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
            before = signal.signal(signal.SIGHUP, self.handle_exit) if hears else None
            try:
                yield
            finally:
                if hears:
                    signal.signal(signal.SIGHUP, before)
