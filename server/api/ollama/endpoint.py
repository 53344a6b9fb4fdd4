"""Ollama's API under /api: chat, generate, embed, and descriptions of models. The administration loads and unloads models."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from server.api.answer.generate import Generation
from server.api.answer.respond import Pieces, json_answer, respond, response_headers
from server.api.answer.sse import Framing
from server.api.context import Context, caller
from server.api.health import distribution_version
from server.api.ollama.answer import OllamaAnswer, OllamaChat, OllamaGenerated, now
from server.api.ollama.body import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
    chat_of,
    chat_of_prompt,
    completion_of,
)
from server.api.openai.chat import plan_chat
from server.api.openai.completions import plan_completion
from server.api.request.fields import Options, check_unknown
from server.api.request.limits import check_sizes
from server.api.request.prepare import ChatPlan, context_of, off_loop, require_generator
from server.api.request.schema import ChatBody, EmbeddingBody
from server.api.routes import Responses, gives, new_router, schema_of
from server.api.vectors import Vector, embed_all, plan_embedding
from server.errors import MODEL_NOT_FOUND, ApiError
from server.models.model import Loaded, Model, ModelState

encode = msgspec.json.encode


class OllamaDetails(TypedDict):
    parent_model: str
    format: str
    family: str
    families: Sequence[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(TypedDict):
    models: Sequence[OllamaModel]


class OllamaRunning(OllamaModel):
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(TypedDict):
    models: Sequence[OllamaRunning]


class OllamaShown(TypedDict):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: Mapping[str, Any]
    capabilities: Sequence[str]
    modified_at: str


class OllamaEmbedded(TypedDict):
    model: str
    embeddings: Sequence[Sequence[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(TypedDict):
    embedding: Sequence[float]


class OllamaVersion(TypedDict):
    version: str


class OllamaError(TypedDict):
    """Ollama's error shape, with `code` and `param` as in our other errors."""

    error: str
    code: str
    param: str | None


def error_body(error: ApiError) -> bytes:
    told: OllamaError = {"error": error.message, "code": error.kind.code, "param": error.param}
    return encode(told)


ERROR_SHAPES = {"/api": error_body}
FRAMING = Framing(error_body, lines=True, end=b"")
NEVER = "9999-12-31T23:59:59Z"  # models stay loaded until they are unloaded


def router(context: Context) -> APIRouter:
    routes, settings, registry = new_router("Ollama", error_shape=OllamaError), context.settings, context.registry

    def serve(name: str) -> tuple[Model, Loaded]:
        """Find a model by name, also without the tag `:latest`, which Ollama's clients add to names that have no tag."""
        try:
            return registry.serve(name)
        except ApiError as error:
            if error.kind is not MODEL_NOT_FOUND or not name.endswith(":latest"):
                raise
            return registry.serve(name.removesuffix(":latest"))

    async def answer(
        request: Request, plan: ChatPlan, body: OllamaChatBody | OllamaGenerateBody, ignored: list[str], model: Model, loaded: Loaded
    ) -> Response:
        headers = response_headers(loaded, ignored)
        generation = Generation(loaded, plan.job, context.metrics_of(model.spec.name), caller(request))
        made = OllamaAnswer(plan, generation, body.model, is_chat=isinstance(body, OllamaChatBody))
        return await respond(request, made, headers, stream=body.streams, settings=settings, framing=FRAMING)

    @routes.post("/api/chat", responses=_lines(OllamaChat))
    async def chat(request: Request, body: OllamaChatBody) -> Response:
        """Answer a conversation."""
        ignored = check_unknown(body, strict=settings.strict)
        model, loaded = serve(body.model)
        if not body.messages:
            return _loaded(body.model, {"message": {"role": "assistant", "content": ""}})
        made = await _made(request, body, lambda: chat_of(body))
        return await answer(request, await plan_chat(made, model, loaded, caller(request), settings), body, ignored, model, loaded)

    @routes.post("/api/generate", responses=_lines(OllamaGenerated))
    async def generate(request: Request, body: OllamaGenerateBody) -> Response:
        """Answer a prompt. If the request is `raw` or has a suffix, continue the prompt without a chat template."""
        ignored = check_unknown(body, strict=settings.strict)
        model, loaded = serve(body.model)
        if not body.prompt:
            return _loaded(body.model, {"response": ""})
        who = caller(request)
        if not (body.raw or body.suffix):
            made = await _made(request, body, lambda: chat_of_prompt(body))
            return await answer(request, await plan_chat(made, model, loaded, who, settings), body, ignored, model, loaded)
        require_generator(model, loaded)

        def plan() -> ChatPlan:
            check_sizes(body)
            (job,) = plan_completion(completion_of(body), model, loaded, who, settings)
            return ChatPlan(body.prompt or "", job, loaded.dialect.rules(split_reasoning=False))

        return await answer(request, await off_loop(who.num_body_bytes, plan), body, ignored, model, loaded)

    @routes.post("/api/embed", responses=gives(OllamaEmbedded))
    async def embed(request: Request, body: OllamaEmbedBody) -> Response:
        """Turn texts into vectors. A text that is too long is truncated at its end, unless `truncate` is false."""
        ignored, began_s = check_unknown(body, strict=settings.strict), time.monotonic()
        model, loaded = serve(body.model)
        keep = None if body.truncate is False else -1
        asked = EmbeddingBody.model_construct(
            input=body.input, dimensions=body.dimensions, normalize=True, truncate_prompt_tokens=keep, truncation_side="right"
        )
        vectors, num_tokens = await _embedded(request, asked, model, loaded, context)
        further = {"total_duration": round((time.monotonic() - began_s) * 1e9), "load_duration": 0, "prompt_eval_count": num_tokens}
        pieces = [b'{"model":' + encode(body.model) + b',"embeddings":[']
        pieces += [(b"," if index else b"") + encode(vector.tolist()) for index, vector in enumerate(vectors)]
        return Pieces([*pieces, b"]," + encode(further)[1:]], response_headers(loaded, ignored))

    @routes.post("/api/embeddings", responses=gives(OllamaEmbedding))
    async def embeddings(request: Request, body: OllamaEmbeddingsBody) -> Response:
        """Turn one text into a vector. /api/embed supersedes this endpoint."""
        ignored = check_unknown(body, strict=settings.strict)
        model, loaded = serve(body.model)
        asked = EmbeddingBody.model_construct(input=body.prompt, truncate_prompt_tokens=-1, truncation_side="right")
        (vector,), _ = await _embedded(request, asked, model, loaded, context)
        embedded: OllamaEmbedding = {"embedding": vector.tolist()}
        return json_answer(embedded, headers=response_headers(loaded, ignored))

    @routes.get("/api/tags", responses=gives(OllamaModels))
    async def tags() -> Response:
        """List the loaded models."""
        listed: OllamaModels = {"models": [_described(model) for model in registry.models() if model.state is ModelState.READY]}
        return json_answer(listed)

    @routes.get("/api/ps", responses=gives(OllamaRunningModels))
    async def ps() -> Response:
        """List the loaded models, which Ollama calls running models."""
        found = [(model, model.loaded) for model in registry.models() if model.state is ModelState.READY]
        running: list[OllamaRunning] = [
            {**_described(model), "expires_at": NEVER, "size_vram": 0, "context_length": context_of(loaded)}
            for model, loaded in found
            if loaded is not None
        ]
        listed: OllamaRunningModels = {"models": running}
        return json_answer(listed)

    @routes.post("/api/show", responses=gives(OllamaShown))
    async def show(body: OllamaShowBody) -> Response:
        """Describe a model and its capabilities."""
        ignored = check_unknown(body, strict=settings.strict)
        model, loaded = serve(body.model)
        return json_answer(_shown(model, loaded), headers=response_headers(loaded, ignored))

    @routes.get("/api/version", responses=gives(OllamaVersion))
    async def version() -> Response:
        """Return the version of this server."""
        told: OllamaVersion = {"version": distribution_version()}
        return json_answer(told)

    return routes


