"""Call a job that runs in the process of `server.isolated.process`, so that its work never runs on the event loop.

The work is data from outside, so the kernel limits the time and the memory of a call. A call has no side effects, so a call whose process
was killed from outside, or did not answer in time, is made again.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from runtime.launch import command
from server.isolated.job import HEAD_BYTES, LENGTH_BYTES, CallError, Failure, Job, Said, taker

COMMAND = command("server.isolated.process")
MAX_AT_ONCE = 8  # largest number of calls at a time
MOST_ASKED = 30  # largest number of tries until a process accepts a call
CHUNK_BYTES = 1 << 20
RESULT = HEAD_BYTES + 1 + LENGTH_BYTES  # index of the first byte of the result in an answer
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # a call can start no threads


class Calls:
    """Calls a job for one event loop. The job's process starts with the first call, is replaced if it dies, and ends with this object."""

    def __init__(self, job: Job, patience_s: float) -> None:
        """`patience_s`: seconds to wait for an answer. A call whose process was killed from outside, or did not answer in time, is made
        once more."""
        self.patience_s = patience_s
        self._job = job
        self._process: _Process | None = None
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)

    def start(self) -> None:
        """Start the process if none runs. The process prepares the job while the caller continues. If the system has no process or no
        descriptor now, the first call tries again."""
        with suppress(OSError):
            self._started()

    async def call(self, work: bytes) -> bytearray:
        """Return the job's answer. Raise CallError if there is none."""
        async with self._slots:
            return await self._called(work)

    def call_blocking(self, work: bytes) -> bytearray:
        """Return the job's answer as `call` does, but block the calling thread until then, and do not wait for one of MAX_AT_ONCE slots."""

        def run() -> bytearray:
            with asyncio.Runner() as runner:
                return runner.run(self._called(work))

        try:
            with ThreadPoolExecutor(1) as thread:  # a thread runs at most one event loop, and the caller's may run one already
                return thread.submit(run).result()
        except (OSError, RuntimeError) as error:  # the system has no descriptor or no thread for the call
            raise CallError(Failure.NO_FORK, getattr(error, "strerror", None) or str(error)) from error

    async def _called(self, work: bytes) -> bytearray:
        """Make the call. Make it once more if its process was killed from outside or did not answer in time, and up to MOST_ASKED times if
        no process accepts it. Raise CallError if there is still no answer, or if the call failed."""
        num_killed = num_late = 0
        for _ in range(MOST_ASKED):
            try:
                answer = await self._ask(work)
            except OSError as error:  # the system has no process or no descriptor for the call
                raise CallError(Failure.NO_FORK, error.strerror or str(error)) from error
            if answer is not None and _is_whole(answer):
                return _result(answer)
            num_killed += answer is not None and len(answer) >= HEAD_BYTES
            num_late += answer is None
            if num_killed + num_late == 2:
                break
            await asyncio.sleep(0.01)  # a process that is being killed may still accept work and never answer
        if num_late:
            raise CallError(Failure.LATE)
        raise CallError(Failure.KILLED if num_killed == 2 else Failure.NOT_TAKEN)

    async def _ask(self, work: bytes) -> bytearray | None:
        """Send the work to a fork. Return the head (HEAD_BYTES) and the fork's answer, the head and at most a part of the answer if the
        fork was killed, b"" if no fork took the work, or None if there was no answer in time."""
        near, far = socket.socketpair()
        answer = bytearray()
        try:
            with far:
                process = self._started()
                if not process.hand_over(far.fileno()):  # the process has ended, though the kernel may not report it yet
                    process.end()
                    near.close()
                    return bytearray()
            reader, writer = await asyncio.open_unix_connection(sock=near, limit=CHUNK_BYTES)
        except BaseException:
            near.close()
            raise
        try:
            async with asyncio.timeout(self.patience_s):
                writer.write(work)
                writer.write_eof()
                while chunk := await reader.read(CHUNK_BYTES):  # joining all chunks at once would delay other requests
                    answer += chunk
                return answer
        except ConnectionError:
            return bytearray()
        except TimeoutError:
            if pid := taker(answer):
                process.end_fork(pid)  # only this fork: other forks run other calls
            else:
                process.end()
            return None
        finally:
            writer.transport.abort()

    def _started(self) -> _Process:
        """Return the process. Start it if none runs."""
        if self._process is None or not self._process.is_alive:
            self._process = _Process(self._job)
        return self._process


def _is_whole(answer: bytearray) -> bool:
    """Return whether an answer says how the call ended. A fork that was killed may have sent a part of its result."""
    if len(answer) > HEAD_BYTES and answer[HEAD_BYTES] == Said.DONE:
        return len(answer) >= RESULT and len(answer) - RESULT >= _length(answer)
    return len(answer) > HEAD_BYTES


def _length(answer: bytearray) -> int:
    """Return the length of the result in an answer."""
    return int.from_bytes(answer[RESULT - LENGTH_BYTES : RESULT], "little")


def _result(answer: bytearray) -> bytearray:
    """Return the job's answer. Raise CallError if the process says that there is none."""
    match answer[HEAD_BYTES]:
        case Said.DONE:
            del answer[:RESULT]
            return answer
        case Said.TOO_LARGE | Said.NO_FORK as said:
            failure = Failure.TOO_LARGE if said == Said.TOO_LARGE else Failure.NO_FORK
            raise CallError(failure, answer[HEAD_BYTES + 1 :].decode(errors="replace"))
        case _:
            raise CallError(Failure.STOPPED)


class _Process:
    """The process of a job, from which each call is forked."""

    def __init__(self, job: Job) -> None:
        self._control, far = socket.socketpair()
        recipe = os.memfd_create("job")
        try:
            with far, os.fdopen(recipe, "wb") as file:
                # The process gets its own process group, so that an interrupt typed at the terminal reaches only the front.
                process = subprocess.Popen(COMMAND, stdin=far.fileno(), process_group=0, env=os.environ | ONE_THREAD)
                pickle.dump(job, file)
                file.flush()
                file.seek(0)
                self.hand_over(recipe)
        except BaseException:
            self._control.close()
            raise
        self._process = process
        self.end = weakref.finalize(self, _end, process, self._control)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, and `end` was not called."""
        return self.end.alive and self._process.poll() is None

    def hand_over(self, fd: int) -> bool:
        """Send a descriptor to the process. Return False if the process has ended."""
        try:
            socket.send_fds(self._control, [b"\0"], [fd])
        except OSError:
            return False
        return True

    def end_fork(self, pid: int) -> None:
        """End one fork. The fork has sent `pid`, and runs work from outside, so do nothing unless `pid` belongs to a fork of this
        process."""
        with suppress(ProcessLookupError, OverflowError):  # no process has an id above 2**31 - 1
            if pid != self._process.pid and os.getpgid(pid) == self._process.pid:
                os.kill(pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """End the process and its forks."""
    control.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
