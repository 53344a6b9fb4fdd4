"""The process of one template: `python -m server.text.templates.render_process`, started by `server.text.templates.renderer`.

    front ── this process ── a process per rendering

This process compiles the template once. Each rendering is a fork, so that the kernel limits its time and memory, and can end it during an
operation. A fork cannot open files or sockets or start processes; its environment has no secrets. One fork always waits, confined already,
and takes the next rendering from the front itself, so an ordinary rendering waits for no fork.
"""

from __future__ import annotations

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
from collections.abc import Callable
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from server.cpu_timer import CpuTimer
from server.text.templates.meter import Limits
from server.text.templates.template import LIMITS, ChatTemplate, TemplateError, TemplateLimitError, TemplateRejection

TAKEN, GONE = b"\1", b"\2"  # what a fork says first: it has begun a rendering, or the front is gone
ORDINARY_S = 0.005  # an ordinary rendering takes a fifth of this
MAX_COMPILE_S = 10.0  # CPU time for compiling a template; the largest allowed template takes a fifth of it
SLACK_S = 2.0  # seconds beyond the meter's limit, so that the meter stops a template first: its error names the template's line
SLACK_FACTOR = 2  # the kernel's memory limit divided by the meter's, because the meter counts characters, which have 1 to 4 bytes

WARMING = ChatTemplate(
    "{% macro m(x) %}{{ x.role | upper }}{% endmacro %}{% set ns = namespace(n=0) %}"
    "{% for x in messages %}{% if x.role == 'user' and not tools %}{% set ns.n = ns.n + 1 %}"
    "{{ m(x) ~ x['content'].strip() | trim }}{{ [x] | tojson }}{{ loop.index }}{% endif %}{% endfor %}",
    {},
)
KINDS = {kind.__name__: kind for kind in (TemplateError, TemplateRejection, TemplateLimitError)}

CHECK = pickle.dumps(((), {}))  # work without arguments asks only whether the template is broken

Render = Callable[..., str]


class Outcome(msgspec.Struct, frozen=True):
    """The result of a rendering: the text, or the kind, message and line of an error."""

    text: str | None = None
    kind: str = TemplateError.__name__
    message: str = ""
    line: int | None = None

    def result(self) -> str:
        if self.text is None:
            raise KINDS[self.kind](self.message, self.line)
        return self.text


def main() -> None:
    control = socket.socket(fileno=0)
    render = _compiled(_received(control)[0])
    # Forks cannot read files, so load the time zone here, and the module that jinja2 imports at its first error.
    datetime.now().strftime("%c")
    import_module("jinja2.debug")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    gc.freeze()
    while (said := _next_fork(control, render)) != GONE:
        if not said:
            time.sleep(0.01)  # the fork was killed; do not start forks faster than the machine can end them


def _compiled(recipe: int) -> Render | TemplateError:
    """Return the template's `render`, or the error of a broken template."""
    limit = CpuTimer()
    limit.start(MAX_COMPILE_S)
    try:
        with os.fdopen(recipe, "rb") as file:
            return pickle.load(file).render
    except TemplateError as error:
        return error
    finally:
        limit.stop()


def _next_fork(control: socket.socket, render: Render | TemplateError) -> bytes:
    """Start a fork that waits for one rendering. Return what it says when it stops waiting: TAKEN, GONE, or nothing if it was killed."""
    reading, writing = os.pipe()
    try:
        if os.fork() == 0:
            os.close(reading)
            _serve(control, writing, render)
    except OSError as error:
        os.close(writing)
        if not (fds := _received(control)):
            return GONE
        _send(fds[0], TAKEN)
        message = f"no process can be started to render the template: {error}"
        _answer(fds[0], Outcome(kind=TemplateError.__name__, message=message))
        os.close(fds[0])
        return TAKEN
    else:
        os.close(writing)
        said = os.read(reading, 1)
        if said == TAKEN:  # an ordinary rendering ends first, so that starting the next fork takes no time from it
            select.select([reading], [], [], ORDINARY_S)
        return said
    finally:
        os.close(reading)


def _received(control: socket.socket) -> list[int]:
    """Return the descriptors of the next message, or none if the front is gone."""
    return socket.recv_fds(control, 1, 1)[1]


def _serve(control: socket.socket, parent: int, render: Render | TemplateError) -> None:
    """Wait for one rendering in a fork, answer it, and exit."""
    try:
        _confine(LIMITS)
        # The first writes to shared pages copy them, which takes longer than an ordinary rendering. Copy most of them while there is time.
        WARMING.render([{"role": "user", "content": "warm"}] * 2)
        fds = _received(control)
        _send(parent, TAKEN if fds else GONE)
        if not fds:
            return
        os.dup2(fds[0], 0)
        os.dup2(parent, 3)  # the parent sees the end of this fork by the end of the pipe
        os.closerange(4, 1 << 20)
        _limit(resource.RLIMIT_NOFILE, 0)  # only now, because receiving a descriptor opens it
        _send(0, TAKEN)
        _answer(0, _rendered(0, render))
        os.close(0)  # before this fork ends, because freeing its memory takes time
    except ConnectionError:
        pass  # the front has closed the connection
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _rendered(fd: int, render: Render | TemplateError) -> Outcome:
    try:
        with os.fdopen(fd, "rb", closefd=False) as work:
            args, options = pickle.loads(work.read())
        _end_with_peer(fd, is_on=True)
        if isinstance(render, TemplateError):
            raise render
        return Outcome(text=render(*args, **options) if args else "")
    except TemplateError as error:
        return Outcome(kind=type(error).__name__, message=error.message, line=error.line)
    except (MemoryError, RecursionError) as error:
        limit = f"rendering took more than {SLACK_FACTOR * LIMITS.memory_bytes >> 20} MiB, or nests too deeply ({type(error).__name__})"
        return Outcome(kind=TemplateLimitError.__name__, message=limit)
    finally:
        _end_with_peer(fd, is_on=False)


def _confine(limits: Limits) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    bounds: dict[int, int] = {
        resource.RLIMIT_AS: used + SLACK_FACTOR * limits.memory_bytes,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for name, bound in bounds.items():
        _limit(name, bound)
    CpuTimer().start(limits.time_s + SLACK_S)


def _limit(name: int, bound: int) -> None:
    _, hard = resource.getrlimit(name)
    bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
    resource.setrlimit(name, (bound, bound))


def _end_with_peer(fd: int, *, is_on: bool) -> None:
    """End this process when the front closes the connection, because nobody needs the text any more. SIGIO also announces arriving data,
    and on a busy machine it may come only after the data was read. So the handler checks whether the connection is closed."""

    def end_if_closed(*_: object) -> None:
        peer = socket.socket(fileno=fd)
        try:
            peer.send(b"")  # poll is not allowed under RLIMIT_NOFILE
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


def _answer(fd: int, outcome: Outcome) -> None:
    _send(fd, msgspec.msgpack.encode(outcome))


def _send(fd: int, data: bytes) -> None:
    answer: Any = memoryview(data)
    while answer:
        answer = answer[os.write(fd, answer) :]


if __name__ == "__main__":
    main()