def _lines(shape: type) -> Responses:
    return {200: {"content": {**gives(shape)[200]["content"], "application/x-ndjson": {"itemSchema": schema_of(shape)}}}}


def _loaded(model: str, empty: Mapping[str, object]) -> Response:
    """Answer a request without a prompt. Ollama would load the model, which is loaded already."""
    return json_answer({"model": model, "created_at": now(), **empty, "done": True, "done_reason": "load"})


async def _made(request: Request, body: Options, make: Callable[[], ChatBody]) -> ChatBody:
    def made() -> ChatBody:
        check_sizes(body)
        return make()

    return await off_loop(caller(request).num_body_bytes, made)


async def _embedded(request: Request, asked: EmbeddingBody, model: Model, loaded: Loaded, context: Context) -> tuple[list[Vector], int]:
    size = caller(request).num_body_bytes
    prompts = await off_loop(size, lambda: plan_embedding(asked, None, model, loaded, context.settings))
    return await embed_all(request, prompts, asked, model, loaded, context), sum(map(len, prompts))


def _described(model: Model) -> OllamaModel:
    identity = f"{model.spec.name} {model.loaded.ready.signature if model.loaded is not None else ''}"
    return {
        "name": model.spec.name,
        "model": model.spec.name,
        "modified_at": model.created_at,
        "size": model.total_bytes,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),
        "details": _details(model),
    }


def _details(model: Model) -> OllamaDetails:
    quantization = model.spec.quantize
    return {
        "parent_model": "",
        "format": "relaxserve",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": quantization,
    }


def _shown(model: Model, loaded: Loaded) -> OllamaShown:
    has_template = loaded.ready.generates and loaded.renderer is not None
    capabilities = {
        "completion": loaded.ready.generates,
        "tools": has_template,
        "thinking": has_template and loaded.dialect.thinks,
        "insert": loaded.ready.generates and loaded.dialect.infill is not None,
        "embedding": bool(loaded.ready.embedding_size),
    }
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(model),
        "model_info": {
            "general.architecture": "relaxserve",
            "general.basename": model.spec.name,
            "relaxserve.context_length": context_of(loaded),
            "relaxserve.embedding_length": loaded.ready.embedding_size,
        },
        "capabilities": [name for name, has in capabilities.items() if has],
        "modified_at": model.created_at,
    }
