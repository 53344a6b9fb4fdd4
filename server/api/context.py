"""The context of every endpoint, and the caller of a request."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from starlette.requests import Request

from server.http.auth import Access
from server.http.record import RequestRecord
from server.metrics import Metrics, ModelSeries
from server.models.registry import Registry
from server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request, made by the gateway."""

    request_id: str
    key_digest: str = ""  # digest of the API key, for fairness between keys; empty without one
    access: Access = Access.KEY  # access level of the path when the gateway checked the key
    arrived_s: float = field(default_factory=time.monotonic)
    num_body_bytes: int = 0
    record: RequestRecord = field(default_factory=lambda: RequestRecord(""))


@dataclass(frozen=True, slots=True)
class Context:
    settings: ServerSettings
    registry: Registry

    @property
    def metrics(self) -> Metrics:
        return self.registry.metrics

    def metrics_of(self, model: str) -> ModelSeries:
        return self.metrics.of(model)


def caller(request: Request) -> Caller:
    return request.scope["relaxserve.caller"]


def answer_id(prefix: str, asked: str | None) -> str:
    """Return the id of an answer: the one that the request chose, or a new one."""
    return f"{prefix}-{asked or secrets.token_hex(12)}"
