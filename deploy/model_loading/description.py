"""The last stage of a load: describe the model to the front."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

from compiler.frontend.audio import Listening as Audio
from compiler.frontend.vision import Vision as Seeing
from deploy.model_loading.costs import Timed
from deploy.model_loading.facts import facts_of
from deploy.model_loading.fingerprint import fingerprint_of
from deploy.model_loading.known import carried
from deploy.model_loading.modes import Encoder
from deploy.quality.label import kept_label
from runtime.cache_groups import PAGE_SIZE
from runtime.units import in_units
from server.messages import HEAD, LOCAL, CachePages, Listening, Ready, Vision
from server.scoring import ClassScores, PairPrompt


@dataclass(frozen=True, kw_only=True, eq=False)
class Described(Timed):
    """The state of a load once the front can be told about the model."""

    ready: Ready


def describe(known: Timed) -> Described:
    return Described(**carried(known, Timed), ready=_ready(known))


def _ready(known: Timed) -> Ready:
    """Return the message that describes the model to the front."""
    config, plan, program, mode = known.files.config, known.plan, known.program, known.mode
    embedding, classes, prompt = config.embedding, config.classes, config.pair_prompt
    embedding_size = known.model.limits.embedding_size if known.embeds else 0
    fingerprint = fingerprint_of(known)
    here = [stage for stage in known.reports if stage.place in (LOCAL, HEAD)] or [plan]  # the parts in this machine's memory
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
        cache_groups=_cache_groups(known),
        device_note=known.device_note,
        numeric_class=known.numeric_class,
        fingerprint=fingerprint,
        label=known.label or kept_label(known.cache, fingerprint),
        embedding_size=embedding_size,
        embedding_note=known.embedding_note,
        # An encoder pools the vectors of a text within its program, so it returns no vector per token.
        embeds_tokens=known.step_model is not None and embedding_size > 0,
        generates=mode.generates and config.hearing is None,
        num_hops=0 if config.hearing is None else config.hearing.num_hops,
        num_mels=0 if config.hearing is None else config.hearing.num_mels,
        vision=_vision_of(config.vision) if mode.generates or isinstance(mode, Encoder) else None,
        listening=listening_of(config.listening) if mode.generates else None,
        left_out=config.left_out,
        padded_to=config.max_context if config.encoder is not None and config.encoder.is_padded else 0,
        normalize=embedding.normalize,
        prompts=embedding.prompts,
        default_prompt=embedding.default_prompt,
        classes=classes.names if classes else (),
        class_scores=ClassScores(classes.scores) if classes else ClassScores.SOFTMAX,
        pair_prompt=None if prompt is None else PairPrompt(**asdict(prompt)),
        card=known.session.device.card_usage,
        facts=facts_of(known.files),
        compile_s=program.compile_s,
        stages=known.reports,
        devices=known.devices if len(known.devices) > 1 else (),
        load_s=time.perf_counter() - known.began_s,
    )


def _vision_of(vision: Seeing | None) -> Vision | None:
    """Return the facts by which the front prepares images for a model, or None if the model sees none."""
    if vision is None:
        return None
    cutting = vision.cutting
    return Vision(
        crop_size=vision.crop_size,
        edge_tokens=vision.patches_per_edge // vision.merge,
        image_token=vision.image_token,
        fit=cutting.fit,
        filter=cutting.filter,
        marker=vision.marker,
        around=vision.around,
        between=vision.between,
        num_places=vision.num_places,
    )


def listening_of(audio: Audio | None) -> Listening | None:
    """Return the facts by which the front prepares recordings in conversations for a model, or None if the model hears none."""
    if audio is None:
        return None
    return Listening(
        audio_token=audio.audio_token,
        num_mels=audio.num_mels,
        num_hops=audio.num_hops,
        frames_each=audio.merge,
        ends=audio.ends,
        most_windows=audio.most_windows,
        piece_hops=audio.piece_hops,
        reflects=audio.reflects,
    )


def _cache_groups(known: Timed) -> tuple[CachePages, ...]:
    """Return the pages of each cache group, with the bytes that they take on this machine. An encoder has no groups."""
    if known.step_model is None:
        return ()
    limits = known.step_model.limits
    most = (group.most_pages(limits.max_tokens) for group in limits.groups)
    here = [stage.page_bytes for stage in known.reports if stage.place in (LOCAL, HEAD)] or [
        [group.page_bytes for group in known.plan.groups]
    ]
    return tuple(
        CachePages(of.num_pages, sum(page_bytes), of.page_size, each)
        for of, each, *page_bytes in zip(known.plan.groups, most, *here, strict=True)
    )


def _context_note(known: Timed) -> str:
    """Say why the context is shorter than the load asks for, or than the model supports if the load names none: the default limit or the
    size of the KV cache. Return "" if it is not shorter."""
    if known.step_model is None:
        return ""  # an encoder has no KV cache that could limit its context
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
