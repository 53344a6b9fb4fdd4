"""One worker process and the socket to it, seen from the front. A restart makes a new one."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from server.engine.channel import LENGTH_BYTES, ChannelError, decode_from_worker, frame, payload_bytes
from server.messages import FromFront, FromWorker

# Nothing that a request does inside the process sends these.
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GUARD_S = 0.5  # between looks at a process that loads


class WorkerProcess:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.pid = process.pid
        self._guard = asyncio.create_task(_kill_when_stopped(process))
        self._is_blameless = True  # as long as nobody here killed it for its silence
        self._process = process
        self._reader = reader
        self._writer = writer
        # Not bounded here: a request adds one Submit and at most one Abort per choice, and admission bounds the requests.
        self._outbox: deque[FromFront] = deque()
        self._wake = asyncio.Event()
        self._sending = asyncio.create_task(self._send_all())

    @staticmethod
    async def open(command: Sequence[str]) -> WorkerProcess:
        """Start `command` with the number of an open socket to this process as its last argument. A pair of sockets has no name in the
        file system: nothing is left when this process is killed. Raises what keeps a process from starting: OSError, or RuntimeError and
        MemoryError where no thread can be had that waits for its end."""
        near, far = socket.socketpair()
        process = None
        try:
            with far:
                # In a session of its own: an interrupt typed at the front's terminal is the front's to handle.
                process = await asyncio.create_subprocess_exec(
                    *command, str(far.fileno()), pass_fds=(far.fileno(),), start_new_session=True
                )
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
        """None when the worker is gone, or said what is no message; what it sent before is delivered first."""
        try:
            header = await self._reader.readexactly(LENGTH_BYTES)
            return decode_from_worker(await self._reader.readexactly(payload_bytes(header)))
        except (asyncio.IncompleteReadError, OSError):
            return None
        except (ChannelError, msgspec.MsgspecError):
            self.kill()
            return None

    def is_up(self) -> None:
        """It has loaded: from now on it is judged by its silence."""
        self._guard.cancel()

    def kill(self, *, is_blameless: bool = False) -> None:
        """`is_blameless`: for a reason that has nothing to do with what the worker runs."""
        self._is_blameless = is_blameless or _is_stopped(self.pid)
        if self._process.returncode is None:
            self._process.kill()  # SIGKILL, which a stopped process obeys too

    async def close(self, patience_s: float) -> str:
        """Wait for the process to end, killing it if need be, and say how it did."""
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
        """By a signal that nobody here sent, or after one that stopped it."""
        returncode = self._process.returncode
        return returncode is not None and -returncode in FROM_OUTSIDE and self._is_blameless

    async def _send_all(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outbox:
                    self._writer.write(frame(self._outbox.popleft()))
                    await self._writer.drain()  # a worker that does not read stops this task and nothing else
        except OSError:
            return  # `receive` sees the end too


async def _kill_when_stopped(process: asyncio.subprocess.Process) -> None:
    """How long loading takes nobody knows, so its silence says nothing; but a stopped process would be waited for without end."""
    while True:
        await asyncio.sleep(GUARD_S)
        if process.returncode is None and _is_stopped(process.pid):
            process.kill()


def _is_stopped(pid: int) -> bool:
    """Whether a signal from outside stopped the process, as far as this system tells."""
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
