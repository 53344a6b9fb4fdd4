"""POST /v2/embed, in Cohere's shape. Cohere's rerank is in `rerank.py`."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from server.api.answer.respond import Pieces, response_headers
from server.api.context import Context, caller
from server.api.request.fields import Options
from server.api.request.prepare import invalid, off_loop
from server.api.request.schema import EmbeddingBody, Int, Label, Text
from server.api.request.words import in_words
from server.api.routes import gives, new_router
from server.api.vectors import Vector, embed_all, plan_embedding

encode = msgspec.json.encode
Form = Literal["float", "base64"]
NAMES = {  # for errors: field of /v1/embeddings -> field of this API
    "input": "texts",
    "dimensions": "output_dimension",
    "truncate_prompt_tokens": "truncate",
}


class CohereEmbedBody(Options):
    """The body of /v2/embed."""

    model: Label
    texts: Annotated[list[Text], Field(min_length=1, max_length=2048, fail_fast=True)]
    input_type: Label | None = None  # no effect if the model has no prompts for types of input
    embedding_types: Annotated[list[Form], Field(max_length=8, fail_fast=True)] | None = None  # None, or empty: float
    output_dimension: Int | None = Field(default=None, ge=1)
    truncate: Literal["NONE", "START", "END"] | None = None  # None: END
    priority: Int | None = None  # no effect: embeddings have no priorities


class CohereMeta(TypedDict):
    billed_units: Mapping[str, int]


class CohereEmbedded(TypedDict):
    id: str
    texts: Sequence[str]
    meta: CohereMeta
    embeddings: Mapping[str, Sequence[Any]]


def router(context: Context) -> APIRouter:
    routes = new_router("Embeddings")

    @routes.post("/v2/embed", responses=gives(CohereEmbedded))
    async def embed(request: Request, body: CohereEmbedBody) -> Response:
        """Turn texts into vectors. `truncate` names the side at which texts beyond the context are truncated; with NONE, such texts are
        refused. An empty text is always refused."""
        model, loaded, ignored = context.begin(request, body, body.model)
        forms: list[Form] = list(dict.fromkeys(body.embedding_types or ()) or ("float",))
        asked = EmbeddingBody.model_construct(
            input=body.texts,
            input_type=body.input_type if loaded.ready.prompts else None,
            dimensions=body.output_dimension,
            truncate_prompt_tokens=None if body.truncate == "NONE" else -1,
            truncation_side="left" if body.truncate == "START" else None,
        )
        if not all(body.texts):
            raise invalid("texts", "texts has an empty text; expected at least one character in each")
        size = caller(request).num_body_bytes
        with in_words(NAMES):
            prompts = await off_loop(size, lambda: plan_embedding(asked, None, model, loaded, context.settings))
        vectors = await embed_all(request, prompts, asked, model, loaded, context)
        head = encode({"id": secrets.token_hex(16), "texts": body.texts})[:-1]
        units = encode({"billed_units": {"input_tokens": sum(map(len, prompts))}})
        pieces = await off_loop(sum(vector.nbytes for vector in vectors), lambda: _written(vectors, forms))
        return Pieces([head + b',"meta":' + units + b',"embeddings":{', *pieces, b"}}"], response_headers(loaded, ignored))

    return routes


def _written(vectors: Sequence[Vector], forms: Sequence[Form]) -> list[bytes]:
    """Return the members of the JSON object `embeddings`: for each of `forms`, a list of the vectors in this form. The JSON is in small
    pieces, because encoding it in one call would delay other requests."""
    pieces: list[bytes] = []
    for number, form in enumerate(forms):
        pieces.append((b',"%b":[' if number else b'"%b":[') % form.encode())
        for index, vector in enumerate(vectors):
            value = vector.tolist() if form == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()
            pieces.append((b"," if index else b"") + encode(value))
        pieces.append(b"]")
    return pieces
