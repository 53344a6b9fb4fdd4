"""Run one worker process, and exchange messages with it through a socket. A restart opens a new WorkerProcess."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from server.engine.channel import LENGTH_BYTES, ChannelError, decode_from_worker, frames, payload_bytes, refused
from server.messages import Failed, FromFront, FromWorker
from server.process_state import fields_of
from server.signal_names import describe_status
from server.workers.starting import start, take

log = logging.getLogger(__name__)

# No request can make the worker send itself these signals.
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GUARD_S = 0.5  # seconds between checks of a process that loads


class _Child:
    """A process whose end a task can wait for. asyncio itself can wait only for processes that it has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process
        self._has_ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._wait, args=(loop,), name=f"end of {process.pid}", daemon=True).start()

    @property
    def returncode(self) -> int | None:
        """The exit status, or None while the process runs."""
        return self._process.returncode

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> None:
        await self._has_ended.wait()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._process.wait()
        with suppress(RuntimeError):  # the loop has been closed, so nobody waits
            loop.call_soon_threadsafe(self._has_ended.set)


class WorkerProcess:
    """A worker process and its connection to the front."""

    def __init__(
        self,
        process: _Child,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_refused: Callable[[Failed], None],
    ) -> None:
        """`on_refused` is called with the failure of each request that cannot be sent."""
        self.pid = process.pid
        self._guard = asyncio.create_task(_kill_when_stopped(process))
        self._is_blameless = True  # False once the front has killed the worker for a fault that a request may have caused
        self._process = process
        self._reader = reader
        self._writer = writer
        self._on_refused = on_refused
        # Unbounded: a request adds few messages at a time, and admission limits the requests.
        self._outbox: deque[FromFront] = deque()
        self._wake = asyncio.Event()
        self._sending = asyncio.create_task(self._send_all())

    @staticmethod
    async def open(command: Sequence[str], on_refused: Callable[[Failed], None]) -> WorkerProcess:
        """Start `command` with the file descriptor of a connected socket as its last argument, or use a process that was started ahead.
        Raise OSError or MemoryError if the process cannot be started, or RuntimeError if no thread can be started to wait for its end."""
        started = take(command) or start(command)
        try:
            child = _Child(started.process)
            reader, writer = await asyncio.open_unix_connection(sock=started.connection)
        except BaseException:
            started.discard()
            raise
        return WorkerProcess(child, reader, writer, on_refused)

    def send(self, message: FromFront) -> None:
        """Queue a message."""
        self._outbox.append(message)
        self._wake.set()

    async def receive(self) -> FromWorker | None:
        """Return the next message, or None when the worker is gone. Kill a worker that sends bytes that are no message, and return None."""
        try:
            header = await self._reader.readexactly(LENGTH_BYTES)
            return decode_from_worker(await self._reader.readexactly(payload_bytes(header)))
        except (asyncio.IncompleteReadError, OSError):
            return None
        except (ChannelError, msgspec.MsgspecError):
            self.kill()
            return None

    def is_up(self) -> None:
        """Stop checking whether the process is suspended, because loading has ended. From now on, the supervisor's watchdog notices a
        suspended worker by its silence."""
        self._guard.cancel()

    def kill(self, *, is_blameless: bool = False) -> None:
        """Kill the process and those that it started. `is_blameless`: the reason is unrelated to the requests that the process runs. The
        kill of a suspended process always counts as blameless."""
        self._is_blameless = is_blameless or _is_stopped(self.pid)
        if self._process.returncode is None:
            # SIGKILL also ends a suspended process. The group includes the processes that the worker started, such as pip, which would
            # otherwise go on downloading.
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def close(self, patience_s: float) -> str:
        """Wait for the process to end, and kill it after `patience_s`. Close the connection, and return in words how the process ended."""
        try:
            await asyncio.wait_for(self._process.wait(), patience_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        self._guard.cancel()
        self._sending.cancel()
        self._writer.close()
        return describe_status(self._process.returncode)

    @property
    def ended_from_outside(self) -> bool:
        """True if a signal ended the process and no request can be the cause. Either another process sent the signal, or this front killed
        the process for a reason unrelated to its requests, for example because it was suspended (SIGSTOP)."""
        returncode = self._process.returncode
        return returncode is not None and -returncode in FROM_OUTSIDE and self._is_blameless

    async def _send_all(self) -> None:
        """Send the queued messages until the connection ends."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outbox:
                    await self._send(self._outbox.popleft())
        except OSError:
            return  # `receive` notices the end of the connection, too

    async def _send(self, message: FromFront) -> None:
        """Send a message. If the message is too large or cannot be encoded, the request to which it belongs fails. If it belongs to no
        request, kill the process, which cannot do without the message. Raise OSError if the connection has ended."""
        try:
            for framed in frames(message):
                self._writer.write(framed)
                await self._writer.drain()  # waits while the worker does not read; only this task waits
        except ChannelError as error:
            if (failed := refused(message, error)) is None:
                log.error("worker %d is killed, since it cannot do without a message that cannot be sent: %s", self.pid, error)
                self.kill()
            else:
                self._on_refused(failed)


async def _kill_when_stopped(process: _Child) -> None:
    """Kill a loading process when it is suspended (SIGSTOP). A first load may take any time, so silence does not show a problem, but a
    suspended process would never end."""
    while True:
        await asyncio.sleep(GUARD_S)
        if process.returncode is None and _is_stopped(process.pid):
            process.kill()


def _is_stopped(pid: int) -> bool:
    """Return whether the process is suspended. Return False on systems without /proc."""
    try:
        return fields_of(pid)[0] in ("T", "t")
    except OSError:
        return False
