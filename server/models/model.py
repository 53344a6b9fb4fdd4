"""A model of this server as the front sees it: its specification, the memory it takes, and the objects that exist once it is loaded."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol

import msgspec
from typing_extensions import TypedDict

from server.audio.ears import Ears
from server.defaults import Defaults
from server.images.decoder import ImageDecoder
from server.images.sight import Sight
from server.interfaces import CachedModel, GenerationDefaults, Outage, ProgressCallback, Renderer, Tokenizer, WorkerHandle
from server.messages import Ready, Stats
from server.metrics import IDLE, UNUSED, ModelReading
from server.models.admission import Admission
from server.models.operations import Operation
from server.models.processes import Usage
from server.models.prompts import LatestPrompts
from server.models.state import ModelSpec
from server.speech.tokens import SpeechTokens
from server.text.dialects.dialect import Dialect
from server.text.media import Senses

# `MakeWorker` makes the worker of a model, and `LoadTokenizer` reads the tokenizer of a source.
MakeWorker = Callable[[ModelSpec, ProgressCallback], WorkerHandle]
LoadTokenizer = Callable[[str], Tokenizer]
Weigh = Callable[[ModelSpec], int]  # estimates the bytes of a model's weights without compiling anything; 0 if unknown
IsCached = Callable[[ModelSpec], bool]  # whether the compiled program and the packed weights of a source are probably stored
Identify = Callable[[str], str]  # returns a text that changes whenever the files of a source do; "" if unknown


# values with which sampling parameters have no effect: tokens are drawn with the probabilities that the model computes
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0}
SLEEPING = "sleeping"
SERVING = ("ready", "restarting", SLEEPING)  # a restarting worker keeps its requests, and a request wakes a sleeping worker


class ModelState(StrEnum):
    """The state of a model. A worker has further states: see `Model.condition`."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory that a load will take, as planned by the compiler."""

    weights_bytes: int
    arena_bytes: int  # memory for the intermediate values of a step
    kv_cache_bytes: int
    page_bytes: int  # bytes of one KV page
    cache_hit: bool = False  # the compiled model is stored on this machine already
    graphs_bytes: int = 0  # bytes of captured graphs, on a device that captures launches

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.arena_bytes + self.kv_cache_bytes + self.graphs_bytes


class MemoryUse(TypedDict):
    """The memory of a model. On a CPU, the KV cache takes memory only as it fills; on a GPU, it is allocated at load."""

    resident_bytes: int  # what the worker's processes hold, including the pages of packed weights that they map
    planned_bytes: int  # what the model takes without any request: weights, arena, graphs, and on a GPU the KV cache
    bound_bytes: int  # what the model takes at most, with a full KV cache


class CompileCache(Protocol):
    """The compiled models that are stored on this machine."""

    def entries(self) -> Sequence[CachedModel]:
        """Return the stored models."""
        ...

    def clear(self, *, keep: frozenset[str]) -> int:
        """Remove all compiled models but those in `keep`, and the stored data that only the removed models use. Return how many bytes were
        freed. Raise RuntimeFault if a file cannot be removed."""
        ...


@dataclass(frozen=True, slots=True)
class FormEstimate:
    """A format in which a model's weights can be served."""

    quantize: str
    weights_bytes: int  # estimated
    loss: float  # root mean square of the rounding error, relative to the root mean square of the weights


CompareForms = Callable[[str], Awaitable[Sequence[FormEstimate]]]  # compares the formats of a source; raises LoadError
Preflight = Callable[[ModelSpec], Awaitable[Footprint]]  # raises LoadError


