"""A model of this server from the outside: how it is asked for, what it takes, and what exists once it is loaded."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol

from server.interfaces import CachedModel, Outage, ProgressCallback, Tokenizer, WorkerHandle
from server.messages import Ready
from server.metrics import IDLE, UNUSED, ModelReading
from server.models.admission import Admission
from server.models.operations import Operation
from server.models.processes import usage_of
from server.models.state import ModelSpec
from server.text.dialect import Dialect
from server.text.templates.renderer import Renderer

MakeWorker = Callable[[ModelSpec, ProgressCallback], WorkerHandle]
LoadTokenizer = Callable[[str], Tokenizer]
Weigh = Callable[[ModelSpec], int]  # about what its weights take, without compiling anything; 0 where nobody can tell
Identify = Callable[[str], str]  # what a source holds right now, told by a text that changes with it; "" where nobody can tell


SLEEPING = "sleeping"
SERVING = ("ready", "restarting", SLEEPING)  # a worker that restarts keeps its requests, and one that sleeps is woken by them


class ModelState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory a load will take, from the compiler's plan."""

    weights_bytes: int
    arena_bytes: int
    kv_cache_bytes: int
    page_bytes: int  # of one KV page
    cache_hit: bool = False
    graphs_bytes: int = 0  # of a device that captures launches

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.arena_bytes + self.kv_cache_bytes + self.graphs_bytes


class CompileCache(Protocol):
    def entries(self) -> Sequence[CachedModel]: ...

    def clear(self, *, keep: frozenset[str]) -> int:
        """Remove what is not in `keep`; the bytes that gave."""
        ...


Preflight = Callable[[ModelSpec], Awaitable[Footprint]]  # raises LoadError


@dataclass(slots=True, weakref_slot=True)
class Loaded:
    """What exists once a model is ready."""

    worker: WorkerHandle
    ready: Ready
    tokenizer: Tokenizer
    dialect: Dialect
    admission: Admission
    renderer: Renderer | None  # of its chat template, if it has one


@dataclass(slots=True, eq=False)
class Model:
    spec: ModelSpec
    operation: Operation
    state: ModelState = ModelState.LOADING
    loaded: Loaded | None = None
    identity: str = ""  # of the source, when its load began
    claim: ModelSpec | None = None  # while it loads: what its worker was told to load, and in how much memory
    swaps: bool = False  # models that lose their last alias to it are unloaded
    planned_bytes: int = 0  # what it will take, if that was asked before it was there
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def created_at(self) -> str:
        """As RFC 3339 writes it."""
        return datetime.fromtimestamp(self.created, UTC).isoformat().replace("+00:00", "Z")

    @property
    def bytes_by_part(self) -> dict[str, int]:
        if self.loaded is None or self.is_sleeping:
            return {}
        ready = self.loaded.ready
        graphs = {"graphs": ready.graphs_bytes} if ready.graphs_bytes else {}
        return {"weights": ready.weights_bytes, "arena": ready.arena_bytes, "kv_cache": ready.kv_cache_bytes, **graphs}

    @property
    def total_bytes(self) -> int:
        return 0 if self.is_sleeping else sum(self.bytes_by_part.values()) or self.planned_bytes

    @property
    def condition(self) -> str:
        """The model's state, or its worker's where that says more."""
        if self.state is ModelState.READY and self.loaded is not None:
            return self.loaded.worker.state.value
        return self.state.value

    @property
    def is_sleeping(self) -> bool:
        """Its worker has given its memory back until a request comes."""
        return self.condition == SLEEPING

    @property
    def outage(self) -> Outage | None:
        return None if self.loaded is None else self.loaded.worker.outage

    @property
    def is_serving(self) -> bool:
        """New requests are answered, if need be after a restart that is not to take long."""
        return self.condition in SERVING and not (self.outage is not None and self.outage.is_long)

    @property
    def reading(self) -> ModelReading:
        """What a scrape shows."""
        if self.loaded is None:
            return ModelReading(self.spec.name, self.state)
        worker, ready = self.loaded.worker, self.loaded.ready
        cache = {"block_size": ready.page_size, "num_gpu_blocks": ready.num_pages, "cache_dtype": self.spec.kv_dtype}
        return ModelReading(
            self.spec.name,
            self.condition,
            worker.stats or IDLE,
            worker.restarts,
            worker.resubmitted,
            self.bytes_by_part,
            {**{name: str(value) for name, value in cache.items()}, "enable_prefix_caching": "True"},
            UNUSED if worker.pid is None else usage_of(worker.pid),
            ready.num_graphs,
        )


@dataclass(frozen=True, slots=True)
class Unloaded:
    name: str
    freed_bytes: int  # by the plan
    resident_before_bytes: int  # of this process and its workers, as the kernel counts
    resident_after_bytes: int
