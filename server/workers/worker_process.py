"""One worker process and the front's socket to it. A restart opens a new WorkerProcess."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from server.engine.channel import LENGTH_BYTES, ChannelError, decode_from_worker, frame, payload_bytes
from server.messages import FromFront, FromWorker

# No request can make the worker send itself these signals.
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GUARD_S = 0.5  # seconds between checks of a process that loads


class WorkerProcess:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.pid = process.pid
        self._guard = asyncio.create_task(_kill_when_stopped(process))
        self._is_blameless = True  # False once the front has killed a worker that stopped responding, because a request may be the cause
        self._process = process
        self._reader = reader
        self._writer = writer
        # Unbounded: a request adds one Submit and at most one Abort per choice, and admission limits the requests.
        self._outbox: deque[FromFront] = deque()
        self._wake = asyncio.Event()
        self._sending = asyncio.create_task(self._send_all())

    @staticmethod
    async def open(command: Sequence[str]) -> WorkerProcess:
        """Start `command` with the number of a connected socket as its last argument. A socket pair has no name in the file system, so
        nothing is left behind if this process is killed. Raise OSError if the process cannot be started, or RuntimeError or MemoryError if
        no thread can be started to wait for its end."""
        near, far = socket.socketpair()
        process = None
        try:
            with far:
                # The process gets its own process group, so that an interrupt typed at the terminal reaches only the front. With its own
                # session, Linux (autogroup) would give it half of a busy machine, and let the front wait up to 0.3 s for the other half.
                process = await asyncio.create_subprocess_exec(*command, str(far.fileno()), pass_fds=(far.fileno(),), process_group=0)
            reader, writer = await asyncio.open_unix_connection(sock=near)
        except BaseException:
            near.close()
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
            raise
        return WorkerProcess(process, reader, writer)

    def send(self, message: FromFront) -> None:
        self._outbox.append(message)
        self._wake.set()

    async def receive(self) -> FromWorker | None:
        """Return the next message, or None when the worker is gone or has sent bytes that are no message."""
        try:
            header = await self._reader.readexactly(LENGTH_BYTES)
            return decode_from_worker(await self._reader.readexactly(payload_bytes(header)))
        except (asyncio.IncompleteReadError, OSError):
            return None
        except (ChannelError, msgspec.MsgspecError):
            self.kill()
            return None

    def is_up(self) -> None:
        """Stop checking whether the process is suspended, because loading has ended. From now on the supervisor notices silence."""
        self._guard.cancel()

    def kill(self, *, is_blameless: bool = False) -> None:
        """Kill the process and those that it started. `is_blameless`: the reason is unrelated to the requests that the process runs."""
        self._is_blameless = is_blameless or _is_stopped(self.pid)
        if self._process.returncode is None:
            # SIGKILL also ends a suspended process. The group has what the worker started, such as pip, which would go on downloading.
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def close(self, patience_s: float) -> str:
        """Wait for the process to end, kill it after `patience_s`, and describe how it ended."""
        try:
            await asyncio.wait_for(self._process.wait(), patience_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        self._guard.cancel()
        self._sending.cancel()
        self._writer.close()
        return _describe(self._process.returncode)

    @property
    def ended_from_outside(self) -> bool:
        """True if a signal ended the process and no request can be the cause. Either another process sent the signal, or this front killed
        the process for a reason unrelated to its requests, for example because it was suspended (SIGSTOP)."""
        returncode = self._process.returncode
        return returncode is not None and -returncode in FROM_OUTSIDE and self._is_blameless

    async def _send_all(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outbox:
                    self._writer.write(frame(self._outbox.popleft()))
                    await self._writer.drain()  # waits while the worker does not read; only this task waits
        except OSError:
            return  # `receive` notices the end as well


async def _kill_when_stopped(process: asyncio.subprocess.Process) -> None:
    """Kill a loading process when it is suspended (SIGSTOP). The time of loading has no limit, so silence does not show a problem, but a
    suspended process would never end."""
    while True:
        await asyncio.sleep(GUARD_S)
        if process.returncode is None and _is_stopped(process.pid):
            process.kill()


def _is_stopped(pid: int) -> bool:
    """Return whether the process is suspended. Return False on systems without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def _describe(returncode: int | None) -> str:
    if returncode is None:
        return "still running"
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    return f"exit status {returncode}"
