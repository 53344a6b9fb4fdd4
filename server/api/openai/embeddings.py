"""POST /v1/embeddings: turn texts or images into vectors."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import starmap

import msgspec
from fastapi import APIRouter, Request, Response

from server.api.answer.respond import Pieces, in_pieces, response_headers
from server.api.answer.shapes import Embedding as EmbeddingEntry
from server.api.answer.shapes import Embeddings
from server.api.context import Caller, Context, caller
from server.api.openai.chat import Conversation, conversation_of, render_prompt
from server.api.request.embedded import separated
from server.api.request.limits import check_sizes
from server.api.request.prepare import invalid, off_loop
from server.api.request.schema import ChatBody, EmbeddingBody
from server.api.routes import gives, new_router
from server.api.vectors import Vector, check_embedding, embed_all, num_tokens_of, plan_embedding
from server.errors import MISSING_FIELD, ApiError
from server.messages import Crop
from server.models.model import Loaded, Model
from server.settings import ServerSettings


def router(context: Context) -> APIRouter:
    routes = new_router("OpenAI")

    @routes.post("/v1/embeddings", responses=gives(Embeddings))
    async def embeddings(request: Request, body: EmbeddingBody) -> Response:
        """Turn one or more texts, or images if the model embeds them, into vectors."""
        model, loaded, ignored = context.begin(request, body, body.model)
        who = caller(request)
        texts, crops = await separated(body, model, loaded, who, context.settings)
        text = await conversation_text(texts, loaded, who)
        size = max(who.num_body_bytes, len(text or ""))
        prompts = await off_loop(size, lambda: _planned(texts, text, model, loaded, context.settings, crops))
        num_tokens = num_tokens_of(prompts, crops, loaded)
        vectors = await embed_all(request, prompts, body, model, loaded, context, crops=crops)
        answer: Embeddings = {
            "object": "list",
            "data": [],
            "model": body.model or model.spec.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        pieces = await off_loop(sum(vector.nbytes for vector in vectors), lambda: _pieces(answer, vectors, body))
        return Pieces(pieces, response_headers(loaded, ignored))

    return routes


def _planned(
    body: EmbeddingBody, text: str | None, model: Model, loaded: Loaded, settings: ServerSettings, crops: Mapping[int, Crop]
) -> list[list[int]]:
    """Return the tokens of each input. An image, whose index is in `crops`, gets an empty list. Raise ApiError for the reasons of
    `plan_embedding`."""
    if crops and not body.input:
        check_embedding(body, model, loaded)
        return [[] for _ in crops]
    texts = iter(plan_embedding(body, text, model, loaded, settings))
    found = list(texts)
    for index in sorted(crops):
        found.insert(index, [])
    return found


async def conversation_text(body: EmbeddingBody, loaded: Loaded, who: Caller) -> str | None:
    """Return the rendered conversation of a request with `messages`, or None for a request with `input`. Raise ApiError unless the request
    has exactly one of these fields."""
    if body.input is None and body.messages is None:
        raise ApiError(MISSING_FIELD, "input and messages are absent; expected one of them", param="input")
    if body.input is not None and body.messages is not None:
        raise invalid("messages", "input and messages are given; expected one of them")
    if body.messages is None:
        return None
    chat = ChatBody(
        messages=body.messages,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=bool(body.add_generation_prompt),
    )

    def make() -> Conversation:
        check_sizes(chat)
        return conversation_of(chat, [])

    return await render_prompt(make, loaded, who)


def _pieces(answer: Embeddings, vectors: Sequence[Vector], body: EmbeddingBody) -> list[bytes]:
    """Return the answer in small pieces, because encoding it in one call would delay other requests."""

    def entry(index: int, vector: Vector) -> bytes:
        embedding: EmbeddingEntry = {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
        return msgspec.json.encode(embedding)

    return in_pieces(answer, "data", starmap(entry, enumerate(vectors)))


def _written(vector: Vector, encoding: str | None) -> str | list[float]:
    """Return a vector as the request wants it: in base64, or as numbers if `encoding` is not base64."""
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
