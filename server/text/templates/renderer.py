"""Render chat templates for the front. Templates come from outside, so every rendering is a call of the job `Rendering`, which runs in
another process."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from server.isolated.calls import MOST_ASKED, Calls
from server.isolated.job import CallError, Failure
from server.open_values import created_s
from server.text.templates.errors import TemplateError, TemplateLimitError, TemplateUnavailable
from server.text.templates.rendering import CHECK, Outcome, Rendering

PATIENCE_S = 20.0  # seconds to wait for a rendering, which may use 4 s of CPU time; two tries fit in the minute that clients wait


class Renderer:
    """Renders a template for one event loop. The template's process ends with this object."""

    def __init__(self, template: object) -> None:
        """`template` is sent to the process by pickle, and has a method `render` there."""
        self._calls = Calls(Rendering(template), PATIENCE_S)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Return the rendered prompt. The arguments are those of `ChatTemplate.render`. Raise TemplateError if rendering fails."""
        work = _work((messages, tools, add_generation_prompt, continue_final_message), {"variables": variables})
        try:
            return _text(await self._calls.call(work))
        except CallError as error:
            raise self._described(error) from None

    def render_blocking(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> str:
        """Return the rendered prompt, or raise TemplateError. `args` and `options` are the positional and the named arguments of
        `ChatTemplate.render`. This blocks, so it is for threads without an event loop of the server."""
        return self._wait(_work(args, options))

    def start(self) -> None:
        """Start the process, which compiles the template while the caller does something else."""
        self._calls.start()

    def check(self) -> None:
        """Wait until the process has compiled the template. Raise TemplateError if the template is broken or the process fails. This
        blocks."""
        self._wait(CHECK)

    def _wait(self, work: bytes) -> str:
        """Return the text that the process answers. Raise TemplateError if the call fails. This blocks."""
        try:
            return _text(self._calls.call_blocking(work))
        except CallError as error:
            raise self._described(error) from None

    def _described(self, error: CallError) -> TemplateError:
        """Return the TemplateError that describes a failed call."""
        most = f"{Rendering.call_bytes >> 20} MiB"
        match error.failure:
            case Failure.TOO_LARGE:
                return TemplateLimitError(f"rendering took more than {most}, or nests too deeply ({error.detail})")
            case Failure.STOPPED:
                return TemplateLimitError(f"rendering was ended: it took more than {Rendering.call_s} s of CPU time or {most}")
            case Failure.KILLED:
                return TemplateUnavailable("the process that rendered the template was killed, maybe for lack of memory; try again later")
            case Failure.LATE:
                late = f"was not rendered within {self._calls.patience_s:g} s because the server is busy"
                return TemplateUnavailable(f"the template {late}; try again later")
            case Failure.NO_FORK:
                return TemplateUnavailable(f"no process can be started to render the template: {error.detail}")
            case Failure.NOT_TAKEN:
                return TemplateUnavailable(f"no process could render the template: all {MOST_ASKED} tries failed")


def _work(args: tuple[Any, ...], options: Mapping[str, Any]) -> bytes:
    """Return the arguments of a rendering as the process expects them. Raise TemplateError if the messages nest too deeply."""
    try:
        return pickle.dumps((args, options, created_s()))
    except RecursionError as error:
        raise TemplateError("the messages nest too deeply") from error


def _text(answer: bytearray) -> str:
    """Return the text in an answer of the process, or raise the TemplateError in it."""
    return msgspec.msgpack.decode(answer, type=Outcome).result()
