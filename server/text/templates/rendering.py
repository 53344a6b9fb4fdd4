"""Compile one template and render it, as a job in a process of `server.isolated`, and encode the job's answers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import datetime
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec

from server.open_values import OPEN, OpenValues
from server.text.templates.errors import TemplateError, TemplateLimitError, TemplateRejection
from server.text.templates.limits import LIMITS

if TYPE_CHECKING:
    from server.text.templates.template import ChatTemplate

SLACK_S = 2.0  # seconds beyond the meter's limit, so that the meter stops a template first: its error names the template's line
SLACK_FACTOR = 2  # the kernel's memory limit divided by the meter's, because the meter counts characters, which have 1 to 4 bytes

WARMING = (
    "{% macro m(x) %}{{ x.role | upper }}{% endmacro %}{% set ns = namespace(n=0) %}"
    "{% for x in messages %}{% if x.role == 'user' and not tools %}{% set ns.n = ns.n + 1 %}"
    "{{ m(x) ~ x['content'].strip() | trim }}{{ [x] | tojson }}{{ loop.index }}{% endif %}{% endfor %}"
)
KINDS = {kind.__name__: kind for kind in (TemplateError, TemplateRejection, TemplateLimitError)}

CHECK = pickle.dumps(((), {}, 0.0))  # work without arguments asks only whether the template is broken


class Outcome(msgspec.Struct, frozen=True):
    """The result of a rendering: the text, or the kind, message and line of an error."""

    text: str | None = None  # None: rendering failed, as the other fields say
    kind: str = TemplateError.__name__  # a name in KINDS
    message: str = ""
    line: int | None = None  # line of the template, if known

    def result(self) -> str:
        """Return the text, or raise the error."""
        if self.text is None:
            raise KINDS[self.kind](self.message, self.line)
        return self.text


class Rendering:
    """Renders a template that is compiled in the process. Each call has the arguments of the template's `render` and the time that the
    template may show. The arguments are pickled, because a message may contain integers of any size."""

    prepare_s = 10.0  # the largest allowed template takes a fifth of this CPU time
    call_s = LIMITS.time_s + SLACK_S
    call_bytes = SLACK_FACTOR * LIMITS.memory_bytes

    def __init__(self, template: object) -> None:
        """`template` is pickled here. Once unpickled, it has a method `render`."""
        self._template = pickle.dumps(template)
        self._render: Callable[..., str] | TemplateError = TemplateError("the template is not compiled")
        self._warming: ChatTemplate | None = None

    def prepare(self) -> None:
        """Compile the template, and load what the first rendering would load. If the template is broken, let each call answer with the
        error."""
        from server.text.templates.template import ChatTemplate  # here, because the process that makes this job does not need Jinja

        self._warming = ChatTemplate(WARMING, {})
        try:
            self._render = pickle.loads(self._template).render
        except TemplateError as error:
            self._render = error
        datetime.now().strftime("%c")  # reads the file of the time zone
        import_module("jinja2.debug")  # jinja2 imports it at its first error

    def warm(self) -> None:
        """Render another template, so that the first rendering of this one is not slower than later ones."""
        assert self._warming is not None, "prepared before"
        self._warming.render([{"role": "user", "content": "warm"}] * 2)

    def run(self, work: bytes) -> bytes:
        """Render the template, or only find out whether it is broken if `work` is CHECK. Return the Outcome as MessagePack. If rendering
        raised a TemplateError, the Outcome describes this error."""
        try:
            args, options, now_s = pickle.loads(work)
            OPEN.set(OpenValues(b"", now_s))
            if isinstance(self._render, TemplateError):
                raise self._render
            outcome = Outcome(text=self._render(*args, **options) if args else "")
        except TemplateError as error:
            outcome = Outcome(kind=type(error).__name__, message=error.message, line=error.line)
        return msgspec.msgpack.encode(outcome)
