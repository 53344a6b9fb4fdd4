"""POST /classify, as in vLLM: a model with a classification head returns the class of each text. A reranker counts as a model with one
class."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from itertools import starmap

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from server.api.answer.respond import Pieces, in_pieces, response_headers
from server.api.answer.shapes import EmbeddingUsage
from server.api.context import Context, caller
from server.api.openai.embeddings import conversation_text
from server.api.request.prepare import invalid, off_loop
from server.api.request.schema import EmbeddingBody
from server.api.routes import gives, new_router
from server.api.vectors import Vector, embed_all, plan_texts
from server.errors import NOT_A_CLASSIFIER, ApiError
from server.messages import Ready
from server.models.model import Loaded, Model
from server.scoring import ClassScores


class ClassifyBody(EmbeddingBody):
    """The body of /classify."""

    use_activation: bool | None = None  # False: return the raw outputs of the classification head instead of scores
    activation: bool | None = None  # an older name of use_activation


class Classified(TypedDict):
    """The class of a text, and the score of every class."""

    index: int  # index of the text in the request
    label: str  # the class with the highest output
    probs: Sequence[float]  # the score of each class; with `use_activation` false, the raw output for each class
    num_classes: int


class ClassifiedTexts(TypedDict):
    id: str
    object: str
    created: int
    model: str
    data: Sequence[Classified]
    usage: EmbeddingUsage


def router(context: Context) -> APIRouter:
    routes = new_router("Embeddings")

    @routes.post("/classify", responses=gives(ClassifiedTexts))
    @routes.post("/v1/classify", include_in_schema=False)
    async def classify(request: Request, body: ClassifyBody) -> Response:
        """Classify each text: return its most probable class and the score of every class. With `use_activation` false, return the raw
        outputs of the classification head in place of scores."""
        model, loaded, ignored = context.begin(request, body, body.model)
        require_classes(model, loaded)
        who = caller(request)
        text = await conversation_text(body, loaded, who)
        size = max(who.num_body_bytes, len(text or ""))
        prompts = await off_loop(size, lambda: plan_texts(body, text, loaded, context.settings))
        num_tokens = sum(map(len, prompts))
        found = await embed_all(request, prompts, numbers_of(body), model, loaded, context)
        raw = body.use_activation is False or body.activation is False
        answer: ClassifiedTexts = {
            "id": f"classify-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model or model.spec.name,
            "data": [],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        pieces = await off_loop(sum(numbers.nbytes for numbers in found), lambda: _pieces(answer, found, loaded.ready, raw=raw))
        return Pieces(pieces, response_headers(loaded, ignored))

    return routes


def _pieces(answer: ClassifiedTexts, found: Sequence[Vector], ready: Ready, *, raw: bool) -> list[bytes]:
    """Return the answer in small pieces. `found` has the outputs of the classification head for each text. With `raw`, the field `probs`
    has these outputs instead of scores."""

    def entry(index: int, numbers: Vector) -> bytes:
        classified: Classified = {
            "index": index,
            "label": ready.classes[int(numbers.argmax())],
            "probs": (numbers if raw else scores_of(ready, numbers)).tolist(),
            "num_classes": len(ready.classes),
        }
        return msgspec.json.encode(classified)

    return in_pieces(answer, "data", starmap(entry, enumerate(found)))


def require_classes(model: Model, loaded: Loaded) -> None:
    """Raise ApiError if the model has no classification head."""
    if not loaded.ready.classes:
        raise ApiError(NOT_A_CLASSIFIER, f"model {model.spec.name!r} has no classification head", param="model")


def numbers_of(body: EmbeddingBody) -> EmbeddingBody:
    """Return an embedding request for the raw outputs of the classification head. Of the fields of `body`, the returned request has only
    the timeout, because `embed_all` gets the inputs as tokens. Raise ApiError if `body` has `dimensions`."""
    if body.dimensions is not None:
        raise invalid("dimensions", "dimensions is given, and the scores of classes are never shortened; leave it out")
    return EmbeddingBody.model_construct(normalize=False, timeout=body.timeout)


def scores_of(ready: Ready, numbers: Vector) -> Vector:
    """Return the scores of the classes for the raw outputs `numbers`. If the model's `class_scores` is RAW, the raw outputs are the
    scores."""
    match ready.class_scores:
        case ClassScores.SOFTMAX:
            shares = np.exp(numbers - numbers.max())
            return (shares / shares.sum()).astype(np.float32)
        case ClassScores.SIGMOID:
            return np.exp(-np.logaddexp(0, -numbers)).astype(np.float32)
        case ClassScores.RAW:
            return numbers
