"""Ollama's API under /api: chat, generate, embed, and descriptions of models. `models.py` has the endpoints that load and unload models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
from fastapi import APIRouter, Request, Response
from typing_extensions import TypedDict

from server.api.answer.generate import Generation
from server.api.answer.respond import Pieces, in_pieces, json_answer, respond, response_headers
from server.api.answer.sse import Framing
from server.api.context import Context, caller
from server.api.ollama.answer import OllamaAnswer, OllamaChat, OllamaGenerated
from server.api.ollama.body import (
    NAMES,
    OF_PROMPT,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
    chat_of,
    chat_of_prompt,
    completion_of,
)
from server.api.ollama.description import OllamaModels, OllamaRunningModels, OllamaShown, described, running, shown
from server.api.ollama.keeping import Keeping
from server.api.openai.chat import plan_chat
from server.api.openai.completions import plan_completion
from server.api.request.fields import Options
from server.api.request.limits import check_sizes
from server.api.request.prefix import prefix_header
from server.api.request.prepare import ChatPlan, capped_header, off_loop, require_generator
from server.api.request.schema import ChatBody, EmbeddingBody
from server.api.request.words import in_words
from server.api.routes import Responses, gives, new_router, schema_of
from server.api.vectors import Vector, embed_all, plan_embedding
from server.errors import ApiError
from server.models.model import Loaded, Model, ModelState
from server.models.sleep import wake_up

encode = msgspec.json.encode
# The first version of Ollama that has /v1/messages. Some clients refuse versions that are too low for them. If this version were higher,
# clients might expect endpoints that this server does not have.
OLLAMA = "0.14.0"


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
    """Ollama's error shape, with `code` and `param` as in the errors of the other APIs."""

    error: str
    code: str
    param: str | None


def error_body(error: ApiError) -> bytes:
    """Encode an error in Ollama's shape."""
    told: OllamaError = {"error": error.message, "code": error.kind.code, "param": error.param}
    return encode(told)


ERROR_SHAPES = {"/api": error_body}
FRAMING = Framing(error_body, lines=True, end=b"")


