"""Embed texts and images: choose the model's prompt, truncate texts, and submit all texts and images to the worker. Every API that returns
vectors, or scores that a model computes for texts, uses this module."""

from __future__ import annotations

import asyncio
import heapq
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import cast

import numpy as np
from fastapi import Request
from numpy.typing import NDArray

from server.api.answer.generate import require_same
from server.api.answer.respond import while_connected
from server.api.context import Caller, Context, caller
from server.api.openai.completions import token_ids
from server.api.request.prepare import context_of, deadline_of, invalid
from server.api.request.schema import EmbeddingBody, InputPart, Prompts
from server.api.request.texts import kept_alone, too_long, without_answer
from server.errors import DEADLINE_EXCEEDED, NOT_AN_EMBEDDER, UNSUPPORTED_FIELD, ApiError, of_request
from server.interfaces import RequestError
from server.messages import IDLE, Crop, Embed, Ready
from server.metrics import ENGINE
from server.models.model import Loaded, Model
from server.settings import ServerSettings

Vector = NDArray[np.float32]
KINDS = (  # each row has the names that models, and the APIs of Cohere, Jina and Google, use for one kind of text
    ("query", "search_query", "retrieval.query", "retrieval_query", "s2p_query"),
    ("document", "passage", "search_document", "retrieval.passage", "retrieval_document", "corpus"),
)
LOAD_TO_EMBED = "load it with `embeddings: true` to use its hidden states as embeddings"
NO_CROPS: Mapping[int, Crop] = {}
TURN = 32  # texts sent to the worker before other tasks may run


def plan_embedding(body: EmbeddingBody, text: str | None, model: Model, loaded: Loaded, settings: ServerSettings) -> list[list[int]]:
    """Return the tokens of each text to embed: see `plan_texts`. Raise ApiError also for the reasons of `check_embedding`."""
    check_embedding(body, model, loaded)
    return plan_texts(body, text, loaded, settings)


def check_embedding(body: EmbeddingBody, model: Model, loaded: Loaded) -> None:
    """Check the request apart from its inputs: raise ApiError if the model computes no embeddings, if its vectors have fewer than
    `dimensions` values, or if it lacks the prompt that the request names."""
    require_embeddings(model, loaded)
    size = loaded.ready.embedding_size
    if body.dimensions is not None and body.dimensions > size:
        raise invalid("dimensions", f"dimensions is {body.dimensions}; expected at most the model's {size}")
    _prompt_of(body, loaded.ready)


def require_embeddings(model: Model, loaded: Loaded) -> None:
    """Raise ApiError unless the model computes embeddings."""
    name, ready = model.spec.name, loaded.ready
    if ready.embedding_size:
        return
    if ready.classes:
        text = f"model {name!r} computes scores of classes and no embeddings; ask /classify, or ask a model that computes embeddings"
    else:
        text = (
            f"model {name!r} generates text and was not trained for embeddings; {LOAD_TO_EMBED}, or ask a model that was trained for them"
        )
    raise ApiError(NOT_AN_EMBEDDER, text, param="model")


def plan_texts(body: EmbeddingBody, text: str | None, loaded: Loaded, settings: ServerSettings) -> list[list[int]]:
    """Return the tokens of each text of the body. If the body has messages, `text` is their rendering, and the only text to embed. If the
    request truncates texts, remove their ends, or their beginnings if `truncation_side` says so; the default is the end because the model's
    prompt is at the beginning. Pad texts that are shorter than the model demands. Raise ApiError if there are too many texts, if a text is
    empty or exceeds the context, if a token id is outside the vocabulary, or for the reasons of `_prompted`."""
    given = _prompted(body, loaded.ready) if text is None else text
    num_texts = len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 1
    if num_texts > settings.max_inputs:
        raise invalid("input", f"input has {num_texts} texts; expected at most {settings.max_inputs}")
    context, keep, side, special = (
        context_of(loaded),
        kept_alone(body.truncate_prompt_tokens, context_of(loaded)),
        body.truncation_side or "right",
        body.add_special_tokens is not False if text is None else bool(body.add_special_tokens),
    )
    param = "input" if text is None else "messages"
    tokenizer = loaded.tokenizer
    around = tokenizer.text_template  # truncation keeps these special tokens: an embedding is often the vector of the first or last token
    with without_answer():
        prompts = token_ids(given, tokenizer, param, special=special, context=context, keep=keep, side=side, around=around)
        for ids in prompts:
            if len(ids) > context:
                raise too_long(context, f"a text has {len(ids)} tokens", param)
    padded, pad = loaded.ready.padded_to, tokenizer.pad_id
    return prompts if pad is None else [ids + [pad] * (padded - len(ids)) for ids in prompts]


