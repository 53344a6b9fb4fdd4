"""The errors of chat templates.

TemplateError              the template is broken, or rendering failed; `line` is the line in the template, if known; a ValueError
    TemplateRejection      the template refused the messages (`raise_exception`): the client must change them
    TemplateLimitError     rendering exceeded its time or memory
    TemplateUnavailable    no process could render the template; nothing is known of the template and the messages
"""

from __future__ import annotations


class TemplateError(ValueError):
    """The template is broken, or rendering failed."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message if line is None else f"chat template, line {line}: {message}")
        self.message = message
        self.line = line


class TemplateRejection(TemplateError):
    """The template refused the messages."""


class TemplateLimitError(TemplateError):
    """The template or its rendering exceeded a limit."""


class TemplateUnavailable(TemplateError):
    """No process could render the template: the server was too busy, or the process could not be started or was killed. Another try may
    succeed."""
