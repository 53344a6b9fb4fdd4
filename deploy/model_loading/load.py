"""Load a model, in a worker process before it serves. Each step of a load is a module of this folder."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from compiler.frontend.errors import ModelError
from compiler.machine.target import Target
from deploy.cache import kept
from deploy.model_loading.abilities import embedding_note, embeds
from deploy.model_loading.costs import step_costs
from deploy.model_loading.facts import facts_of
from deploy.model_loading.graphs import prepare
from deploy.model_loading.modes import Mode
from deploy.model_loading.plan import Plan, plan_of
from deploy.model_loading.program import Compiled, compile_model, executable_cache
from deploy.model_loading.row_bits import trusted
from deploy.model_loading.servable import Progress, Servable, require_servable
from deploy.model_loading.serving import Served, serve
from deploy.model_loading.weights import bind
from deploy.use import remove_damaged
from deploy.verification import damage_of
from runtime.cache_groups import PAGE_SIZE
from runtime.device.registry import number_of
from runtime.errors import OutOfMemory, UnsafeCache
from runtime.session import Session
from server.engine.scheduling.pace import Pace
from server.engine.step_model import StepModel
from server.engine.worker import LoadedModel
from server.interfaces import LoadError
from server.messages import CachePages, ClassScores, ErrorCode, Load, PairPrompt, Ready


def load_model(load: Load, progress: Progress) -> LoadedModel:
    """Load a model from its source. Every expected failure is a LoadError whose message contains a remedy."""
    started = time.perf_counter()
    return load_servable(require_servable(load, progress), load, progress, started)


def load_servable(model: Servable, load: Load, progress: Progress, started: float) -> LoadedModel:
    """Load a model whose files are open. `started` is the value of time.perf_counter() when the load began."""
    mode = model.mode
    with _refusals():
        opened = _opened(model, model.target, load, progress)
        chosen = trusted(model.target, number_of(load.device), load.source)
        if chosen.target is not model.target:
            opened = _opened(model, chosen.target, load, progress)
        compiled, session, plan = opened.compiled, opened.session, opened.plan
        packed = bind(session, model, compiled, load, progress)
        served = serve(mode, session, [group.num_pages for group in plan.groups], session.memory)
        progress("warm-up", 0.0)
        prepare(session, compiled.executable)
        is_sound = served.answers()
    if not is_sound:
        raise LoadError(
            ErrorCode.LOAD_REFUSED, f"the results of {load.source} are not finite; its weights may be damaged: download them again"
        )
    progress("warm-up", 0.5)
    pace = None if served.step_model is None else _pace(served.step_model, compiled.key, session, load)
    progress("warm-up", 1.0)
    config = model.files.config
    embedding, classes, prompt = config.embedding, config.classes, config.pair_prompt
    ready = Ready(
        signature=compiled.key,
        cache_hit=compiled.cache_hit,
        max_context=_max_context(mode, served),
        context_note=_context_note(mode, _max_context(mode, served), model.files.config.max_context, load),
        num_pages=plan.num_pages,
        page_size=PAGE_SIZE,
        weights_bytes=plan.weights_bytes,
        arena_bytes=plan.arena_bytes,
        kv_cache_bytes=plan.kv_cache_bytes,
        graphs_bytes=plan.graphs_bytes,
        cache_groups=_cache_groups(plan, served),
        device_note=chosen.note,
        embedding_size=served.embedding_size if embeds(mode) else 0,
        embedding_note=embedding_note(mode),
        embeds_tokens=served.embeds_tokens and embeds(mode),
        generates=served.generates,
        normalize=embedding.normalize,
        prompts=embedding.prompts,
        default_prompt=embedding.default_prompt,
        classes=classes.names if classes else (),
        class_scores=ClassScores(classes.scores) if classes else ClassScores.SOFTMAX,
        pair_prompt=None if prompt is None else PairPrompt(**asdict(prompt)),
        card=session.device.card_usage,
        facts=facts_of(model.files),
        compile_s=compiled.compile_s,
        load_s=time.perf_counter() - started,
    )
    return LoadedModel(
        ready,
        served.step_model,
        served.embed_model,
        model.eos_ids,
        model.tokenizer_source.json() if served.generates else None,
        pace=pace,
        damage=partial(_damage, packed),
        card_usage=lambda: session.device.card_usage,
    )


@dataclass(frozen=True, slots=True)
class _Opened:
    compiled: Compiled
    session: Session
    plan: Plan


def _opened(model: Servable, target: Target, load: Load, progress: Progress) -> _Opened:
    """Compile the model for the target, open its device, and plan the memory. Raise LoadError if the model does not fit."""
    compiled = compile_model(model.module, executable_cache(), target, progress)
    assembled = None
    if (folder := kept()) is not None:
        folder.remember_model(compiled.key, load.source)
        assembled = folder.assembled_of(compiled.key)
    session = Session(compiled.executable, device_number=number_of(load.device), assembled=assembled)
    return _Opened(compiled, session, plan_of(compiled.executable, model.mode.entry, model.mode.pages(), load, session.device.limits))


@contextmanager
def _refusals() -> Generator[None]:
    """Turn errors of the model and of the machine into a LoadError."""
    try:
        yield
    except (ModelError, UnsafeCache) as error:
        raise LoadError(ErrorCode.LOAD_REFUSED, str(error)) from error
    # the plan fitted, but the memory is missing: another process took it, or memory_limit_bytes exceeds the machine's memory
    except OutOfMemory as error:
        text = f"{error}. The memory was free when the load was planned: unload other models, or lower memory_limit_bytes"
        raise LoadError(ErrorCode.INSUFFICIENT_MEMORY, text, error.required, error.free or 0) from error


def _cache_groups(plan: Plan, served: Served) -> tuple[CachePages, ...]:
    if served.step_model is None:
        return ()
    limits = served.step_model.limits
    most = (group.most_pages(limits.max_tokens) for group in limits.groups)
    return tuple(CachePages(of.num_pages, of.page_bytes, of.page_size, each) for of, each in zip(plan.groups, most, strict=True))


def _pace(model: StepModel, key: str, session: Session, load: Load) -> Pace:
    folder = kept()
    costs = step_costs(model, None if folder is None else folder.costs_of(key, session.num_threads))
    return Pace(model.limits.max_tokens, costs, load.max_gap_ms / 1000)


def _damage(packed: Path | None) -> str:
    """Verify the packed weights while the model keeps running. Return a description of the damage, and remove a damaged file."""
    fault = "" if packed is None else damage_of([packed])
    if packed is not None and fault:
        remove_damaged(packed, fault)
    return fault


def _context_note(mode: Mode, max_context: int, model_context: int, load: Load) -> str:
    if not mode.pages():
        return ""  # the context of an encoder is the one on which it was trained
    if max_context < mode.max_context:
        return f"context is {max_context} of {mode.max_context} tokens, which fill the KV cache; raise kv_cache_bytes to extend it"
    if load.max_context is None and max_context < model_context:
        return f"context is {max_context} tokens; the model supports {model_context}: raise max_context to extend it"
    return ""


def _max_context(mode: Mode, served: Served) -> int:
    """Return the longest context of one sequence. A small KV cache may limit it."""
    if served.step_model is None:
        return mode.max_context
    return served.step_model.limits.capacity
