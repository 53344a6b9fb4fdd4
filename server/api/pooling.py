"""POST /pooling, as in vLLM: return the vector of a text, the vector of each of its tokens, or the scores of its classes."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from server.api.answer.respond import Pieces, response_headers
from server.api.answer.shapes import EmbeddingUsage
from server.api.classes import numbers_of, require_classes, scores_of
from server.api.context import Context, caller
from server.api.openai.embeddings import conversation_text
from server.api.request.prepare import invalid, off_loop
from server.api.request.schema import EmbeddingBody, Label
from server.api.routes import gives, new_router
from server.api.vectors import Vector, embed_all, plan_embedding, plan_texts, require_embeddings
from server.errors import NOT_A_CLASSIFIER, NOT_AN_EMBEDDER, ApiError
from server.models.model import Loaded, Model

MAX_VALUES = 1 << 21  # largest number of values in the token vectors of one answer: 40 MB of JSON
encode = msgspec.json.encode


class PoolingBody(EmbeddingBody):
    """The body of /pooling."""

    # None: classify for a model with a classification head, otherwise embed; `encode` is another name of embed
    task: Literal["embed", "encode", "token_embed", "classify", "token_classify", "score"] | None = None
    input_type: Label | None = None  # declared again, because EmbeddingBody accepts `task` as another name of input_type


class Pooled(TypedDict):
    """The vector of a text, the vectors of its tokens, or the scores of its classes."""

    index: int
    object: Literal["pooling"]
    data: Sequence[float] | Sequence[Sequence[float]] | str  # a str has the bytes of all float32 values in base64


class PooledTexts(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: Sequence[Pooled]
    usage: EmbeddingUsage


def router(context: Context) -> APIRouter:
    routes = new_router("Embeddings")
    settings = context.settings

    @routes.post("/pooling", responses=gives(PooledTexts))
    async def pooling(request: Request, body: PoolingBody) -> Response:
        """Turn texts into vectors: one for each text, or with `task` `token_embed` one for each token. A model with a classification head
        returns the scores of its classes, or the raw outputs of the head if `use_activation` is false."""
        model, loaded, ignored = context.begin(request, body, body.model)
        per_token = _check_task(body, model, loaded)
        who = caller(request)
        text = await conversation_text(body, loaded, who)
        size = max(who.num_body_bytes, len(text or ""))
        classifies = bool(loaded.ready.classes) and body.task in ("classify", "score", None)

        def plan() -> list[list[int]]:
            return plan_texts(body, text, loaded, settings) if classifies else plan_embedding(body, text, model, loaded, settings)

        prompts = await off_loop(size, plan)
        num_tokens = sum(map(len, prompts))
        if per_token:
            _check_values(num_tokens, body, loaded)
        asked = numbers_of(body) if classifies else body
        vectors = await embed_all(request, prompts, asked, model, loaded, context, per_token=per_token)
        answer: PooledTexts = {
            "id": f"pool-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model or model.spec.name,
            "data": [],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        as_base64 = body.encoding_format == "base64"
        activates = classifies and body.normalize is not False  # `use_activation` is another name of `normalize`
        rows = (scores_of(loaded.ready, vector) for vector in vectors) if activates else iter(vectors)
        pieces = await off_loop(sum(vector.nbytes for vector in vectors), lambda: _pieces(answer, rows, as_base64=as_base64))
        return Pieces(pieces, response_headers(loaded, ignored))

    return routes


def _check_task(body: PoolingBody, model: Model, loaded: Loaded) -> bool:
    """Return whether the request asks for a vector for each token. Raise ApiError if the model does not support the task. `plan_embedding`
    checks later whether the model embeds texts."""
    match body.task:
        case "token_classify":
            raise ApiError(NOT_A_CLASSIFIER, f"model {model.spec.name!r} has no classification head for tokens", param="model")
        case "classify" | "score":
            require_classes(model, loaded)
            return False
        case "token_embed":
            require_embeddings(model, loaded)
            if not loaded.ready.embeds_tokens:
                message = f"model {model.spec.name!r} computes one vector per text, not one per token; use task embed"
                raise ApiError(NOT_AN_EMBEDDER, message, param="task")
            return True
        case _:
            return False


def _check_values(num_tokens: int, body: PoolingBody, loaded: Loaded) -> None:
    """Raise ApiError if the vectors of all tokens have more than MAX_VALUES values together, or if the request has `dimensions`."""
    if body.dimensions is not None:
        raise invalid("dimensions", "dimensions is not supported with task token_embed, whose vectors are never shortened")
    num_values = num_tokens * loaded.ready.embedding_size
    if num_values > MAX_VALUES:
        message = f"the vectors of {num_tokens} tokens have {num_values} values; expected at most {MAX_VALUES}: send fewer or shorter texts"
        raise invalid("input", message)


def _pieces(answer: PooledTexts, vectors: Iterator[Vector], *, as_base64: bool) -> list[bytes]:
    """Return the answer in small pieces, because encoding it in one call would delay other requests."""
    head, _, tail = encode(answer).partition(b'"data":[')
    pieces = [head + b'"data":[']
    for index, vector in enumerate(vectors):
        pieces.append(b'%b{"index":%d,"object":"pooling","data":' % (b"," if index else b"", index))
        if as_base64:
            pieces.append(encode(base64.b64encode(vector.tobytes()).decode()))
        elif vector.ndim == 1:
            pieces.append(encode(vector.tolist()))
        else:
            pieces += [(b"," if row else b"[") + encode(values.tolist()) for row, values in enumerate(vector)]
            pieces.append(b"]")
        pieces.append(b"}")
    return [*pieces, tail]
