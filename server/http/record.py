"""What becomes known of one request while it is served: for its line in the log, and for its trace."""

from __future__ import annotations

import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

log = logging.getLogger("server.access")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")  # of the request that this task serves, for every line of the log
LONGEST_PATH = 200


@dataclass(slots=True)
class RequestRecord:
    """Endpoints fill in what they know. Times are of the monotonic clock; None is what the request has not reached."""

    request_id: str
    method: str = ""
    path: str = ""
    began_s: float = field(default_factory=time.monotonic)
    traceparent: str = ""  # by which the client's own trace names the request
    is_probe: bool = False  # of health or metrics: asked every few seconds
    handler: str = ""  # the pattern that the path met
    status: int = 0
    model: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    received_s: float | None = None  # the body was whole
    submitted_s: float | None = None  # the model's worker had the prompt
    first_s: float | None = None  # the first token came
    generated_s: float | None = None  # the last one
    ended_s: float = 0.0

    def submit(self, model: str, now_s: float) -> None:
        """Of several prompts the first counts."""
        self.model = model
        self.submitted_s = self.submitted_s or now_s

    def count(self, prompt_tokens: int, completion_tokens: int = 0, first_s: float | None = None, ended_s: float | None = None) -> None:
        """The work on one prompt has ended."""
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        if first_s is not None:
            self.first_s = first_s if self.first_s is None else min(self.first_s, first_s)
            self.generated_s = ended_s


class Watcher(Protocol):
    """Is told of every request once it is over."""

    def __call__(self, record: RequestRecord, /) -> None: ...

    def close(self) -> None:
        """The server stops; may block for a while."""
        ...


def write_line(record: RequestRecord) -> None:
    """The access line. A failure of the server is a warning, a probe only worth a line where everything is."""
    level = logging.DEBUG if record.is_probe else logging.WARNING if record.status >= 500 else logging.INFO
    if not log.isEnabledFor(level):
        return
    path = record.path if record.path.isprintable() else ascii(record.path)
    fields: dict[str, object] = {
        "method": record.method,
        "path": path[:LONGEST_PATH],
        "status": record.status,
        "ms": round((record.ended_s - record.began_s) * 1000, 1),
    }
    text = "{method} {path} {status} {ms:.0f} ms"
    if record.model:
        fields |= {"model": record.model, "prompt_tokens": record.prompt_tokens, "completion_tokens": record.completion_tokens}
        text += ", model {model}, {prompt_tokens} + {completion_tokens} tokens"
    if record.first_s is not None:
        fields["first_token_ms"] = round((record.first_s - record.began_s) * 1000, 1)
        text += ", the first after {first_token_ms:.0f} ms"
    log.log(level, "%s", text.format_map(fields), extra={"fields": fields})