def num_tokens_of(prompts: Sequence[Sequence[int]], crops: Mapping[int, Crop], loaded: Loaded) -> int:
    """Count the tokens of inputs. The tokens of an image are the vectors that the encoder computes for it. `crops` has the images by the
    index of their input."""
    return sum(_sizes(prompts, crops, loaded))


def _sizes(prompts: Sequence[Sequence[int]], crops: Mapping[int, Crop], loaded: Loaded) -> list[int]:
    """Return the number of tokens of each input. `crops` has the images by the index of their input."""
    vision = loaded.ready.vision
    if vision is None:
        return [len(ids) for ids in prompts]
    each, square = vision.num_places, vision.edge_tokens**2
    return [crops[index].num_tokens // square * each if index in crops else len(ids) for index, ids in enumerate(prompts)]


def _prompted(body: EmbeddingBody, ready: Ready) -> Prompts:
    """Return the texts of the request, each preceded by the prompt that the request names. Without a name, use the model's default prompt;
    with an empty name, use no prompt. Token ids stay as they are. Raise ApiError if the input has objects, if the model has no prompt of
    this name, or if the request names a prompt and the input has token ids."""
    given, (name, prefix) = "" if body.input is None else body.input, _prompt_of(body, ready)
    parts = [given] if isinstance(given, str) else given
    if any(isinstance(part, InputPart) for part in parts):
        raise invalid("input", "input has objects; expected texts or token ids, because only /v1/embeddings takes objects")
    texts = [part for part in parts if isinstance(part, str)]
    if name and len(texts) < len(parts):
        raise invalid("prompt_name", f"prompt_name is {name!r} and input has token ids; a prompt goes before texts")
    return [prefix + text for text in texts] if prefix and texts else cast("Prompts", given)


def _prompt_of(body: EmbeddingBody, ready: Ready) -> tuple[str | None, str]:
    """Return the name of the prompt that the request names, or None, and the text of the named prompt or else of the model's default
    prompt. The text is empty if there is no prompt. Raise ApiError if the model has no prompt of the name or type that the request
    gives."""
    known = dict(ready.prompts)
    name = body.prompt_name if body.input_type is None else _prompt_of_type(body.input_type, known)
    if name and name not in known:
        raise invalid("prompt_name", f"prompt_name is {name!r}; expected {_names(known)}")
    return name, known.get(name if name is not None else ready.default_prompt or "", "")


def _prompt_of_type(input_type: str, known: Mapping[str, str]) -> str:
    """Return the name of the model's prompt for texts of this type. KINDS has the names that APIs give to the same type. Return an empty
    name if the type means documents and the model has no prompt for them. Raise ApiError if the model has no prompt for any other type, or
    has no prompts at all."""
    if not known:
        raise ApiError(UNSUPPORTED_FIELD, f"input_type is {input_type!r:.40}; leave it out: the model has no prompts", param="input_type")
    kind = next((names for names in KINDS if input_type in names), (input_type,))
    for name in (input_type, *kind):
        if name in known:
            return name
    if kind is KINDS[1]:
        return ""  # many models have a prompt for queries only, and embed documents without one
    raise invalid("input_type", f"input_type is {input_type!r:.40}; expected {_names(known)}")


def _names(prompts: Iterable[str]) -> str:
    """Return a text for an error that lists the names of a model's prompts."""
    return f"one of {', '.join(sorted(prompts))}" if prompts else "none, as the model has no prompts"


async def embed_all(
    request: Request,
    prompts: Sequence[Sequence[int]],
    body: EmbeddingBody,
    model: Model,
    loaded: Loaded,
    context: Context,
    *,
    per_token: bool = False,
    seconds: Sequence[int | None] | None = None,
    crops: Mapping[int, Crop] = NO_CROPS,
) -> list[Vector]:
    """Return the vectors of all prompts, which the model's queue admits or refuses together. With `per_token` each prompt gets an array
    [tokens, size]. `seconds` has, for each pair, the index of the second text's first token; None: prompts are not pairs, or the model does
    not distinguish the two texts. `crops` has the images, by the index of the prompt that an image replaces. Raise ApiError if the queue is
    full, if the client leaves, if a prompt cannot be embedded, or if the vectors are not all ready in time.

    The worker gets only some of the prompts at a time, and admission counts only these prompts. So a request of 2,048 texts neither fills
    the queue nor waits until the queue is empty.
    """
    sizes, labels = _sizes(prompts, crops, loaded), (model.spec.name, ENGINE)
    num_tokens = sum(sizes)
    who = caller(request)
    record = who.record
    most = 1 if who.is_idle else min(len(prompts), loaded.admission.max_at_once)
    try:
        lease = loaded.admission.admit(most, sum(heapq.nlargest(most, sizes)), who.quota_key, is_idle=who.is_idle)
    except ApiError as error:
        context.metrics.rejected.labels(*labels, error.kind.code).inc()
        raise
    record.submit(model.spec.name, time.monotonic())
    try:
        work = _embed_all(prompts, body, loaded, who, context.settings, most, per_token=per_token, seconds=seconds, crops=crops)
        vectors = await while_connected(request, work)
    finally:
        lease.release()
    record.count(num_tokens)
    context.metrics.prompt_tokens.labels(*labels).inc(num_tokens)
    return vectors


async def _embed_all(
    prompts: Sequence[Sequence[int]],
    body: EmbeddingBody,
    loaded: Loaded,
    who: Caller,
    settings: ServerSettings,
    num_at_once: int,
    *,
    per_token: bool,
    seconds: Sequence[int | None] | None,
    crops: Mapping[int, Crop],
) -> list[Vector]:
    """Send all prompts to the worker, at most `num_at_once` at a time, and return their vectors in the order of the prompts. A vector is
    shortened if the request has `dimensions`, but not with `per_token`. Raise ApiError if a prompt cannot be embedded, if the vectors are
    not all ready in time, or if the model's fingerprint changes meanwhile."""
    deadline = deadline_of(body.timeout, settings)
    normalize = loaded.ready.normalize if body.normalize is None else body.normalize

    turns = asyncio.Semaphore(num_at_once)

    async def embed(ids: Sequence[int], second: int | None, crop: Crop | None) -> Vector:
        """Send one prompt to the worker, once the worker has fewer than `num_at_once` of the prompts, and return the prompt's vector."""
        async with turns:
            asked = Embed(
                *(secrets.token_hex(12), tuple(ids), normalize, who.key_digest, deadline, per_token, who.salt()),
                priority=IDLE if who.is_idle else 0,
                second=second,
                crop=crop,
            )
            vector = np.frombuffer((await loaded.worker.embed(asked)).vector, dtype="<f4")
        if per_token:
            return vector.reshape(len(ids), -1)
        return vector if body.dimensions is None else _shortened(vector, body.dimensions, normalize=normalize)

    try:
        async with asyncio.TaskGroup() as group, asyncio.timeout(body.timeout):
            tasks: list[asyncio.Task[Vector]] = []
            for index, (ids, second) in enumerate(zip(prompts, seconds or repeat(None), strict=False)):
                tasks.append(group.create_task(embed(ids, second, crops.get(index))))
                if len(tasks) % TURN == 0:
                    await asyncio.sleep(0)
            await asyncio.wait(tasks)
    except* TimeoutError:
        raise ApiError(DEADLINE_EXCEEDED, f"the vectors were not ready within {body.timeout} s") from None
    except* RequestError as errors:
        require_same(loaded)  # a worker that has loaded newer files of the model may refuse the tokens of the old tokenizer
        error = next(error for error in errors.exceptions if isinstance(error, RequestError))
        raise of_request(error) from error
    require_same(loaded)
    return [task.result() for task in tasks]


def _shortened(vector: Vector, dimensions: int, *, normalize: bool) -> Vector:
    """Return the first `dimensions` values of a vector, with `normalize` scaled to length 1 again. Models trained for several vector sizes
    are used in this way."""
    head = vector[:dimensions]
    norm = float(np.linalg.norm(head)) if normalize else 1.0
    return head / np.float32(norm or 1.0)
