"""Load a model, in a worker process before it serves, and describe it to the front."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from compiler.frontend.vision import Vision as Seeing
from deploy.model_loading.compiled import Compiled
from deploy.model_loading.costs import Timed
from deploy.model_loading.facts import facts_of
from deploy.model_loading.fingerprint import fingerprint_of
from deploy.model_loading.known import Asked, Progress, begin
from deploy.model_loading.stages import advance
from deploy.model_loading.weights import damage
from deploy.quality.label import kept_label
from deploy.stages.assemble import assemble, require_supported
from runtime.cache_groups import PAGE_SIZE
from runtime.units import in_units
from server.engine.worker import LoadedModel
from server.interfaces import LoadError
from server.messages import LOCAL, CachePages, ClassScores, Fit, Load, PairPrompt, QualityLabel, Ready, StageReport, Vision

log = logging.getLogger(__name__)


def load_model(load: Load, progress: Progress) -> LoadedModel:
    """Load a model from its source. Every expected failure is a LoadError whose message contains a remedy."""
    if load.stages:
        require_supported(load)
    begun, label = begin(load, progress), None
    if load.label and not load.restart:
        begun = advance(begun, Compiled)  # first, so that the measurement uses the program that is served
        label = kept_label(begun.cache, fingerprint_of(begun)) or _measured_label(load, progress)
    return loaded(begun, label)


def _measured_label(load: Load, progress: Progress) -> QualityLabel | None:
    """Measure the quality label. If that is impossible, log why and return None: the model can be served."""
    from deploy.quality.measure import quality_of  # only here, because its imports take time

    try:
        return quality_of(load, progress).label
    except LoadError as error:
        log.warning("%s has no quality label: %s", load.name, error.message)
        return None


def loaded(begun: Asked, label: QualityLabel | None = None) -> LoadedModel:
    """Run the stages that a load has left. `label` is its quality label, if the load asked for it."""
    begun, reports = assemble(begun) if begun.load.stages else (begun, ())
    known = advance(begun, Timed)
    session, packed = known.session, known.packed  # the model must not keep the other things that are known
    return LoadedModel(
        _ready(known, label, reports),
        known.step_model,
        known.embed_model,
        known.eos_ids,
        known.tokenizer_source.json() if known.mode.generates else None,
        pace=known.pace,
        relay=known.relay,
        damage=partial(damage, packed),
        card_usage=lambda: session.device.card_usage,
    )


def _ready(known: Timed, label: QualityLabel | None, stages: tuple[StageReport, ...]) -> Ready:
    config, plan, program, mode = known.files.config, known.plan, known.program, known.mode
    embedding, classes, prompt = config.embedding, config.classes, config.pair_prompt
    embedding_size = known.model.limits.embedding_size if known.embeds else 0
    fingerprint = fingerprint_of(known)
    here = [stage for stage in stages if stage.place == LOCAL] or [plan]  # what this machine's memory holds
    return Ready(
        signature=program.key,
        cache_hit=program.cache_hit,
        max_context=known.max_context,
        context_note=_context_note(known),
        num_pages=plan.num_pages,
        page_size=PAGE_SIZE,
        weights_bytes=sum(part.weights_bytes for part in here),
        arena_bytes=sum(part.arena_bytes for part in here),
        kv_cache_bytes=sum(part.kv_cache_bytes for part in here),
        graphs_bytes=plan.graphs_bytes,
        cache_groups=_cache_groups(known, stages),
        device_note=known.device_note,
        numeric_class=known.numeric_class,
        fingerprint=fingerprint,
        label=label or kept_label(known.cache, fingerprint),
        embedding_size=embedding_size,
        embedding_note=known.embedding_note,
        # An encoder's program pools the vectors of a text, so it has none per token.
        embeds_tokens=known.step_model is not None and embedding_size > 0,
        generates=mode.generates and config.hearing is None,
        num_hops=0 if config.hearing is None else config.hearing.num_hops,
        num_mels=0 if config.hearing is None else config.hearing.num_mels,
        vision=_vision_of(config.vision, mode.generates),
        normalize=embedding.normalize,
        prompts=embedding.prompts,
        default_prompt=embedding.default_prompt,
        classes=classes.names if classes else (),
        class_scores=ClassScores(classes.scores) if classes else ClassScores.SOFTMAX,
        pair_prompt=None if prompt is None else PairPrompt(**asdict(prompt)),
        card=known.session.device.card_usage,
        facts=facts_of(known.files),
        compile_s=program.compile_s,
        stages=stages,
        load_s=time.perf_counter() - known.began_s,
    )


def _vision_of(vision: Seeing | None, generates: bool) -> Vision | None:
    if vision is None or not generates:
        return None
    cutting = vision.cutting
    return Vision(
        crop_size=vision.crop_size,
        edge_tokens=vision.patches_per_edge // vision.merge,
        image_token=vision.image_token,
        fit=Fit(cutting.fit),
        filter=cutting.filter,
        longest_edge=cutting.longest_edge,
        splits=cutting.splits,
        most_crops=cutting.most_crops,
        least_pixels=cutting.least_pixels,
        most_pixels=cutting.most_pixels,
        marker=vision.marker,
        around=vision.around,
        between=vision.between,
    )


def _cache_groups(known: Timed, stages: Sequence[StageReport]) -> tuple[CachePages, ...]:
    if known.step_model is None:
        return ()
    limits = known.step_model.limits
    most = (group.most_pages(limits.max_tokens) for group in limits.groups)
    here = [stage.page_bytes for stage in stages if stage.place == LOCAL] or [[group.page_bytes for group in known.plan.groups]]
    return tuple(
        CachePages(of.num_pages, sum(page_bytes), of.page_size, each)
        for of, each, *page_bytes in zip(known.plan.groups, most, *here, strict=True)
    )


def _context_note(known: Timed) -> str:
    if known.step_model is None:
        return ""  # the context of an encoder is the one on which it was trained
    found, most, load = known.max_context, known.files.config.max_context, known.load
    asked = most if load.max_context is None else load.max_context
    if found >= asked:
        return ""
    size = in_units(known.plan.kv_cache_bytes)
    if found == known.mode.max_context:
        return f"context is {found} tokens, the longest default; the model supports {most}: set max_context to extend it"
    if load.kv_cache_bytes is not None:
        return f"context is {found} of {asked} tokens, which fill the KV cache of {size}; raise kv_cache_bytes to extend it"
    return f"context is {found} of {asked} tokens: the memory left for this model's KV cache is {size}; set kv_cache_bytes to extend it"
