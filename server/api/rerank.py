"""Rerank and score texts by their relevance to a query, in the shapes of Cohere, Jina and vLLM. A reranker reads each pair of texts. With
an embedding model, the score is the cosine similarity of two vectors. The field `scoring` of the answer says in which of these two ways
texts are scored."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Literal, NotRequired

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import AliasChoices, Field
from typing_extensions import TypedDict

from server.api.answer.respond import json_answer, response_headers
from server.api.answer.shapes import EmbeddingUsage
from server.api.classes import scores_of
from server.api.context import Context, caller
from server.api.request.fields import Options
from server.api.request.prepare import context_of, invalid, off_loop
from server.api.request.schema import EmbeddingBody, Int, Kept, Label, Text
from server.api.request.texts import encode_prompts, encode_texts, kept_alone, too_long, without_answer
from server.api.request.words import in_words
from server.api.routes import gives, new_router
from server.api.vectors import LOAD_TO_EMBED, Vector, embed_all, plan_embedding
from server.errors import NOT_A_CLASSIFIER, NOT_AN_EMBEDDER, UNSUPPORTED_FIELD, ApiError
from server.models.model import Loaded, Model
from server.scoring import PairPrompt, Scoring
from server.settings import ServerSettings
from server.text.pairs import Pair


class Document(Options):
    """A document that is given as an object."""

    text: Text


Documents = Annotated[list[Text | Document], Field(max_length=2048, fail_fast=True)]
Texts = Annotated[list[Text], Field(max_length=2048, fail_fast=True)]
Named = tuple[Sequence[str], str]  # texts, and the name of the field of the request that has the texts


class VectorOptions(Options):
    """The fields that all requests for scores share."""

    model: Label | None = None
    # number of tokens to keep: of each pair of texts with a reranker, of each text with an embedding model
    truncate_prompt_tokens: Kept | None = Field(
        default=None, validation_alias=AliasChoices("truncate_prompt_tokens", "max_tokens_per_doc", "max_tokens_per_query")
    )
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    instruction: Text | None = None  # for rerankers whose prompt has an instruction; other models refuse it
    timeout: float | None = Field(default=None, gt=0)
    user: Label | None = None


class RerankBody(VectorOptions):
    """The body of /v1/rerank."""

    query: Text
    documents: Documents
    top_n: Int | None = Field(default=None, ge=0)  # 0: all, as in vLLM
    return_documents: bool | None = None  # False: leave out the texts of the documents


class ScoreBody(VectorOptions):
    """The body of /v1/score."""

    text_1: Text | Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Text | Texts = Field(validation_alias=AliasChoices("text_2", "documents", "data_2"))


class RankedDocument(TypedDict):
    text: str


class RerankResult(TypedDict):
    """A document's index in the request, and its score."""

    index: int
    relevance_score: float
    document: NotRequired[RankedDocument]


class RerankUnits(TypedDict):
    """The units that Cohere bills: one search per request."""

    search_units: int


class RerankMeta(TypedDict):
    billed_units: RerankUnits


class Reranked(TypedDict):
    """The documents, the highest score first."""

    id: str
    model: str
    scoring: Scoring
    results: Sequence[RerankResult]
    usage: EmbeddingUsage
    meta: RerankMeta


class Score(TypedDict):
    """The score of a pair."""

    object: Literal["score"]
    index: int
    score: float


