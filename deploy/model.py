"""A folder of model files becomes a model that runs: read, compile or find in the cache, prepare weights, size the KV cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from compiler.bind import bind_weights
from compiler.cache import Cache, key_of, signature
from compiler.frontend.config import ModelConfig, load_config
from compiler.frontend.decoder import ENTRY, UNUSED, StepBounds, build_step
from compiler.frontend.errors import ModelError
from compiler.frontend.models.registry import CAUSAL
from compiler.frontend.nn import WeightFormat
from compiler.frontend.weights import open_safetensors
from compiler.ir.dtypes import DType
from compiler.ir.module import IRModule
from compiler.target import host
from deploy.fetch import local_folder
from deploy.plan import CACHE_DTYPE, plan_of
from runtime import flags
from runtime.executable import Executable
from runtime.kv_pool import KVLayout, KVPool
from runtime.memory import MemoryAccount
from runtime.session import Session
from runtime.step import PAGE_SIZE, StepBatch, StepLimits
from server.engine.process import LoadedModel
from server.handle import LoadError
from server.messages import Load, Ready
from server.text.tokenizer import Tokenizer

Progress = Callable[[str, float], None]

MAX_STEP_TOKENS = 512  # of one step: what the arena is planned for
DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Compiled:
    executable: Executable
    signature: str
    key: str
    cache_hit: bool
    compile_s: float


def bounds_for(config: ModelConfig, load: Load) -> StepBounds:
    context = min(config.max_context, load.max_context or DEFAULT_CONTEXT)
    return StepBounds(max_tokens=max(MAX_STEP_TOKENS, load.max_batch), max_seqs=load.max_batch, max_context=context)


def compile_model(module: IRModule, cache: Cache | None) -> Compiled:
    key = key_of(module, host().key)
    found = cache.find(key) if cache is not None else None
    started = time.perf_counter()
    executable = _compiled(module) if found is None else found
    elapsed = 0.0 if found is not None else time.perf_counter() - started
    if found is None and cache is not None:
        cache.store(key, executable)
    return Compiled(executable, signature(module, ENTRY), key.digest, found is not None, elapsed)


def _compiled(module: IRModule) -> Executable:
    from compiler.driver import compile_module  # a start from the cache needs no compiler, and is quicker for not reading it

    return compile_module(module)


class CompiledModel:
    """A causal model, ready to step."""

    def __init__(self, session: Session, pool: KVPool, limits: StepLimits) -> None:
        self._session = session
        self._pool = pool
        self._limits = limits
        self._cache = pool.data.reshape(*pool.data.shape[:4], -1)

    @property
    def limits(self) -> StepLimits:
        return self._limits

    @property
    def busy_s(self) -> float:
        """Seconds in kernels so far."""
        return self._session.busy_s

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        lengths = np.diff(batch.query_starts)
        seq_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        return self._session.call(
            ENTRY, batch.tokens, batch.positions, batch.slots, seq_ids, batch.page_tables, batch.logit_rows, self._cache
        )

    def copy_page(self, source: int, target: int) -> None:
        self._pool.copy_page(source, target)


def load_model(load: Load, progress: Progress) -> LoadedModel:
    """What a worker does first. Every failure is a LoadError that says what to do."""
    started = time.perf_counter()
    progress("fetch", 0.0)
    folder = local_folder(load.source)
    progress("verify", 0.0)
    try:
        config = load_config(folder)
        source = open_safetensors(folder)
    except ModelError as error:
        raise LoadError("invalid_model", str(error)) from error
    if config.family not in CAUSAL:
        raise LoadError("unsupported_model", f"{folder} is a {config.family}; known causal families: {', '.join(CAUSAL)}")
    bounds = bounds_for(config, load)
    dtypes = {name: DType.from_numpy(np.dtype(info.dtype)) for name, info in source.tensors.items()}
    module = build_step(config, CAUSAL[config.family], dtypes, bounds, DType(CACHE_DTYPE), WeightFormat.parse(load.quantize))
    progress("compile", 0.0)
    switches = flags.current()
    compiled = compile_model(module, None if switches.no_cache else Cache(switches.cache / "executables"))
    progress("compile", 1.0)
    plan = plan_of(compiled.executable, config, bounds, load)
    account = MemoryAccount()
    session = Session(compiled.executable, memory=account, pinned=False)
    progress("pack", 0.0)
    kept = None if switches.no_cache else switches.cache / "weights" / f"{compiled.key}-{source.digest()[:32]}.rsw"
    weights_bytes = bind_weights(session, compiled.executable, ENTRY, source, UNUSED, kept)
    progress("pack", 1.0)
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, CACHE_DTYPE)
    pool = KVPool(layout, plan.num_pages, account)
    limits = StepLimits(config.vocab_size, bounds.max_context, bounds.max_tokens, bounds.max_seqs, plan.num_pages)
    model = CompiledModel(session, pool, limits)
    tokenizer = Tokenizer.from_dir(folder)
    ready = Ready(
        signature=compiled.key,
        cache_hit=compiled.cache_hit,
        max_context=bounds.max_context,
        num_pages=plan.num_pages,
        page_size=PAGE_SIZE,
        weights_bytes=weights_bytes,
        arena_bytes=plan.arena_bytes,
        kv_cache_bytes=plan.kv_cache_bytes,
        compile_s=compiled.compile_s,
        load_s=time.perf_counter() - started,
    )
    return LoadedModel(ready, model, None, tokenizer.eos_ids, tokenizer.to_json())
