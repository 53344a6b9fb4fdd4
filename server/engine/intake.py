"""Turn a Submit or an Embed message into a request of the engine, or raise RequestError."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate, chain

import numpy as np

from runtime.spectrogram import AROUND, HOP
from server.engine.request import PlacedExcerpt, Request, Sequence, Stage
from server.engine.sampler import RowState
from server.engine.scheduling.cache_pool import Held
from server.engine.step_model import SAMPLE_BYTES, ExcerptLimits, StepLimits
from server.interfaces import RequestError
from server.messages import Crop, Embed, ErrorCode, Excerpt, SamplingParams, Submit


def open_request(submit: Submit, arrival: int, *, limits: StepLimits, eos_ids: tuple[int, ...]) -> Request:
    """Return the request of a Submit. If the front submits it again because a worker was lost, a choice that this worker had finished is
    FINISHED, and a choice that it had begun continues after the tokens that were sent. If log-probabilities of the prompt are requested,
    the first choice computes them, unless tokens of this choice were sent already. Raise RequestError if this model does not generate, if
    the token ids, the audio or the excerpts are not valid for it, if the prompt fills the context, if prompt and answer may exceed the KV
    cache, or if log-probabilities of a prompt with images are requested from a model that computes these images in one step."""
    if not limits.generates:
        raise RequestError(ErrorCode.NOT_A_GENERATIVE_MODEL, "this model gives embeddings and generates no text")
    _check_ids(submit, limits.vocab_size)
    _check_audio(submit, limits.num_hops)
    excerpts = placed_excerpts(submit, limits.excerpts)
    num_prompt = len(submit.prompt_ids)
    if num_prompt >= limits.max_context:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {num_prompt} tokens, expected fewer than the context of {limits.max_context}",
        )
    max_len = min(num_prompt + submit.params.max_tokens, limits.max_context)
    if max_len > limits.capacity:
        raise RequestError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"prompt and answer have up to {max_len} tokens, the KV cache holds {limits.capacity}: lower max_tokens or load the "
            "model with a larger kv_cache_bytes",
        )
    params = submit.params
    if params.prompt_logprobs is not None and excerpts and limits.both_ways:
        text = "prompt_logprobs is given with images, whose tokens this model computes in one step; ask without prompt_logprobs"
        raise RequestError(ErrorCode.INVALID_VALUE, text)
    marks = tuple((placed.start, placed.excerpt.digest) for placed in excerpts)
    request = Request(
        submit, arrival, excerpts=excerpts, ender_ids=frozenset(params.stop_token_ids + (() if params.ignore_eos else eos_ids))
    )
    row = RowState(params, 0, submit.prompt_ids)
    for choice in range(submit.num_choices):
        emitted = submit.emitted[choice] if submit.emitted else ()
        seq = Sequence(
            request,
            choice,
            token_ids=[*submit.prompt_ids, *emitted],
            held=Held.nothing(limits, submit.cache_salt, marks),
            row=row.anew(choice, emitted),
            max_len=max_len,
            rank=(submit.priority, arrival, choice),
        )
        if choice in submit.finished:
            seq.stage = Stage.FINISHED
        if choice == 0 and params.prompt_logprobs is not None and not emitted:
            seq.prompt_logprobs = [None]  # the first token has no log-probability
        request.sequences.append(seq)
    return request


def open_text(embed: Embed, arrival: int, *, limits: StepLimits) -> Request:
    """Return the request of a text to embed. Raise RequestError if this model gives no embeddings, if the token ids or the audio are not
    valid for it, if the text has tokens that stand for images or audio, or if it has more tokens than fit into the KV cache and the model's
    context."""
    if not limits.embedding_size:
        raise RequestError(ErrorCode.NOT_AN_EMBEDDING_MODEL, "this model generates text and gives no embeddings")
    submit = Submit(
        embed.request_id,
        embed.prompt_ids,
        SamplingParams(max_tokens=0),
        priority=embed.priority,
        fairness_key=embed.fairness_key,
        cache_salt=embed.cache_salt,
        deadline=embed.deadline,
        audio=embed.audio,
    )
    _check_ids(submit, limits.vocab_size)
    _check_audio(submit, limits.num_hops)
    placed_excerpts(submit, limits.excerpts)  # raises if the text has tokens that stand for images or audio
    num_tokens = len(embed.prompt_ids)
    if num_tokens > limits.capacity:
        raise RequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, f"the text has {num_tokens} tokens, expected 1 to {limits.capacity}")
    request = Request(submit, arrival, embed)
    row = RowState(submit.params, 0, ())
    held = Held.nothing(limits, submit.cache_salt)
    seq = Sequence(request, 0, list(embed.prompt_ids), held, row, max_len=num_tokens, rank=(embed.priority, arrival, 0))
    seq.prompt_vectors = [] if embed.per_token else None
    request.sequences.append(seq)
    return request


def _check_ids(submit: Submit, vocab_size: int) -> None:
    """Raise RequestError if the prompt is empty, or if one of the fields below has a token outside the vocabulary. Such a token would crash
    the worker and fail every request."""
    params = submit.params
    if not submit.prompt_ids:
        raise RequestError(ErrorCode.INVALID_VALUE, "the prompt has 0 tokens, expected at least 1")
    named: dict[str, Collection[int]] = {
        "prompt": submit.prompt_ids,
        "emitted": [*chain.from_iterable(submit.emitted)],
        "logit_bias": [token_id for token_id, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids,
        "banned_token_ids": params.banned_token_ids,
        "banned_sequences": [*chain.from_iterable(params.banned_sequences)],
        "thinking": () if params.thinking is None else (*params.thinking.open_ids, params.thinking.close_id),
        "stop_token_ids": params.stop_token_ids,
        "stamps": () if params.stamps is None else (params.stamps.first, params.stamps.end),
    }
    for name, ids in named.items():
        if stray := stray_of(ids, vocab_size):
            raise RequestError(ErrorCode.INVALID_VALUE, f"{name} has {stray}")


def _check_audio(submit: Submit, num_hops: int) -> None:
    """Raise RequestError if a model that only transcribes gets no audio, if another model gets audio to transcribe, or if the audio does
    not have AROUND samples and those of 1 to `num_hops` whole hops."""
    if submit.audio is None:
        if num_hops:
            raise RequestError(ErrorCode.INVALID_VALUE, "the request has no audio; this model only transcribes")
        return
    if not num_hops:
        raise RequestError(ErrorCode.INVALID_VALUE, "the request has audio, and this model hears none")
    hops, rest = divmod(len(submit.audio.samples) - AROUND * SAMPLE_BYTES, HOP * SAMPLE_BYTES)
    if rest or not 1 <= hops <= num_hops:
        text = f"the audio has {len(submit.audio.samples)} bytes; expected f32 samples of 1 to {num_hops} hops of {HOP}, and {AROUND} more"
        raise RequestError(ErrorCode.INVALID_VALUE, text)


def placed_excerpts(submit: Submit, limits: Collection[ExcerptLimits]) -> tuple[PlacedExcerpt, ...]:
    """Return the excerpts of a request, each with the positions of its tokens in the prompt. An excerpt has `num_tokens` image or audio
    tokens in the prompt. These are contiguous, except that one other token stands between two rows of tokens of a crop if `has_breaks` is
    set. Raise RequestError if the model cannot read an excerpt, if the tokens of an excerpt are at other places, or if the prompt has more
    or fewer image or audio tokens than the excerpts."""
    by_kind: dict[type, ExcerptLimits] = {one.kind: one for one in limits}
    if stray := next((excerpt for excerpt in submit.excerpts if type(excerpt) not in by_kind), None):
        what = "images" if isinstance(stray, Crop) else "audio"
        reads = " and ".join((*(one.reads for one in limits), "reads text"))
        raise RequestError(ErrorCode.INVALID_VALUE, f"the request has {what}, and this model {reads}")
    if not limits:
        return ()
    ids = np.asarray(submit.prompt_ids)
    for one in limits:
        _check_kind([excerpt for excerpt in submit.excerpts if isinstance(excerpt, one.kind)], one, int(np.count_nonzero(ids == one.token)))
    places = np.flatnonzero(np.isin(ids, [one.token for one in limits]))
    ends = list(accumulate((excerpt.num_tokens for excerpt in submit.excerpts), initial=0))
    found: list[PlacedExcerpt] = []
    for excerpt, first, end in zip(submit.excerpts, ends, ends[1:], strict=False):
        own = by_kind[type(excerpt)]
        start, stop = int(places[first]), int(places[end - 1]) + 1
        stride = excerpt.columns + own.has_breaks
        wanted = start + np.add.outer(np.arange(excerpt.rows) * stride, np.arange(excerpt.columns)).ravel()
        if not np.array_equal(places[first:end], wanted) or (ids[wanted] != own.token).any():
            rows = f"{excerpt.rows} rows of {excerpt.columns}"
            text = f"the {own.medium} tokens from {start} to {stop} have others between them; expected {rows}"
            raise RequestError(ErrorCode.INVALID_VALUE, text)
        origin = start + (found[-1].offset if found else 0)
        found.append(PlacedExcerpt(excerpt, submit.cache_salt.encode() + b"\0" + excerpt.digest, start, stop, origin, stride))
    return tuple(found)


def _check_kind(excerpts: Collection[Excerpt], limits: ExcerptLimits, num_tokens: int) -> None:
    """Raise RequestError if the model cannot read one of the excerpts, which are of one kind, or if they have another number of tokens than
    the prompt, which has `num_tokens` tokens of this kind."""
    if fault := next(filter(None, map(limits.fault, excerpts)), ""):
        raise RequestError(ErrorCode.INVALID_VALUE, fault)
    if num_tokens != (wanted := sum(excerpt.num_tokens for excerpt in excerpts)):
        takes = f"{len(excerpts)} {limits.parts} take {wanted}"
        raise RequestError(ErrorCode.INVALID_VALUE, f"the prompt has {num_tokens} {limits.medium} tokens ({limits.token}); {takes}")


def stray_of(ids: Collection[int], vocab_size: int) -> str:
    """Return a text that names an id outside the vocabulary, or "" if there is none. Only the least and the greatest id are compared,
    because checking every token of a long prompt in Python would delay the step."""
    ends = (min(ids), max(ids)) if ids else ()
    return next((f"token {token_id}; expected 0 to {vocab_size - 1}" for token_id in ends if not 0 <= token_id < vocab_size), "")