class Scores(TypedDict):
    """The scores of all pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    scoring: Scoring
    data: Sequence[Score]
    usage: EmbeddingUsage


def router(context: Context) -> APIRouter:
    routes = new_router("Rerank")

    @routes.post("/v1/rerank", responses=gives(Reranked))
    @routes.post("/rerank", include_in_schema=False)
    @routes.post("/v2/rerank", include_in_schema=False)
    @routes.post("/reranking", include_in_schema=False)
    @routes.post("/v1/reranking", include_in_schema=False)
    async def rerank(request: Request, body: RerankBody) -> Response:
        """Order documents by their relevance to a query."""
        model, loaded, ignored = context.begin(request, body, body.model)
        scoring = _scoring_of(model, loaded)
        texts = [text if isinstance(text, str) else text.text for text in body.documents]
        if not texts:
            raise invalid("documents", "documents is empty; expected at least one text")
        scores, num_tokens = await _scores(request, body, model, loaded, context, ([body.query], "query"), (texts, "documents"))
        order = np.argsort(-scores, kind="stable")[: body.top_n or None]
        results: list[RerankResult] = [{"index": int(index), "relevance_score": float(scores[index])} for index in order]
        if body.return_documents is not False:
            for result in results:
                result["document"] = {"text": texts[result["index"]]}
        answer: Reranked = {
            "id": f"rerank-{secrets.token_hex(12)}",
            "model": body.model or model.spec.name,
            "scoring": scoring,
            "results": results,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            "meta": {"billed_units": {"search_units": 1}},
        }
        return json_answer(answer, headers=response_headers(loaded, ignored))

    @routes.post("/v1/score", responses=gives(Scores))
    @routes.post("/score", include_in_schema=False)
    async def score(request: Request, body: ScoreBody) -> Response:
        """Score pairs of texts: one text with each of several texts, or each text of a list with the text at the same index of another
        list. A reranker scores how relevant the second text is to the first, and an embedding model scores how similar the two texts
        are."""
        model, loaded, ignored = context.begin(request, body, body.model)
        scoring = _scoring_of(model, loaded)
        first, second = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
        if not first or not second or len(first) not in (1, len(second)):
            raise invalid("text_1", f"text_1 has {len(first)} texts and text_2 has {len(second)}; expected one, or as many as text_2")
        scores, num_tokens = await _scores(request, body, model, loaded, context, (first, "text_1"), (second, "text_2"))
        answer: Scores = {
            "id": f"score-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model or model.spec.name,
            "scoring": scoring,
            "data": [{"object": "score", "index": index, "score": float(value)} for index, value in enumerate(scores)],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return json_answer(answer, headers=response_headers(loaded, ignored))

    return routes


def _scoring_of(model: Model, loaded: Loaded) -> Scoring:
    """Return how the model scores texts. Raise ApiError if the model is neither a reranker nor an embedding model."""
    name, ready = model.spec.name, loaded.ready
    if ready.scoring is not None:
        return ready.scoring
    if ready.classes:
        names = ", ".join(ready.classes[:5])
        message = f"model {name!r} has {len(ready.classes)} classes ({names}); expected a reranker, which has one class"
        raise ApiError(NOT_A_CLASSIFIER, message, param="model")
    message = (
        f"model {name!r} generates text; expected a reranker or a model that was trained for embeddings. If it is Qwen3-Reranker without "
        f'its chat template, set `classifier_from_token` in its config.json to ["no", "yes"]; otherwise {LOAD_TO_EMBED}'
    )
    raise ApiError(NOT_AN_EMBEDDER, message, param="model")


async def _scores(
    request: Request,
    body: VectorOptions,
    model: Model,
    loaded: Loaded,
    context: Context,
    queries: Named,
    documents: Named,
) -> tuple[Vector, int]:
    """Score one query against each document, or each query against the document at the same index. A reranker reads each pair; with an
    embedding model, compare the vectors of each pair. Return the scores and the number of tokens. Raise ApiError if the request has an
    instruction and the model reads none."""
    if body.instruction is not None and loaded.ready.pair_prompt is None:
        raise invalid("instruction", f"instruction is given, and model {model.spec.name!r} reads none with its texts; leave it out")
    if loaded.ready.scoring is Scoring.PAIRS:
        return await _scores_of_pairs(request, body, model, loaded, context, queries, documents)
    vectors, num_tokens = await _vectors(request, body, model, loaded, context, queries, documents)
    count = len(queries[0])

    def compare() -> Vector:
        """Return the cosine similarity of each pair, which is the product of its vectors, because all vectors have length 1."""
        return (np.stack(vectors[:count]) * np.stack(vectors[count:])).sum(axis=1)

    return await off_loop(sum(vector.nbytes for vector in vectors), compare), num_tokens


async def _scores_of_pairs(
    request: Request, body: VectorOptions, model: Model, loaded: Loaded, context: Context, queries: Named, documents: Named
) -> tuple[Vector, int]:
    """Score pairs of texts with a reranker. Return the scores and the number of tokens. Raise ApiError if there are too many texts, if a
    pair is too long, if a field asks for something that rerankers cannot do, or if the scores cannot be computed."""
    prompt = loaded.ready.pair_prompt
    cuts_left = body.truncation_side == "left" and body.truncate_prompt_tokens is not None
    for param, is_asked in (("truncation_side", cuts_left), ("add_special_tokens", body.add_special_tokens is False)):
        if is_asked:
            reason = "a reranker reads the beginnings of both texts, in the form in which it was trained; leave it out"
            raise ApiError(UNSUPPORTED_FIELD, f"{param} is {getattr(body, param)!r}: {reason}", param=param)

    def plan() -> list[Pair]:
        """Return the tokens of each pair of a query and a document."""
        count = len(documents[0])
        if count > context.settings.max_inputs:
            raise invalid(documents[1], f"{documents[1]} has {count} texts; expected at most {context.settings.max_inputs}")
        keep = kept_alone(body.truncate_prompt_tokens, context_of(loaded))
        with without_answer():
            if prompt is not None:
                asked = list(zip(list(queries[0]) * (count // len(queries[0])), documents[0], strict=True))
                return _prompted(asked, prompt, body.instruction, loaded, keep, documents[1])
            first, second = (_pieces(texts, loaded, keep) for texts in (queries, documents))
            return [_joined(a, b, loaded, keep, documents[1]) for a, b in zip(first * (count // len(first)), second, strict=True)]

    pairs = await off_loop(caller(request).num_body_bytes, plan)
    asked = EmbeddingBody.model_construct(normalize=False, timeout=body.timeout)
    prompts, seconds = [pair.ids for pair in pairs], [pair.second for pair in pairs]
    numbers = await embed_all(request, prompts, asked, model, loaded, context, seconds=seconds)
    return scores_of(loaded.ready, np.concatenate(numbers)), sum(map(len, prompts))


def _prompted(
    asked: Sequence[tuple[str, str]], prompt: PairPrompt, instruction: str | None, loaded: Loaded, keep: int | None, param: str
) -> list[Pair]:
    """Build the model's prompt for each pair of query and document. With `keep`, a prompt of more than `keep` tokens is cut: the end of the
    document is removed, and if that is not enough, the end of the query. The instruction and the texts `before` and `after` of `prompt`
    always remain. If `instruction` is None or empty, use the instruction of `prompt`. Raise ApiError if a prompt exceeds the context, or
    `keep` leaves no token of the texts."""
    context = context_of(loaded)
    first, second, third = prompt.marks
    opening = f"{first}{instruction or prompt.instruction}{second}"
    before, opened, after = encode_texts([prompt.before, opening, prompt.after], loaded.tokenizer, special=False)
    room = None if keep is None else _room(keep, context, len(before) + len(opened) + len(after)) + len(opened)
    texts = [f"{opening}{query}{third}{document}" for query, document in asked]
    bodies = encode_prompts(texts, loaded.tokenizer, param, special=False, context=context, keep=room, side="right")
    pairs = [Pair([*before, *body, *after], None) for body in bodies]
    if (most := max(len(pair.ids) for pair in pairs)) > context:
        raise too_long(context, f"a pair of texts has {most} tokens in the model's prompt", param)
    return pairs


def _pieces(texts: Named, loaded: Loaded, keep: int | None) -> list[list[int]]:
    """Return the tokens of each text. With `keep`, texts of more than `keep` tokens are truncated at their end. Without `keep`, raise
    ApiError for a text that certainly exceeds the context; `_joined` checks the length of the pairs."""
    given, param = texts
    return encode_prompts(given, loaded.tokenizer, param, special=False, context=context_of(loaded), keep=keep, side="right")


def _joined(first: list[int], second: list[int], loaded: Loaded, keep: int | None, param: str) -> Pair:
    """Join two texts into a pair. With `keep`, the second text is truncated before the first, because the query matters more than the end
    of a document. Raise ApiError if the pair is empty or exceeds the context, or if `keep` leaves no token of the texts."""
    template, context = loaded.tokenizer.pair_template, context_of(loaded)
    if keep is not None:
        room = _room(keep, context, template.num_special)
        first = first[:room]
        second = second[: room - len(first)]
    pair = template.join(first, second)
    if not pair.ids or len(pair.ids) > context:
        raise too_long(context, f"a pair of texts has {len(pair.ids)} tokens", param)
    return pair


def _room(keep: int, context: int, num_around: int) -> int:
    """Return how many tokens of the two texts fit into a pair of `keep` tokens, of which `num_around` belong to the model's prompt. Raise
    ApiError if no token fits, because then all pairs would be equal."""
    if (room := min(keep, context) - num_around) >= 1:
        return room
    why = f"because the model's prompt takes {num_around} tokens besides the texts"
    raise invalid("truncate_prompt_tokens", f"truncate_prompt_tokens is {keep}; expected at least {num_around + 1}, {why}")


async def _vectors(
    request: Request,
    body: VectorOptions,
    model: Model,
    loaded: Loaded,
    context: Context,
    queries: Named,
    documents: Named,
) -> tuple[list[Vector], int]:
    """Embed queries and documents. If the model has prompts for queries or documents, they precede the texts. Return the vectors, those of
    the queries first, and the number of tokens."""

    def plan() -> list[list[int]]:
        """Return the tokens of the queries, and then those of the documents."""
        asked = _planned(queries, "query", body, model, loaded, context.settings)
        return asked + _planned(documents, "document", body, model, loaded, context.settings)

    prompts = await off_loop(caller(request).num_body_bytes, plan)
    asked = EmbeddingBody.model_construct(normalize=True, timeout=body.timeout)
    return await embed_all(request, prompts, asked, model, loaded, context), sum(map(len, prompts))


def _planned(texts: Named, kind: str, body: VectorOptions, model: Model, loaded: Loaded, settings: ServerSettings) -> list[list[int]]:
    """Return the tokens of each text. `kind` is "query" or "document": if the model has prompts, the prompt for this kind precedes each
    text."""
    given, param = texts
    asked = EmbeddingBody.model_construct(
        input=list(given),
        input_type=kind if loaded.ready.prompts else None,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        add_special_tokens=body.add_special_tokens,
    )
    with in_words({"input": param}):
        return plan_embedding(asked, None, model, loaded, settings)