def router(context: Context) -> APIRouter:
    routes, settings = new_router("Ollama", error_shape=OllamaError), context.settings
    keeping = Keeping(settings)

    def ready(request: Request) -> list[tuple[str, Model, Loaded]]:
        """Return each name of each ready model that the caller may use, as (name, model, `Loaded`). A model's own name precedes its
        aliases."""
        seen = context.models_for(request)
        return [
            (name, model, model.loaded.variants.get(name, model.loaded))
            for model in seen.models()
            if model.state is ModelState.READY and model.loaded is not None
            for name in seen.names_of(model)
        ]

    async def answer(
        request: Request,
        plan: ChatPlan,
        body: OllamaChatBody | OllamaGenerateBody,
        ignored: list[str],
        model: Model,
        loaded: Loaded,
        *,
        asked: ChatBody | None = None,
    ) -> Response:
        """Generate the answer for a plan, and return the response. `ignored`: fields of the request that have no effect; further ones are
        added to this list. `asked`: the chat request, if the chat template made the prompt."""
        let_go = keeping.after(model, body, caller(request))
        ignored += body.ineffective + (["keep_alive"] if let_go is None and body.lets_go else [])
        if body.think and not (loaded.chats and loaded.dialect.thinks):
            ignored.append("think")
        num_asked = None if body.options is None else body.options.num_predict
        headers = response_headers(loaded, ignored) | capped_header(num_asked, plan.job, name="options.num_predict")
        headers |= {} if asked is None else await prefix_header(asked, plan, loaded)
        generation = Generation(loaded, plan.job, context.metrics_of(model.spec.name), caller(request))
        is_chat = isinstance(body, OllamaChatBody)
        made = OllamaAnswer(plan, generation, loaded, body.model, is_chat=is_chat, ended=let_go)
        return await respond(request, made, headers, stream=body.streams, settings=settings, framing=FRAMING)

    @routes.post("/api/chat", responses=_lines(OllamaChat))
    async def chat(request: Request, body: OllamaChatBody) -> Response:
        """Answer a conversation. Without messages, wake the model and answer once it is ready, or put it to sleep if `keep_alive` is 0."""
        model, loaded, ignored = context.begin(request, body, body.model)
        if not body.messages:
            return await keeping.answer(model, body, caller(request), {"message": {"role": "assistant", "content": ""}})
        made = await _made(request, body, lambda: chat_of(body))
        with in_words(NAMES):
            plan = await plan_chat(made, model, loaded, caller(request), settings)
        return await answer(request, plan, body, ignored, model, loaded, asked=made)

    @routes.post("/api/generate", responses=_lines(OllamaGenerated))
    async def generate(request: Request, body: OllamaGenerateBody) -> Response:
        """Answer a prompt. If the request is `raw` or has a suffix, or the model has no chat template, continue the prompt as it is.
        Without a prompt, wake the model and answer once it is ready, or put it to sleep if `keep_alive` is 0."""
        model, loaded, ignored = context.begin(request, body, body.model)
        if not body.prompt:
            return await keeping.answer(model, body, caller(request), {"response": ""})
        who = caller(request)
        if not (body.raw or body.suffix or loaded.renderer is None):
            made = await _made(request, body, lambda: chat_of_prompt(body))
            with in_words(OF_PROMPT):
                planned = await plan_chat(made, model, loaded, who, settings)
            return await answer(request, planned, body, ignored, model, loaded, asked=made)
        require_generator(model, loaded)

        def plan() -> ChatPlan:
            check_sizes(body)
            with in_words(NAMES):
                (job,) = plan_completion(completion_of(body, loaded.defaults.max_tokens), model, loaded, who, settings)
            return ChatPlan(body.prompt or "", job, loaded.dialect.rules(split_reasoning=False))

        return await answer(request, await off_loop(who.num_body_bytes, plan), body, ignored, model, loaded)

    @routes.post("/api/embed", responses=gives(OllamaEmbedded))
    async def embed(request: Request, body: OllamaEmbedBody) -> Response:
        """Turn texts into vectors. A text that is too long is truncated at its end, unless `truncate` is false. A request without texts
        wakes the model."""
        began_s = time.monotonic()
        model, loaded, ignored = context.begin(request, body, body.model)
        keep = None if body.truncate is False else -1
        asked = EmbeddingBody.model_construct(input=body.input, dimensions=body.dimensions, normalize=True, truncate_prompt_tokens=keep)
        vectors, num_tokens = list[Vector](), 0
        if body.input:
            with in_words({"truncate_prompt_tokens": "truncate"}):
                vectors, num_tokens = await _embedded(request, asked, model, loaded, context)
        else:
            await wake_up(model)
        embedded: OllamaEmbedded = {
            "model": body.model,
            "embeddings": [],
            "total_duration": round((time.monotonic() - began_s) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": num_tokens,
        }

        def write() -> list[bytes]:
            return in_pieces(embedded, "embeddings", (encode(vector.tolist()) for vector in vectors))

        return Pieces(await off_loop(sum(vector.nbytes for vector in vectors), write), response_headers(loaded, ignored))

    @routes.post("/api/embeddings", responses=gives(OllamaEmbedding))
    async def embeddings(request: Request, body: OllamaEmbeddingsBody) -> Response:
        """Turn one text into a vector. A request without a text wakes the model. /api/embed supersedes this endpoint."""
        model, loaded, ignored = context.begin(request, body, body.model)
        if not body.prompt:
            await wake_up(model)
            nothing: OllamaEmbedding = {"embedding": ()}
            return json_answer(nothing, headers=response_headers(loaded, ignored))
        asked = EmbeddingBody.model_construct(input=body.prompt, truncate_prompt_tokens=-1)
        with in_words({"input": "prompt"}):
            (vector,), _ = await _embedded(request, asked, model, loaded, context)
        embedded: OllamaEmbedding = {"embedding": vector.tolist()}
        return json_answer(embedded, headers=response_headers(loaded, ignored))

    @routes.get("/api/tags", responses=gives(OllamaModels))
    async def tags(request: Request) -> Response:
        """List the models that are ready, each of them by all its names."""
        listed: OllamaModels = {"models": [described(*one) for one in ready(request)]}
        return json_answer(listed)

    @routes.get("/api/ps", responses=gives(OllamaRunningModels))
    async def ps(request: Request) -> Response:
        """List the models that are ready and do not sleep, which Ollama calls running models, each of them by one name."""
        await context.registry.measuring.measure()
        awake = {model.spec.name: (name, model, loaded) for name, model, loaded in reversed(ready(request)) if not model.is_sleeping}
        listed: OllamaRunningModels = {"models": [running(*one) for one in reversed(awake.values())]}
        return json_answer(listed)

    @routes.post("/api/show", responses=gives(OllamaShown))
    async def show(request: Request, body: OllamaShowBody) -> Response:
        """Describe a model and its capabilities."""
        model, loaded, ignored = context.begin(request, body, body.model)
        return json_answer(shown(body.model, model, loaded), headers=response_headers(loaded, ignored))

    @routes.get("/api/version", responses=gives(OllamaVersion))
    async def version() -> Response:
        """Return the version of Ollama whose API this server implements. /version returns the version of this server."""
        told: OllamaVersion = {"version": OLLAMA}
        return json_answer(told)

    return routes


def _lines(shape: type) -> Responses:
    """Return the description of an endpoint that answers with one object, or with a stream of lines."""
    return {200: {"content": {**gives(shape)[200]["content"], "application/x-ndjson": {"itemSchema": schema_of(shape)}}}}


async def _made(request: Request, body: Options, make: Callable[[], ChatBody]) -> ChatBody:
    """Return the chat request that `make` makes of a body, after checking the body's sizes."""

    def made() -> ChatBody:
        check_sizes(body)
        return make()

    return await off_loop(caller(request).num_body_bytes, made)


async def _embedded(request: Request, asked: EmbeddingBody, model: Model, loaded: Loaded, context: Context) -> tuple[list[Vector], int]:
    """Return the vectors of an embedding request, and the number of its tokens."""
    size = caller(request).num_body_bytes
    prompts = await off_loop(size, lambda: plan_embedding(asked, None, model, loaded, context.settings))
    return await embed_all(request, prompts, asked, model, loaded, context), sum(map(len, prompts))
