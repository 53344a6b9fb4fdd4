"""The settings of a load, declared once. The front keeps them with a model (`server.models.state.ModelSpec`, which limits their values),
and a worker gets them in its first message (`server.messages.Load`)."""

from __future__ import annotations

import msgspec

MAX_GAP_MS = 1000  # default of `max_gap_ms`
# the smallest `max_context`, and the largest `max_batch`, `max_gap_ms` and `tensor_parallel`
LEAST_CONTEXT, MOST_SEQUENCES, LONGEST_GAP_MS, MOST_RANKS = 16, 4096, 3_600_000, 8


class LoadSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings of a load."""

    name: str  # name under which clients ask for the model
    source: str  # folder, file, or name on the hub
    quantize: str = "auto"  # number format of the weights in memory, such as 4bit; auto: chosen by the model and its files
    max_context: int | None = None  # None: the longest that the model and the memory allow
    max_batch: int = 64  # largest number of sequences in a step
    max_gap_ms: int = MAX_GAP_MS  # longest time of a step with decoding sequences: prompts are divided into smaller chunks to stay below it
    # bytes of the KV cache; a value below 1: the share of the memory that the other parts of the model leave; None: see `kv_share`
    kv_cache_bytes: int | float | None = None
    memory_limit_bytes: int | None = None  # set by the registry: bytes that are free when the load begins
    kv_dtype: str = "auto"  # type of the pages: f32, f16, bf16 or int8; auto: f32 if the weights are f32, else bf16
    numerics: str = "auto"  # portable: the same bits on all CPUs; fast: operands rounded for the machine's units; auto: by the weights
    target: str = "host"  # CPU or GPU architecture to generate code for
    device: str = "cpu"  # device that runs the code: cpu, cuda, cuda:1
    calibrate: str = ""  # path of the text by which a format such as 4bit is quantised; "": the built-in text
    reserved_bytes: int = 0  # set by the registry: free bytes that the KV cache must leave for models that are not loaded yet
    kv_share: float = 1.0  # set by the registry: share of the bytes left by other parts that the KV cache may use if kv_cache_bytes is None
    embeddings: bool = False  # serve embeddings of a model that generates text and was not trained for embeddings
    # The processes that compute the model's layers one after the other, in this order: LOCAL, or addresses of `relaxserve stage`. The last
    # one is this worker, which samples: LOCAL, or HEAD if it computes no layers. Empty: this worker computes all layers.
    stages: tuple[str, ...] = ()
    tensor_parallel: int = 1  # number of GPUs, from `device` on, over which the heads and matrices of each layer are divided
    label: bool = False  # measure the quality label (`server.messages.QualityLabel`) first, unless an earlier load did
