"""A chat template from outside, such as a model's file. This process neither compiles nor renders it: `Renderer`'s process does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from server.text.templates.renderer import Renderer
    from server.text.templates.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Becomes a compiled template where it is unpickled, which is in the process that renders."""

    source: str
    special_tokens: dict[str, str]
    tool_source: str | None

    def __reduce__(self) -> tuple[Any, ...]:
        return _compiled, (self.source, self.special_tokens, self.tool_source)


def _compiled(source: str, special_tokens: Mapping[str, str], tool_source: str | None) -> ChatTemplate:
    """Compile a template. This runs where a `_Recipe` is unpickled."""
    from server.text.templates.template import ChatTemplate  # imports Jinja, which this process does not need

    return ChatTemplate(source, special_tokens, tool_source=tool_source)


class OutsideTemplate:
    """The text of a template, and the process that compiles and renders it. The process starts at once."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, tool_source: str | None = None) -> None:
        """The arguments are those of `ChatTemplate`."""
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.tool_source = tool_source
        from server.text.templates.renderer import Renderer  # imports asyncio, which a worker without templates does not need

        self._renderer = Renderer(_Recipe(source, self.special_tokens, tool_source))
        self._renderer.start()

    def check(self) -> None:
        """Wait until the process has compiled the template. Raise TemplateError if the template is broken or the process fails."""
        self._renderer.check()

    def renderer(self) -> Renderer:
        """Return the object that renders the template."""
        return self._renderer

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt. The arguments are those of `ChatTemplate.render`. Raise TemplateError if rendering fails. This blocks, so only
        commands and threads without an event loop may call it."""
        return self._renderer.render_blocking(
            (messages, tools, add_generation_prompt, continue_final_message), {"variables": variables or {}}
        )
