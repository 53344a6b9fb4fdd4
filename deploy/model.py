"""A folder of model files becomes a model that runs: read, compile or find in the cache, prepare weights, size the KV cache."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from compiler.bind import bind_weights
from compiler.cache import Cache
from compiler.frontend.errors import ModelError
from compiler.ir.module import IRModule
from compiler.machine.target import Target
from compiler.signature import key_of, signature
from deploy.cache import kept
from deploy.kinds import Kind, Served
from deploy.plan import plan_of
from deploy.servable import Progress, Servable, require_servable
from deploy.use import begin_use, remove_damaged
from deploy.verification import damage_of
from runtime.executable import Executable
from runtime.memory import MemoryAccount
from runtime.session import Session
from runtime.step import PAGE_SIZE
from server.engine.process import LoadedModel
from server.handle import LoadError
from server.messages import Load, Ready


def silent(stage: str, fraction: float) -> None:
    """For those who do not watch."""


@dataclass(frozen=True, slots=True)
class Compiled:
    executable: Executable
    signature: str
    key: str
    cache_hit: bool
    compile_s: float


def compile_model(module: IRModule, cache: Cache | None, target: Target, progress: Progress = silent) -> Compiled:
    progress("compile", 0.0)
    entry = next(iter(module.graph_functions))  # the step; what stands beside it works on its results
    key = key_of(module, target.key)
    found = cache.find(key) if cache is not None else None
    started = time.perf_counter()
    executable = _compiled(module, target, progress) if found is None else found
    elapsed = 0.0 if found is not None else time.perf_counter() - started
    if found is None and cache is not None:
        with _kept_in(cache.folder):
            cache.store(key, executable)
    progress("compile", 1.0)
    return Compiled(executable, signature(module, entry), key.digest, found is not None, elapsed)


def _compiled(module: IRModule, target: Target, progress: Progress) -> Executable:
    from compiler.driver import Options, compile_module  # a start from the cache needs no compiler, and is quicker for not reading it

    return compile_module(module, Options(target, progress=lambda fraction: progress("compile", fraction)))


def load_model(load: Load, progress: Progress) -> LoadedModel:
    """What a worker does first. Every failure is a LoadError that says what to do."""
    started = time.perf_counter()
    return load_servable(require_servable(load, progress), load, progress, started)


def load_servable(model: Servable, load: Load, progress: Progress, started: float) -> LoadedModel:
    """`started`: when the load began, by `time.perf_counter`."""
    files, kind = model.files, model.kind
    try:
        compiled = compile_model(model.module, executable_cache(), model.target, progress)
        plan = plan_of(compiled.executable, kind.entry, kind.pages(), load)
        account = MemoryAccount()
        session = Session(compiled.executable, memory=account, pinned=False)
        progress("pack", 0.0)
        folder = kept()
        packed = None
        if folder is not None:
            place = folder.weights_of(compiled.key, files.weights.digest())
            with _kept_in(place.parent):
                packed = begin_use(place, verify=load.verify, restart=load.restart, progress=partial(progress, "verify"))
        with nullcontext() if packed is None else _kept_in(packed.parent):
            bind_weights(session, compiled.executable, kind.entry, files.weights, packed, partial(progress, "pack"))
    except ModelError as error:
        raise LoadError("load_refused", str(error)) from error
    served = kind.serve(session, plan, account)
    progress("warm-up", 0.0)
    if not served.answers():
        raise LoadError("load_refused", f"what {load.source} computes is not finite; are its weights damaged? Download them again")
    progress("warm-up", 1.0)
    embedding = files.config.embedding
    ready = Ready(
        signature=compiled.key,
        cache_hit=compiled.cache_hit,
        max_context=_max_context(kind, served),
        num_pages=plan.num_pages,
        page_size=PAGE_SIZE,
        weights_bytes=plan.weights_bytes,
        arena_bytes=plan.arena_bytes,
        kv_cache_bytes=plan.kv_cache_bytes,
        embedding_size=served.embedding_size,
        generates=served.generates,
        normalize=embedding.normalize,
        prompts=embedding.prompts,
        default_prompt=embedding.default_prompt,
        compile_s=compiled.compile_s,
        load_s=time.perf_counter() - started,
    )
    return LoadedModel(
        ready, served.step_model, served.embed_model, model.tokenizer.eos_ids, model.tokenizer.to_json(), damage=partial(_damage, packed)
    )


def _damage(packed: Path | None) -> str:
    """What is wrong with the packed weights, after reading them beside the running model; they are gone then."""
    fault = "" if packed is None else damage_of([packed])
    if packed is not None and fault:
        remove_damaged(packed, fault)
    return fault


def _max_context(kind: Kind, served: Served) -> int:
    """Of one sequence, should the KV cache be smaller than that."""
    if served.step_model is None:
        return kind.max_context
    return min(kind.max_context, (served.step_model.limits.num_pages - 1) * PAGE_SIZE)


@contextmanager
def _kept_in(folder: Path) -> Generator[None]:
    """A disk that is full, or that may only be read, is for its owner to mend."""
    try:
        yield
    except OSError as error:
        remedy = "make room there, name another folder by RELAXSERVE_CACHE, or keep nothing by RELAXSERVE_NO_CACHE=1"
        raise LoadError("load_failed", f"the cache {folder} cannot be used: {error.strerror or error}; {remedy}") from error


def executable_cache() -> Cache | None:
    folder = kept()
    return None if folder is None else folder.executables
