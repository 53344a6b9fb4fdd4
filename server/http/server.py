"""The HTTP server around the application: uvicorn, with orderly start and stop."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from server.http.connections import Connections
from server.http.protocol import GuardedProtocol
from server.http.turns import Turns
from server.http.write_coalescing import PendingWrites
from server.models.registry import Registry
from server.settings import ServerSettings

log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 8  # connections that asyncio accepts in a row, before the first of them is counted
HURRY_S = 3.0  # seconds in which requests that were cancelled send errors to their clients
BACKLOG = 2048  # connections that wait to be accepted; they have no descriptor yet
ACCEPT_S = 1.0  # longest time for which a server that stops still accepts connections that wait
CALM = 4  # iterations of the event loop within which an accepted connection is read


class Server(uvicorn.Server):
    """The server. At a signal to stop, the server accepts no more requests and gives running requests `drain_s` to finish. After that time,
    or at a second interrupt, the server ends the remaining requests with an error. With `lame_duck_s`, a SIGTERM first only makes probes of
    readiness fail for this time: routers learn late that a server stops, and until then they send it requests."""

    def __init__(self, app: FastAPI, settings: ServerSettings, registry: Registry, **options: Any) -> None:
        """`options` go to uvicorn, for example certificates. uvicorn's log lines go to this server's log."""
        self._held = Connections(settings.max_connections)
        own = {"limits": settings, "pending": PendingWrites(), "held": self._held, "turns": Turns()}
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
                proxy_headers=False,  # `server/http/proxies.py` reads them
                log_config=None,
                log_level="warning",
                **options,
            )
        )
        self._registry = registry
        self._lame_duck_s = settings.lame_duck_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hurries = False  # a second interrupt has come, so the running requests are ended

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then set the length of the accept queue, because asyncio uses one number for that length and for the number of connections
        that it accepts in a row."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for listener in (listener for server in self.servers for listener in server.sockets):
            with socket.socket(fileno=os.dup(listener.fileno())) as same:
                same.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down, and log how many requests still run. At a terminal, only this line shows that the interrupt was received. uvicorn
        waits for every connection, but closes only those that it has when it begins, and none whose client reads nothing. So this method
        closes the other connections."""
        if num_running := len(self.server_state.tasks):
            drain_s = self.config.timeout_graceful_shutdown
            log.info("stopping: running requests (%d) have %s s to finish; a second interrupt ends them now", num_running, drain_s)
        else:
            log.info("stopping")
        self._held.is_stopping = True
        await self._accept_waiting()
        await super().shutdown(sockets)
        if self.server_state.tasks and not self.force_exit:
            await asyncio.wait(tuple(self.server_state.tasks), timeout=HURRY_S)  # cancelled requests send an error to their clients
        await self._held.close()
        log.info("stopped")
        for handler in logging.getLogger().handlers:
            handler.flush()  # the signal that stopped the server is raised again after this, and ends the process at once

    async def _accept_waiting(self) -> None:
        """Accept the connections that wait in the kernel: when the port is closed, the kernel resets them, and their clients get no
        answer."""
        waiting = select.poll()
        for listener in (listener for server in self.servers for listener in server.sockets):
            waiting.register(listener.fileno(), select.POLLIN)
        loop, num_calm = asyncio.get_running_loop(), 0
        end_s = loop.time() + ACCEPT_S
        while num_calm < CALM and loop.time() < end_s:
            num_calm = 0 if waiting.poll(0) else num_calm + 1
            await asyncio.sleep(0)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at a signal. A second interrupt ends running requests with an error to their clients; a third one exits at once. With the
        setting `lame_duck_s`, the first SIGTERM to a ready server only begins this time, after which the server stops."""
        if sig == signal.SIGTERM and self._lame_duck_s and self._registry.ready and self._loop is not None:
            self._registry.leaving = True  # from now on `ready` is false, so that a second signal stops the server at once
            self._loop.call_soon_threadsafe(self._become_lame_duck)
            return
        self._registry.closing = True
        if self.should_exit and sig == signal.SIGINT and not self._hurries:
            self._hurries = True
            assert self._loop is not None, "signals are captured while the loop runs"
            self._loop.call_soon_threadsafe(self._end_running)
        else:
            super().handle_exit(sig, frame)

    def _become_lame_duck(self) -> None:
        """Log that the server will stop, and stop it after `lame_duck_s`."""
        log.info("stopping: the server is not ready any more, and accepts requests for %g s", self._lame_duck_s)
        asyncio.get_running_loop().call_later(self._lame_duck_s, self.handle_exit, signal.SIGTERM, None)

    def _end_running(self) -> None:
        """Cancel the running requests, which then send errors. Exit after HURRY_S even if some requests are left."""
        log.info("ending %d running requests", len(self.server_state.tasks))
        for task in self.server_state.tasks:
            task.cancel()
        asyncio.get_running_loop().call_later(HURRY_S, setattr, self, "force_exit", True)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Stop also when the terminal is closed (SIGHUP), without waiting for `lame_duck_s`, unless the server was started to outlive the
        terminal (`nohup`)."""
        with super().capture_signals():
            hears = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
            before = signal.signal(signal.SIGHUP, self.handle_exit) if hears else None
            try:
                yield
            finally:
                if hears:
                    signal.signal(signal.SIGHUP, before)
