"""The JSON shapes of the administration's answers: under our own paths, and under the paths of Triton and llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from server.api.answer.shapes import ModelEntry, Restarting
from server.interfaces import CachedModel
from server.models.budget import Evictable
from server.models.model import MemoryUse
from server.models.operations import OperationReport


class Pages(TypedDict):
    """The pages of a model's KV cache."""

    total: int
    used: int
    tokens: int  # tokens per page


class RestartReport(Restarting):
    """A restart, and the reason why the last attempt failed."""

    error: str | None  # None: no attempt has failed


class StageEntry(TypedDict):
    """A process that computes some layers of a model, and the bytes that weights, arena and KV cache take in this process."""

    place: str  # "local", or the address of the host
    layers: Sequence[int]  # indices of the first and the last layer of the process; empty: it has no layers
    bytes: Mapping[str, int]


class ModelReport(ModelEntry):
    """A model as the administration shows it."""

    state: str
    source: str
    quantize: str
    numerics: str
    target: str
    device: str
    pin: bool  # the model is unloaded only with `force`
    bytes: Mapping[str, int]  # planned bytes by part, such as "weights"; on a CPU, the KV cache takes memory as it fills
    memory: MemoryUse
    operation: str  # id of the operation that loads the model, or has loaded it
    pages: NotRequired[Pages]
    cache_hit: NotRequired[bool]  # the load found the compiled program in the cache
    context_note: NotRequired[str]  # reason why the context is shorter than the model allows
    device_note: NotRequired[str]  # reason why the code is compiled for a target other than the one that the load names
    numeric_class: NotRequired[str]  # models of one class compute the same bits, if program and weights are the same
    system_fingerprint: NotRequired[str]  # the `system_fingerprint` of the model's answers
    graphs: NotRequired[int]  # number of CUDA graphs that were captured at load
    devices: NotRequired[Sequence[str]]  # the GPUs over which the model is divided, if there are several; `bytes` are per GPU
    stages: NotRequired[Sequence[StageEntry]]  # the processes that compute the layers one after the other, if there are several
    compile_s: NotRequired[float]
    load_s: NotRequired[float]
    restarts: NotRequired[int]  # workers that were started in place of one that died
    restarting: NotRequired[RestartReport]
    resubmitted: NotRequired[int]  # requests that ran in a worker when the worker died
    tool_parser: NotRequired[str]  # name of the format in which calls and thoughts are parsed
    reasoning: NotRequired[bool]  # whether the model writes thoughts
    running: NotRequired[int]  # sequences that the worker runs
    waiting: NotRequired[int]


class ModelReports(TypedDict):
    """All models, and the loads that have failed."""

    object: Literal["list"]
    data: Sequence[ModelReport]
    failed: Sequence[OperationReport]  # for each model that failed to load, the operation of its last load


class OfferedModel(TypedDict):
    """A model below the model root that may be loaded. `loaded_as`: names under which the model is loaded already."""

    source: str
    bytes: int
    modified_at: float
    loaded_as: Sequence[str]


class Offers(TypedDict):
    """The models below the model root that may be loaded."""

    object: Literal["list"]
    model_root: str
    data: Sequence[OfferedModel]


class Form(TypedDict):
    """A format in which a model can be served."""

    quantize: str
    weights_bytes: int  # estimated
    loss: float  # root mean square of the rounding error, relative to the root mean square of the weights


class Forms(TypedDict):
    """The formats in which a source can be served."""

    object: Literal["list"]
    source: str
    cached: bool  # a load has probably stored the source's program and weights
    data: Sequence[Form]


class FinishedLoad(OperationReport):
    """The operation of a load that has succeeded, and the model."""

    result: ModelReport


class Plan(TypedDict):
    """The memory that a load would take."""

    object: Literal["dry_run"]
    model: str
    required_bytes: int
    free_bytes: int | None  # None: there is no limit, or the model runs on a GPU
    fits: Literal[True]  # always true: a load that does not fit is refused with 507
    weights_bytes: int
    arena_bytes: int
    kv_cache_bytes: int
    graphs_bytes: int
    page_bytes: int  # bytes of one KV page
    cache_hit: bool  # the cache has the compiled program


class OperationReports(TypedDict):
    object: Literal["list"]
    data: Sequence[OperationReport]


class Memory(TypedDict):
    """The budget of host memory. `used_bytes` is what the models take, or will take once they are loaded, and `free_bytes` is what is left
    of the limit; both fields count planned bytes. `resident_bytes` is the memory that the server's processes occupy. `models` has the
    planned bytes of each part of each model, and `evictable` has the models that may be unloaded."""

    limit_bytes: int | None  # None: there is no limit, so that `free_bytes` is None, too
    used_bytes: int
    free_bytes: int | None
    resident_bytes: int
    models: Mapping[str, Mapping[str, int]]
    evictable: Sequence[Evictable]


class CachedModels(TypedDict):
    object: Literal["list"]
    data: Sequence[CachedModel]


class Freed(TypedDict):
    """How many bytes an endpoint has freed."""

    freed_bytes: int


class TritonModel(TypedDict):
    """A model in Triton's list."""

    name: str
    version: str
    state: str
    reason: str


class LlamaDone(TypedDict):
    """llama.cpp's answer to load and unload."""

    success: Literal[True]


class TritonUnloaded(TypedDict):
    """Triton's answer to unload."""

    status: Literal["success"]
    model: str


class LlamaStatus(TypedDict):
    """The state of a model in llama.cpp's list."""

    value: str
    failed: NotRequired[bool]
    exit_code: NotRequired[int]


class LlamaModel(TypedDict):
    """A model in llama.cpp's list."""

    id: str
    object: Literal["model"]
    status: LlamaStatus


class LlamaModels(TypedDict):
    object: Literal["list"]
    data: Sequence[LlamaModel]
