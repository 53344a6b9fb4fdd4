"""One worker process and the socket to it, seen from the front. A new process is a new link."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from server.engine.channel import LENGTH_BYTES, decode_from_worker, frame, payload_bytes
from server.messages import FromFront, FromWorker

# Nothing that a request does inside the process sends these.
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GUARD_S = 0.5  # between looks at a process that loads


class Link:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        guard: asyncio.Task[None],
    ) -> None:
        self.pid = process.pid
        self._guard = guard
        self._is_blameless = True  # as long as nobody here killed it for its silence
        self._process = process
        self._reader = reader
        self._writer = writer
        # Not bounded here: a request adds one Submit and at most one Abort per choice, and admission bounds the requests.
        self._outbox: deque[FromFront] = deque()
        self._wake = asyncio.Event()
        self._sending = asyncio.create_task(self._send_all())

    @staticmethod
    async def open(command: Sequence[str], socket_path: Path) -> Link:
        """Start `command` with the path of a socket behind it, and wait until it has connected. OSError if it does not."""
        accepted: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Future()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if accepted.done():
                writer.close()
            else:
                accepted.set_result((reader, writer))

        socket_path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(accept, socket_path)
        process = guard = None
        try:
            # In a session of its own: an interrupt typed at the front's terminal is the front's to handle.
            process = await asyncio.create_subprocess_exec(*command, str(socket_path), start_new_session=True)
            guard = asyncio.create_task(_kill_when_stopped(process))
            ended = asyncio.create_task(process.wait())
            try:
                await asyncio.wait((accepted, ended), return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
            if not accepted.done():
                raise ConnectionError(f"the worker ended before it connected: {_describe(process.returncode)}")
            return Link(process, *accepted.result(), guard)
        except BaseException:
            if guard is not None:
                guard.cancel()
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()
            raise
        finally:
            server.close()

    def send(self, message: FromFront) -> None:
        self._outbox.append(message)
        self._wake.set()

    async def receive(self) -> FromWorker | None:
        """None when the worker is gone; what it sent before is delivered first."""
        try:
            header = await self._reader.readexactly(LENGTH_BYTES)
            return decode_from_worker(await self._reader.readexactly(payload_bytes(header)))
        except (asyncio.IncompleteReadError, OSError):
            return None

    def is_up(self) -> None:
        """It has loaded: from now on it is judged by its silence."""
        self._guard.cancel()

    def kill(self) -> None:
        self._is_blameless = _is_stopped(self.pid)
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
