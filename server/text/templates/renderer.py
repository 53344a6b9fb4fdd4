"""A chat template as the front uses it: every rendering runs in `server.text.templates.render_process`, never on the event loop.

A template comes from outside, so the kernel limits it, whatever its own meter counts. Rendering has no side effects, so a rendering whose
process was killed is started again.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgspec

from runtime.launch import command
from server.text.templates.render_process import CHECK, SLACK_FACTOR, SLACK_S, TAKEN, Outcome
from server.text.templates.template import LIMITS, TemplateError, TemplateLimitError

COMMAND = command("server.text.templates.render_process")
MAX_AT_ONCE = 8  # largest number of processes that render at a time
PATIENCE_S = 20.0  # seconds to wait for a rendering that may use 4 s of CPU time; it is tried twice, within the minute that clients wait
MOST_ASKED = 30  # largest number of tries until a process accepts a rendering
CHUNK_BYTES = 1 << 20


class Renderer:
    """Renders a template for one event loop. The template's process starts with this object, is replaced if it dies, and ends with it."""

    def __init__(self, template: object) -> None:
        """`template` is sent to the process by pickle, and has a method `render` there."""
        self._template = template
        self._process: _Process | None = None
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the rendered prompt. Raise TemplateError if rendering fails."""
        work = _work((messages, tools, add_generation_prompt, continue_final_message), {"variables": variables})
        async with self._slots:
            return await self._rendered(work)

    def render_blocking(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> str:
        """Do as `render` does, on a thread without an event loop of the server."""
        return self._wait(_work(args, options))

    def check(self) -> None:
        """Raise TemplateError if the template is broken. This blocks."""
        self._wait(CHECK)

    def _wait(self, work: bytes) -> str:
        with ThreadPoolExecutor(1) as thread:  # the caller's thread may run an event loop, which can hold no second one
            return thread.submit(asyncio.run, self._rendered(work)).result()

    async def _rendered(self, work: bytes) -> str:
        num_lost = num_late = 0
        for _ in range(MOST_ASKED):
            answer = await self._ask(work)
            if answer is not None and len(answer) > len(TAKEN):
                return msgspec.msgpack.decode(answer[len(TAKEN) :], type=Outcome).result()
            num_lost += answer == TAKEN
            num_late += answer is None
            if num_lost + num_late == 2:
                break
            await asyncio.sleep(0.01)  # a process that is being killed may still accept work and never answer
        if num_late:
            raise TemplateError(f"the template was not rendered within {PATIENCE_S:g} s because the server is busy; try again later")
        if num_lost < 2:
            raise TemplateError(f"no process could render the template: all {MOST_ASKED} tries failed")
        raise TemplateLimitError(
            f"rendering was ended: it took more than {LIMITS.time_s + SLACK_S:g} s of CPU time "
            f"or {SLACK_FACTOR * LIMITS.memory_bytes >> 20} MiB"
        )

    async def _ask(self, work: bytes) -> bytes | None:
        """Send the work to a fork. Return TAKEN and the fork's answer, TAKEN alone if the fork ended without an answer, b"" if no fork took
        the work, or None if there was no answer in time."""
        near, far = socket.socketpair()
        try:
            with far:
                process = self._started()
                if not process.hand_over(far.fileno()):  # the process has ended, though the kernel may not report it yet
                    process.end()
                    near.close()
                    return b""
            reader, writer = await asyncio.open_unix_connection(sock=near, limit=CHUNK_BYTES)
        except BaseException:
            near.close()
            raise
        try:
            async with asyncio.timeout(PATIENCE_S):
                writer.write(work)
                writer.write_eof()
                return await reader.read()
        except ConnectionError:
            return b""
        except TimeoutError:
            process.end()
            return None
        finally:
            writer.transport.abort()

    def _started(self) -> _Process:
        if self._process is None or not self._process.is_alive:
            self._process = _Process(self._template)
        return self._process


def _work(args: tuple[Any, ...], options: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps((args, options))
    except RecursionError as error:
        raise TemplateError("the messages nest too deeply") from error


class _Process:
    def __init__(self, template: object) -> None:
        self._control, far = socket.socketpair()
        recipe = os.memfd_create("template")
        try:
            with far, os.fdopen(recipe, "wb") as file:
                # The process gets its own process group, so that an interrupt typed at the terminal reaches only the front.
                process = subprocess.Popen(COMMAND, stdin=far.fileno(), process_group=0)
                pickle.dump(template, file)
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
        return self.end.alive and self._process.poll() is None

    def hand_over(self, fd: int) -> bool:
        """Send a descriptor to the process. Return False if it has ended."""
        try:
            socket.send_fds(self._control, [b"\0"], [fd])
        except OSError:
            return False
        return True


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
