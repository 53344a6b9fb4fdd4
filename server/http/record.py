"""Record facts about one request while it is served, for its line in the log and for its trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

log = logging.getLogger("server.access")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")  # id of the request that this task serves; every log line shows it
LONGEST_PATH = 200


@dataclass(slots=True)
class RequestRecord:
    """Facts and times of one request, filled in by the gateway and by its endpoint. Times are of the monotonic clock; None: not reached."""

    request_id: str
    method: str = ""
    path: str = ""
    began_s: float = field(default_factory=time.monotonic)
    traceparent: str = ""  # the client's trace context, from the header `traceparent`
    client: str = ""  # address of the client, or of a proxy in front of it that `proxy_networks` does not name
    key: str = ""  # group or beginning of the digest of the client's key
    is_probe: bool = False  # a health check or a scrape of metrics, repeated every few seconds
    handler: str = ""  # the route's pattern that the path matched
    status: int = 0  # set when the request has ended
    model: str = ""  # the model that the prompt was submitted to
    fingerprint: str = ""  # fingerprint of the model that answers
    seed: int | None = None  # seed of the sampler: the request's, or the one that the server drew; None: no token is drawn
    prompt_tokens: int = 0
    completion_tokens: int = 0
    received_s: float | None = None  # time when the whole body had arrived, or when access was checked if the gateway reads no body
    submitted_s: float | None = None  # time when the first prompt was submitted to the model's worker
    first_s: float | None = None  # time when the first token arrived
    generated_s: float | None = None  # time when the latest generation with a token ended
    ended_s: float = 0.0  # 0: the request has not ended
    charge: Callable[[int], None] | None = None  # counts tokens for the rates of the client's key; None: the key has no rates

    def submit(self, model: str, now_s: float, fingerprint: str = "", seed: int | None = None) -> None:
        """Record when the first prompt was submitted, and the model, its fingerprint and the seed, which decide the answer."""
        self.model, self.fingerprint, self.seed = model, fingerprint, seed
        self.submitted_s = self.submitted_s or now_s

    def count(self, prompt_tokens: int, completion_tokens: int = 0, first_s: float | None = None, ended_s: float | None = None) -> None:
        """Add the tokens and times of one prompt whose generation has ended, and charge the tokens to the client's key. `first_s` is None
        if no token arrived."""
        if self.charge is not None:
            self.charge(prompt_tokens + completion_tokens)
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        if first_s is not None:
            self.first_s = first_s if self.first_s is None else min(self.first_s, first_s)
            self.generated_s = ended_s


class Watcher(Protocol):
    """Called with the record of every request that has ended."""

    def __call__(self, record: RequestRecord, /) -> None: ...

    def close(self) -> None:
        """Write out pending records when the server stops. May block for a while."""
        ...


def write_line(record: RequestRecord) -> None:
    """Write the access line: at level debug if the request is a probe, at level warning if the server failed, otherwise at level info."""
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
    if record.client:
        fields["client"] = record.client
        text += ", from {client}"
    if record.key:
        fields["key"] = record.key
        text += ", key {key}"
    if record.model:
        fields |= {"model": record.model, "prompt_tokens": record.prompt_tokens, "completion_tokens": record.completion_tokens}
        text += ", model {model}, {prompt_tokens} + {completion_tokens} tokens"
    if record.first_s is not None:
        fields["first_token_ms"] = round((record.first_s - record.began_s) * 1000, 1)
        text += ", the first after {first_token_ms:.0f} ms"
    log.log(level, "%s", text.format_map(fields), extra={"fields": fields})
