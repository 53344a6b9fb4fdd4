"""The interfaces of a loaded model and of its tokenizer, as the front uses them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, Self

from runtime.device.base import CardUsage
from server.defaults import Defaults
from server.messages import CacheChange, Embed, Embedding, ErrorCode, GivePages, PagesGiven, Progress, Ready, Stats, Submit, TokenEvent

if TYPE_CHECKING:
    from server.text.pairs import PairTemplate, TextTemplate

ProgressCallback = Callable[[Progress], None]


class LoadError(Exception):
    """Raised when loading fails. `required_bytes` and `free_bytes` are set if memory was the reason."""

    def __init__(self, code: ErrorCode, message: str, required_bytes: int = 0, free_bytes: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.required_bytes = required_bytes
        self.free_bytes = free_bytes


class RequestError(Exception):
    """Raised when one request fails in the worker, or when no worker can take it. Other requests continue. `retry_after_s`: seconds after
    which a new try may succeed; None: no such time is known."""

    def __init__(self, code: ErrorCode, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s


@dataclass(slots=True)
class Outage:
    """The time from a worker's death, or from the wake-up of a sleeping model, until another worker is ready. Points in time are those of
    the monotonic clock."""

    began_s: float
    patience_s: float  # seconds for which new requests wait for the end of the outage; after that they are refused until a worker is ready
    num_tries: int = 0  # tries to start a worker so far
    error: str | None = None  # reason why the last try failed; None: no try has failed
    next_try_s: float | None = None  # time of the next try; None before the first try and while a try is running

    @property
    def is_long(self) -> bool:
        """Whether the outage has lasted longer than new requests wait for its end."""
        return time.monotonic() - self.began_s > self.patience_s


class CacheListener(Protocol):
    """Listens to the changes of the prefix cache of one model's workers."""

    def changed(self, changes: Sequence[CacheChange], /) -> None:
        """Note that the prefix cache has changed."""
        ...

    def cleared(self) -> None:
        """Note that the worker has ended, and its prefix cache with it."""
        ...


class WorkerHandle(Protocol):
    """One loaded model, which runs in a process of its own."""

    stats: Stats | None  # the last report on the engine; None: the present worker has sent none yet, or there is no worker
    card: CardUsage | None  # the last report on the model's GPU; None while there is no worker, or if the model runs on a CPU
    restarts: int  # number of workers that were started in place of one that died
    resubmitted: int  # number of requests that ran in a worker when it died
    ready: Ready | None  # the last worker's `Ready` message; None: no worker has been ready yet
    ready_s: float  # monotonic time at which the last worker became ready
    outage: Outage | None  # the outage that has not ended; None: there is none
    before_wake: Callable[[], None]  # called before the model wakes up; raises RequestError if the memory does not suffice
    # called before a new worker serves, if its fingerprint differs from that of the worker before; raises LoadError if it must not serve
    before_change: Callable[[Ready], Awaitable[None]]

    @property
    def state(self) -> StrEnum:
        """Whether the worker loads, serves, restarts, sleeps, drains or has stopped."""
        ...

    @property
    def pid(self) -> int | None:
        """The process id of the worker, or None while there is no worker."""
        ...

    async def start(self) -> Ready:
        """Start the worker, and return its Ready message. Raise LoadError if the load fails."""
        ...

    def generate(self, submit: Submit, /) -> AsyncGenerator[TokenEvent, None]:
        """Generate, and yield the events of a request. A sleeping model wakes up first. Raise RequestError if the request fails."""
        ...

    def abort(self, request_id: str, choice: int, /) -> None:
        """End one choice of a request."""
        ...

    async def embed(self, embed: Embed, /) -> Embedding:
        """Return the vectors of a text or an image. A sleeping model wakes up first. Raise RequestError if the text or the image cannot be
        embedded."""
        ...

    def give(self, asked: GivePages, /) -> AsyncGenerator[PagesGiven, None]:
        """Yield the offer of the pages that another server asks for, then the pages."""
        ...

    async def sleep(self, *, keep: bool) -> None:
        """End the worker, and free its memory, until the next request or `wake`. `keep`: running requests continue when the model wakes up;
        otherwise they fail. Raise RequestError if the model cannot sleep now, for example because it is loading."""
        ...

    def wake(self) -> None:
        """Begin to start the worker of a sleeping model; do nothing in any other state. Raise RequestError if the memory does not
        suffice."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests, give the running ones `timeout_s` seconds to end, fail those that have not ended, and end the worker."""
        ...

    async def stop(self) -> None:
        """End the worker. Running requests fail."""
        ...


class GenerationDefaults(Protocol):
    """The sampling defaults that the model's authors recommend. None: no recommendation."""

    @property
    def origin(self) -> str | None: ...
    @property
    def do_sample(self) -> bool | None: ...
    @property
    def temperature(self) -> float | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def min_p(self) -> float | None: ...
    @property
    def typical_p(self) -> float | None: ...
    @property
    def repetition_penalty(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A compiled model on disk."""

    signature: str
    size_bytes: int
    used_at: float  # time of its last use, in seconds since 1970


class Renderer(Protocol):
    """Renders one chat template."""

    async def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, object],
    ) -> str: ...


class ChatTemplate(Protocol):
    """The chat template of a model."""

    @property
    def source(self) -> str: ...

    def renderer(self) -> Renderer:
        """Return an object that renders the template, for use by one event loop."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        variables: Mapping[str, object] | None = None,
    ) -> str: ...


class Tokenizer(Protocol):
    """The tokenizer of a model, with its chat template and the defaults that its files state. The class of the same name in
    `server/text/tokenizer.py` describes the members."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def pad_id(self) -> int | None: ...
    @property
    def special_texts(self) -> Mapping[int, bytes]: ...
    @property
    def max_token_chars(self) -> int: ...
    @property
    def chat_template(self) -> ChatTemplate | None: ...
    @property
    def generation_defaults(self) -> GenerationDefaults: ...
    @property
    def defaults(self) -> Defaults:
        """The defaults for requests, from the file beside the model (`server.defaults.BesideModel`)."""
        ...

    def with_template(self, source: str) -> Self:
        """Return this tokenizer with another chat template. Raise TemplateError if the template is broken."""
        ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def encode_all(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]: ...

    def count(self, text: str) -> int: ...

    @property
    def text_template(self) -> TextTemplate: ...

    @property
    def pair_template(self) -> PairTemplate: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...