def rfc3339(seconds: float) -> str:
    """Write a time, given in seconds since 1970, as RFC 3339 does."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def sampling_of(defaults: GenerationDefaults) -> dict[str, float]:
    """Return the sampling parameters that a model's files recommend. If the files turn sampling off (`do_sample` is false), the temperature
    is 0."""
    found = {name: getattr(defaults, name) for name in NEUTRAL}
    if defaults.do_sample is False:
        found["temperature"] = 0.0
    return {name: NEUTRAL[name] if value is None else value for name, value in found.items()}


class Use:
    """An object that a `Loaded` shares with its variants. Each request refers to the `Loaded` or variant that answers it. So after a model
    was replaced, its `Use` is freed when its last request has ended. `Replacements.retire` waits for this moment before it stops the
    worker."""


@dataclass(slots=True)
class Loaded:
    """The objects that exist once a model is ready."""

    worker: WorkerHandle
    ready: Ready
    tokenizer: Tokenizer
    dialect: Dialect
    admission: Admission
    renderer: Renderer | None  # renders the chat template; None if there is no template
    prompts: LatestPrompts = field(default_factory=LatestPrompts)
    speech: SpeechTokens | None = None  # tokens of transcripts; None if the model does not transcribe
    sight: Sight | None = None  # None: the model sees no images
    ears: Ears | None = None  # None: the model hears no audio in conversations
    image_decoder: ImageDecoder | None = None  # decodes images to embed; None: the model embeds no images
    defaults: Defaults = field(default_factory=Defaults)  # values for fields that requests leave out
    variants: dict[str, Loaded] = field(default_factory=dict)  # the same model with other defaults, by alias
    use: Use = field(default_factory=Use)

    @property
    def senses(self) -> Senses:
        """The object that writes images and recordings into prompts."""
        return Senses(tuple(sense for sense in (self.sight, self.ears) if sense is not None))

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the model, marked with the defaults. If the worker restarts with another fingerprint, because the model's
        files have changed, the model gets a new `Loaded`."""
        return self.defaults.mark(self.ready.fingerprint)

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling parameters of requests that set none."""
        return {**sampling_of(self.tokenizer.generation_defaults), **self.defaults.sampling}

    @property
    def sampling_note(self) -> str:
        """The default sampling parameters that have an effect, in words, and who chose them."""
        values = {name: value for name, value in self.sampling.items() if value != NEUTRAL.get(name) or name == "temperature"}
        origin = self.tokenizer.generation_defaults.origin
        chosen = len(values) > 1 or values["temperature"] != NEUTRAL["temperature"]
        who = f"the defaults of {origin}" if origin else "as its files recommend" if chosen else "its files recommend nothing"
        who = f"of its defaults; else {who}" if self.defaults.sampling else who
        return f"{', '.join(f'{name} {value:g}' for name, value in values.items())} ({who})"

    @property
    def chats(self) -> bool:
        """True if the model answers conversations. A model that generates and has no chat template only continues texts."""
        return self.ready.generates and self.renderer is not None


@dataclass(slots=True, eq=False)
class Model:
    """A model from the beginning of its load to its end."""

    spec: ModelSpec
    operation: Operation
    state: ModelState = ModelState.LOADING
    loaded: Loaded | None = None
    identity: str = ""  # result of `Identify` for the source when the load began; empty: not known, so another load reads the files again
    claim: ModelSpec | None = None  # the specification with the memory it may take, while the model loads
    swaps: bool = False  # when this model is loaded, unload models that lose their last alias to it
    is_cached: bool = False  # its program and its weights were stored by an earlier load, so it probably loads within seconds
    planned_bytes: int = 0  # bytes that the model will take, planned while it loads; 0 if unknown
    created: int = field(default_factory=lambda: int(time.time()))  # time when its load began, in seconds since 1970
    usage: Usage = UNUSED  # what the worker's processes used when they were measured last; `Measuring.measure` measures them
    measured_pid: int | None = None  # process id of the worker that was measured

    def measured(self, pid: int | None, usage: Usage) -> None:
        """Record the usage of the worker with this process id. The CPU time of one worker never decreases, because it is shown as a
        counter. A measurement may be lower than the one before, because it misses a child that ends after its parent was read. The next
        measurement includes the time of that child, unless its parent never waits for it."""
        before_s = self.usage.cpu_s if pid == self.measured_pid else 0.0
        self.usage, self.measured_pid = replace(usage, cpu_s=max(usage.cpu_s, before_s)), pid

    @property
    def pid(self) -> int | None:
        """The process id of the worker, or None while there is none."""
        return None if self.loaded is None else self.loaded.worker.pid

    @property
    def created_at(self) -> str:
        """The time of creation in RFC 3339 format."""
        return rfc3339(self.created)

    @property
    def bytes_by_part(self) -> dict[str, int]:
        """The bytes that each part of a loaded model takes; empty if it is not loaded, or sleeps."""
        if self.loaded is None or self.is_sleeping:
            return {}
        ready = self.loaded.ready
        graphs = {"graphs": ready.graphs_bytes} if ready.graphs_bytes else {}
        return {"weights": ready.weights_bytes, "arena": ready.arena_bytes, "kv_cache": ready.kv_cache_bytes, **graphs}

    @property
    def total_bytes(self) -> int:
        """The bytes that the model takes, or will take according to its plan. A sleeping model takes none."""
        return 0 if self.is_sleeping else sum(self.bytes_by_part.values()) or self.planned_bytes

    @property
    def memory(self) -> MemoryUse:
        """The memory of the model: what it held when it was measured last, what it takes without any request, and what it takes at
        most."""
        parts = self.bytes_by_part
        bound_bytes = sum(parts.values())
        return {
            "resident_bytes": self.usage.own_bytes + self.usage.mapped_bytes,
            "planned_bytes": bound_bytes - (parts.get("kv_cache", 0) if self.cache_grows else 0),
            "bound_bytes": bound_bytes,
        }

    @property
    def cache_grows(self) -> bool:
        """Whether the KV cache takes memory only as it fills. A GPU allocates it at load."""
        return self.spec.device == "cpu"

    @property
    def condition(self) -> str:
        """The state of the worker if the model is ready, otherwise the state of the model."""
        if self.state is ModelState.READY and self.loaded is not None:
            return self.loaded.worker.state.value
        return self.state.value

    @property
    def is_sleeping(self) -> bool:
        """True while the model's worker has ended to free memory. The next request restarts it."""
        return self.condition == SLEEPING

    @property
    def num_requests(self) -> int:
        """The number of requests that wait for the model or are being answered."""
        return 0 if self.loaded is None else self.loaded.admission.num_requests

    @property
    def outage(self) -> Outage | None:
        """The outage of the model's worker, if it has ended and does not run again yet."""
        return None if self.loaded is None else self.loaded.worker.outage

    @property
    def is_serving(self) -> bool:
        """True if new requests are answered, at once or after a restart that should be short."""
        return self.condition in SERVING and not (self.outage is not None and self.outage.is_long)

    @property
    def stats(self) -> Stats:
        """The worker's last report on the engine. Until a worker has sent a report, all admitted sequences are counted as waiting, so that
        a router does not mistake a server whose worker restarts or sleeps for an idle one. An encoder's worker sends no reports; while it
        serves, no sequences are counted as waiting."""
        if self.loaded is None:
            return IDLE
        worker, admission = self.loaded.worker, self.loaded.admission
        if worker.stats is not None:
            return worker.stats
        is_encoding = not self.loaded.ready.num_pages and worker.outage is None and not self.is_sleeping
        return msgspec.structs.replace(IDLE, num_waiting=0 if is_encoding else admission.num_sequences)

    @property
    def reading(self) -> ModelReading:
        """The model's figures for a scrape of the metrics. Its processes are measured before each scrape."""
        if self.loaded is None:
            return ModelReading(self.spec.name, self.state)
        worker, ready = self.loaded.worker, self.loaded.ready
        cache = {"block_size": ready.page_size, "num_gpu_blocks": ready.num_pages, "cache_dtype": self.spec.kv_dtype}
        return ModelReading(
            self.spec.name,
            self.condition,
            self.stats,
            worker.restarts,
            worker.resubmitted,
            self.bytes_by_part,
            {**{name: str(value) for name, value in cache.items()}, "enable_prefix_caching": "True"},
            self.usage,
            worker.card,
        )


@dataclass(frozen=True, slots=True)
class Unloaded:
    """What unloading a model has freed."""

    name: str
    freed_bytes: int  # memory that the model took: the sum of its planned parts
    resident_before_bytes: int  # memory of this process and its workers, as the kernel counts it
    resident_after_bytes: int
