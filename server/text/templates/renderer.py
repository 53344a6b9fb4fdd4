"""A chat template as the front uses it: what is short is rendered in place, and the rest in a process of its own.

An ordinary conversation takes a fraction of a millisecond, less than it takes to ask another process. What has not ended after
`IN_PLACE` would hold up the streams of others: a long conversation, or a template that a message sends round and round.
Rendering has no effects, so it begins again in `server.text.templates.render_process`.
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
from contextlib import suppress
from typing import Any

import msgspec

from runtime.launch import command
from server.interfaces import ChatTemplate
from server.text.templates.meter import Limits
from server.text.templates.render_process import SLACK_FACTOR, SLACK_S, TAKEN, Outcome
from server.text.templates.template import LIMITS, TemplateError, TemplateLimitError

COMMAND = command("server.text.templates.render_process")
IN_PLACE = Limits(time_s=0.005, memory_bytes=2 << 20)
MAX_AT_ONCE = 8  # processes
PATIENCE_S = 20.0  # for a process that may use 4 s of CPU time; it is tried twice, within the minute that clients wait
MOST_ASKED = 30  # times, until a process has taken a rendering
CHUNK_BYTES = 1 << 20


class Renderer:
    """Renders on the event loop it is used from. Its process starts with the first long rendering and ends with this object."""

    def __init__(self, template: ChatTemplate) -> None:
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
        """Raises TemplateError."""
        args = (messages, tools, add_generation_prompt, continue_final_message)
        with suppress(TemplateLimitError):
            return self._template.render(*args, variables=variables, limits=IN_PLACE)
        try:
            work = pickle.dumps((args, {"variables": variables}))
        except RecursionError as error:
            raise TemplateError("the messages nest too deeply") from error
        num_lost = 0
        async with self._slots:
            for _ in range(MOST_ASKED):
                answer = await self._ask(work)
                if len(answer) > len(TAKEN):
                    return msgspec.msgpack.decode(answer[len(TAKEN) :], type=Outcome).result()
                num_lost += answer == TAKEN
                if num_lost == 2:
                    break
                await asyncio.sleep(0.01)  # a process that is being killed may still take what it never answers
        if num_lost < 2:
            raise TemplateError(f"there is no process to render the template: {MOST_ASKED} times none took it")
        raise TemplateLimitError(
            f"rendering was ended: it took more than {LIMITS.time_s + SLACK_S:g} s of the processor "
            f"or {SLACK_FACTOR * LIMITS.memory_bytes >> 20} MiB"
        )

    async def _ask(self, work: bytes) -> bytes:
        """TAKEN and the answer of a fork; TAKEN alone if it ended without one; nothing if no fork took the work."""
        near, far = socket.socketpair()
        try:
            with far:
                process = self._started()
                if not process.hand_over(far.fileno()):  # it has ended, though the kernel may not say so yet
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
            return TAKEN
        finally:
            writer.transport.abort()

    def _started(self) -> _Process:
        if self._process is None or not self._process.is_alive:
            self._process = _Process(self._template)
        return self._process


class _Process:
    def __init__(self, template: ChatTemplate) -> None:
        self._control, far = socket.socketpair()
        recipe = os.memfd_create("template")
        try:
            with far, os.fdopen(recipe, "wb") as file:
                # In a session of its own: an interrupt typed at the front's terminal is the front's to handle.
                process = subprocess.Popen(COMMAND, stdin=far.fileno(), start_new_session=True)
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
        """False where nobody is there to take it."""
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
