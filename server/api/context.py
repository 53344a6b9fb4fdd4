"""Describe what endpoints use: the parts of the server (`Context`), and the sender of a request (`Caller`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from starlette.requests import Request
from starlette.types import Message, Receive

from server.api.request.fields import Options, check_unknown
from server.batches.service import Batches
from server.history import History
from server.http.auth import Access
from server.http.kept_requests import KeptRequests
from server.http.keys import UNLIMITED, KeyLimits
from server.http.proxies import PREFIX
from server.http.record import RequestRecord
from server.isolated.held import HeldBytes
from server.metrics import Metrics, ModelSeries
from server.models.model import Loaded, Model
from server.models.registry import Registry
from server.models.visible import VisibleModels
from server.open_values import new_hex
from server.settings import ServerSettings


async def stays() -> Message:
    """Wait forever, as when receiving from a client that neither leaves nor sends more."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets the event")


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, and its time of arrival. The gateway makes a `Caller` for each request."""

    request_id: str
    key_digest: str = ""  # digest of the API key, for fairness between keys; empty if the request has no key
    access: Access = Access.KEY  # access level that the request's path requires
    arrived_s: float = field(default_factory=time.monotonic)  # time of the monotonic clock
    num_body_bytes: int = 0  # 0 also for an upload, whose body is read as it arrives, and for a path whose body is never read
    record: RequestRecord = field(default_factory=lambda: RequestRecord(""))
    tenant: str = ""  # requests of one tenant may reuse each other's cached state; a key's digest, a group of keys, or "" without keys
    is_admin: bool = False  # the request may also use the administration
    is_idle: bool = False  # the request is a line of a batch, which gets only the capacity that other requests leave free
    limits: KeyLimits = UNLIMITED  # what the caller's key may use
    # fingerprint that the model must have, so that it continues an answer of another server with the same bytes; "" and "*" allow any model
    expects: str = ""
    # counts one more request toward the rates of the key, and returns the key's present limits; raises ApiError if the key no longer exists
    # or exceeds a rate
    readmit: Callable[[], KeyLimits] = lambda: UNLIMITED
    receive: Receive = stays  # returns the client's next message: a piece of an upload, a message of a WebSocket, or its disconnection
    has_begun: bool = False  # the caller of a later part of a request (see `parts`), whose first part was admitted

    @property
    def quota_key(self) -> str:
        """Return the name under which quotas count the caller's key, or "" on a server without API keys."""
        return self.key_digest if self.tenant else ""

    def parts(self) -> Iterator[Caller]:
        """Yield a caller for each part of a request that needs several generations, without end. The first caller is `self`. Each later
        caller has `has_begun`, and its time of arrival is the time when it is taken from the iterator."""
        yield self
        while True:
            yield replace(self, arrived_s=time.monotonic(), has_begun=True)

    def salt(self, asked: str | None = None) -> str:
        """Return the salt of cached state: the tenant, combined with the salt that the request asks for. No tenant contains a colon, so
        different tenants have different salts."""
        return f"{self.tenant}:{asked or ''}" if self.tenant else asked or ""


@dataclass(frozen=True, slots=True)
class Context:
    """The server's parts that endpoints use."""

    settings: ServerSettings
    registry: Registry
    batches: Batches
    history: History
    held_audio: HeldBytes  # counts the bytes of the audio samples that all transcriptions hold together
    kept: KeptRequests | None = None  # stores requests; None: the server was started without a file for them

    @property
    def metrics(self) -> Metrics:
        return self.registry.metrics

    def models_for(self, request: Request) -> VisibleModels:
        """Return the models that the caller may use. Endpoints for clients find the model of a request by this method, not in the registry,
        because the registry does not check the limits of keys."""
        return VisibleModels(self.registry, caller(request).limits)

    def serve(self, request: Request, name: str | None, *, has_begun: bool = False) -> tuple[Model, Loaded]:
        """Return the model that answers a request. Raise ApiError if the caller may use no model of this name, or if the model is not
        ready. `has_begun`: the request is a later part of one that was begun, and is answered even while the server stops."""
        return self.models_for(request).serve(name, has_begun=has_begun)

    def begin(self, request: Request, body: Options, name: str | None) -> tuple[Model, Loaded, list[str]]:
        """Return the model that answers a request, and the names of the fields of its body that are ignored. Raise ApiError as `serve` and
        `check_unknown` do."""
        ignored = check_unknown(body, strict=self.settings.strict)
        return *self.serve(request, name), ignored

    def metrics_of(self, model: str) -> ModelSeries:
        """Return the metric series of a model."""
        return self.metrics.of(model)


def caller(request: Request) -> Caller:
    """Return the sender of a request."""
    return request.scope["relaxserve.caller"]


def path_for(request: Request, path: str) -> str:
    """Return the path by which the client reaches `path` of this server: with the prefix, if any, that a proxy left in the path of the
    request."""
    return request.scope[PREFIX] + path


def answer_id(prefix: str, asked: str | None) -> str:
    """Return the id of an answer: the prefix, then the id that the request asked for or a new one."""
    return f"{prefix}-{asked or new_hex(prefix, 12)}"
