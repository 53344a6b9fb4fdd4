"""The process of one job: `python -m server.isolated.process`, started by `server.isolated.calls`.

    front ── this process ── a process per call

This process prepares the job once. Each call is a fork, so that the kernel limits its time and memory, and can end it during an operation.
A fork cannot open files or sockets or start processes. Its environment is that of the front, from which `deploy/secrets.py` has removed the
secrets. One fork, whose limits are set already, always waits, and receives the next call directly from the front, so that an ordinary call
does not wait until a fork has started.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import os
import pickle
import resource
import select
import signal
import socket
import time
import traceback
import warnings
from contextlib import suppress
from typing import Any

from runtime import generated_code
from server.isolated.cpu_timer import CpuTimer
from server.isolated.job import Job, Said, done, taken
from server.isolated.limits import bound, bound_memory

TAKEN, GONE = bytes([Said.TAKEN]), b"\0"  # what a fork tells this process: it has begun a call, or the front is gone
ORDINARY_S = 0.005  # seconds to wait for the end of a call before the next fork starts; an ordinary call takes a fifth of this


def main() -> None:
    """Get the job, prepare it, and start forks until the front is gone."""
    control = socket.socket(fileno=0)
    with os.fdopen(_received(control)[0], "rb") as recipe:
        job: Job = pickle.load(recipe)
    warnings.simplefilter("ignore")  # decoders warn of damaged files: clients could fill the log, or block a call whose log nobody reads
    limit = CpuTimer()
    limit.start(job.prepare_s)
    job.prepare()
    limit.stop()
    generated_code.keep()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    gc.freeze()
    while (said := _next_fork(control, job)) != GONE:
        if not said:
            time.sleep(0.01)  # the fork was killed; do not start forks faster than the machine can end them


def _next_fork(control: socket.socket, job: Job) -> bytes:
    """Start a fork that waits for one call. Return what the fork says when it stops waiting: TAKEN, GONE, or nothing if it was killed. If
    no fork can be started, wait for the call here, and answer it with NO_FORK."""
    reading, writing = os.pipe()
    try:
        if os.fork() == 0:
            os.close(reading)
            _serve(control, writing, job)
    except OSError as error:
        os.close(writing)
        if not (fds := _received(control)):
            return GONE
        _send(fds[0], taken(0) + bytes([Said.NO_FORK]) + str(error).encode())
        os.close(fds[0])
        return TAKEN
    else:
        os.close(writing)
        said = os.read(reading, 1)
        if said == TAKEN:  # an ordinary call ends first, so that starting the next fork takes no time from it
            select.select([reading], [], [], ORDINARY_S)
        return said
    finally:
        os.close(reading)


def _received(control: socket.socket) -> list[int]:
    """Return the descriptors of the next message, or none if the front is gone."""
    return socket.recv_fds(control, 1, 1)[1]


def _serve(control: socket.socket, parent: int, job: Job) -> None:
    """Wait for one call in a fork, answer it, and exit. Tell the parent at the end of the wait whether there is a call, or the front is
    gone."""
    try:
        _confine(job)
        job.warm()
        fds = _received(control)
        _send(parent, TAKEN if fds else GONE)
        if not fds:
            return
        os.dup2(fds[0], 0)
        os.dup2(parent, 3)  # the parent sees the end of this fork by the end of the pipe
        os.closerange(4, 1 << 20)
        bound(resource.RLIMIT_NOFILE, 0)  # only now, because receiving a descriptor opens it
        _tell_end(0)
        _send(0, taken(os.getpid()))
        answer = _answer(0, job)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)  # the call has ended, so its limit of CPU time must not cut off the answer
        _send(0, answer)
        os.close(0)  # before this fork ends, because freeing its memory takes time
    except ConnectionError:
        pass  # the front has closed the connection
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _answer(fd: int, job: Job) -> bytes:
    """Read the work of a call, run it, and return the bytes of the answer. Meanwhile the process ends if the front closes the
    connection."""
    try:
        with os.fdopen(fd, "rb", closefd=False) as file:
            work = file.read()
        _end_with_peer(fd, is_on=True)
        return done(job.run(work))
    except (MemoryError, RecursionError) as error:
        return bytes([Said.TOO_LARGE]) + type(error).__name__.encode()
    except ConnectionError:
        raise  # the front has closed the connection
    except BaseException:
        with suppress(OSError, MemoryError):  # if the log is a file, this fork may not write to it
            traceback.print_exc()
        return bytes([Said.STOPPED])
    finally:
        _end_with_peer(fd, is_on=False)


def _confine(job: Job) -> None:
    """Limit what this fork may take and do."""
    bound_memory(job.call_bytes)
    bound(resource.RLIMIT_NPROC, 0)
    bound(resource.RLIMIT_FSIZE, 0)
    CpuTimer().start(job.call_s)


def _tell_end(fd: int) -> None:
    """Let this process write to a descriptor why it ends, when its CPU time is over or it crashes. So the front knows that a fork which
    says nothing was killed from outside. `faulthandler` does this, because handlers in Python do not run during native code."""
    faulthandler.enable(fd, all_threads=False)
    faulthandler.register(signal.SIGPROF, fd, all_threads=False, chain=True)


def _end_with_peer(fd: int, *, is_on: bool) -> None:
    """If `is_on`, let this process end when the front closes the connection, because nobody needs the answer then. Otherwise let it
    continue. SIGIO also announces arriving data, and on a busy machine the signal may come only after the data was read. So the handler
    checks whether the connection is closed."""

    def end_if_closed(*_: object) -> None:
        peer = socket.socket(fileno=fd)
        try:
            peer.send(b"")  # poll fails if RLIMIT_NOFILE is 0
        except ConnectionError:
            os._exit(0)
        finally:
            peer.detach()

    signal.signal(signal.SIGIO, end_if_closed)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_ASYNC if is_on else flags & ~os.O_ASYNC)
    if is_on:
        end_if_closed()


def _send(fd: int, data: bytes) -> None:
    """Write all of the data to a descriptor."""
    answer: Any = memoryview(data)
    while answer:
        answer = answer[os.write(fd, answer) :]


if __name__ == "__main__":
    main()
