"""llama.cpp's own API: /completion, /infill, /apply-template, /props and /slots. llama.cpp's /tokenize is in `server/api/tokenize.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from typing_extensions import TypedDict

from server.api.answer.generate import Generation
from server.api.answer.respond import json_answer, respond, response_headers
from server.api.answer.sse import Framing
from server.api.context import Context, caller
from server.api.health import distribution_version
from server.api.llama_cpp.answer import LlamaAnswer, LlamaCompletion, LlamaPart
from server.api.llama_cpp.body import LlamaCompletionBody, LlamaInfillBody, LlamaSampling
from server.api.llama_cpp.media import MARKER, WrittenPrompts, with_media
from server.api.openai.chat import Conversation, conversation_of, markers_of, render_prompt
from server.api.openai.completions import plan_completion
from server.api.request.limits import check_sizes
from server.api.request.media import without_data
from server.api.request.prepare import context_of, off_loop
from server.api.request.schema import ChatBody, functions_among
from server.api.request.texts import encode_prompts
from server.api.request.words import in_words
from server.api.routes import gives, new_router, schema_of
from server.errors import MODEL_NOT_READY, UNSUPPORTED_FIELD, ApiError
from server.models.model import Loaded, Model

FRAMING = Framing(end=b"")
NAMES = {"max_tokens": "n_predict", "n": "n_cmpl", "logprobs": "n_probs"}  # fields of a completion, and their names in this API
COMPLETIONS = gives(LlamaCompletion, {"type": "array", "items": schema_of(LlamaCompletion)}, event=LlamaPart, done=False)
ModelName = Annotated[str | None, Query(max_length=1024)]


class LlamaPrompt(TypedDict):
    prompt: str


class LlamaModalities(TypedDict):
    vision: bool
    audio: bool


class LlamaDefaults(TypedDict):
    """The default settings of a completion, in the shape of a slot: `params` has the settings, and the other fields are those that every
    slot has."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    params: Mapping[str, Any]


class LlamaProps(TypedDict):
    """The model and the default settings of a completion. A slot is a place for a running sequence; the model has `total_slots` of them."""

    default_generation_settings: LlamaDefaults
    total_slots: int
    model_alias: str  # the model's name
    model_path: str  # the model's name as well, instead of a path
    chat_template: str
    modalities: LlamaModalities
    media_marker: str  # stands for an image or a recording in prompts
    build_info: str
    is_sleeping: bool


class LlamaSlot(TypedDict):
    """A place for a running sequence. The server does not report which sequence has which slot: the first slots count as in use, one for
    each running sequence."""

    id: int
    id_task: int  # always -1
    n_ctx: int
    speculative: bool
    is_processing: bool


def router(context: Context) -> APIRouter:
    routes = new_router("llama.cpp")
    settings = context.settings

    async def complete(request: Request, body: LlamaSampling, write: Callable[[Model, Loaded], Awaitable[WrittenPrompts]]) -> Response:
        """Answer a request. `write` makes the prompts for the request's model. The field `samplers`, the order of samplers, is ignored, or
        refused if the server is strict. Raise ApiError if the model cannot answer, or if a field is not accepted."""
        model, loaded, ignored = context.begin(request, body, body.model)
        if body.samplers:
            if settings.strict:
                raise ApiError(UNSUPPORTED_FIELD, "samplers is not supported: the order of samplers is fixed", param="samplers")
            ignored.append("samplers")  # editors send `samplers` with each request
        who, series = caller(request), context.metrics_of(model.spec.name)
        await off_loop(who.num_body_bytes, lambda: check_sizes(body))
        written = await write(model, loaded)

        def prepare() -> LlamaAnswer:
            asked = body.completion(written.prompts, loaded.tokenizer, loaded.defaults.max_tokens)
            if any(written.excerpts):
                # `with_media` has refused all values but None and -1. None for -1 means that prompts without files are not shortened
                # either: a prompt that is too long is refused.
                asked.truncate_prompt_tokens = None
            with in_words(NAMES):
                jobs = written.given(plan_completion(asked, model, loaded, who, settings))
            generations = [Generation(loaded, job, series, who) for job in jobs]
            return LlamaAnswer(body, jobs, generations, body.model or model.spec.name, loaded)

        answer = await off_loop(who.num_body_bytes, prepare)
        headers = response_headers(loaded, ignored)
        return await respond(request, answer, headers, stream=bool(body.stream), settings=settings, framing=FRAMING)

    @routes.post("/completion", responses=COMPLETIONS)
    @routes.post("/completions", include_in_schema=False)
    async def completion(request: Request, body: LlamaCompletionBody) -> Response:
        """Continue one or more prompts."""
        return await complete(request, body, lambda model, loaded: with_media(body, model, loaded, caller(request), settings))

    @routes.post("/infill", responses=COMPLETIONS)
    async def infill(request: Request, body: LlamaInfillBody) -> Response:
        """Write the text between two given texts, with models that have tokens for this task."""

        async def write(_: Model, loaded: Loaded) -> WrittenPrompts:
            return WrittenPrompts(await off_loop(caller(request).num_body_bytes, lambda: _infill_prompt(body, loaded)))

        return await complete(request, body, write)

    @routes.post("/apply-template", responses=gives(LlamaPrompt))
    async def apply_template(request: Request, body: ChatBody) -> Response:
        """Return the prompt that the chat template makes of a conversation, without generating. The prompt has a marker for each image or
        recording, as in prompts of /completion."""
        _, loaded, ignored = context.begin(request, body, body.model)
        markers = markers_of(loaded)

        def make() -> Conversation:
            check_sizes(body)
            return conversation_of(without_data(body), functions_among(body.tools), markers)

        prompt = await render_prompt(make, loaded, caller(request))
        for marker in set(markers.values()):
            prompt = prompt.replace(marker, MARKER)
        rendered: LlamaPrompt = {"prompt": prompt}
        return json_answer(rendered, headers=response_headers(loaded, ignored))

    @routes.get("/props", responses=gives(LlamaProps))
    async def props(request: Request, model: ModelName = None) -> Response:
        """Describe the model and the default settings of a completion."""
        found, loaded = context.serve(request, model)
        return json_answer(_props(found, loaded))

    @routes.get("/slots", responses={**gives({"type": "array", "items": schema_of(LlamaSlot)})})
    async def slots(
        request: Request, model: ModelName = None, fail_on_no_slot: Annotated[str | None, Query(max_length=16)] = None
    ) -> Response:
        """List one slot for each sequence that may run at once. With `fail_on_no_slot`, answer 503 if all slots are in use."""
        found, loaded = context.serve(request, model)
        stats = loaded.worker.stats
        num_running = 0 if stats is None else stats.num_running
        if fail_on_no_slot and num_running >= found.spec.max_batch:
            raise ApiError(MODEL_NOT_READY, f"all {num_running} slots of model {found.spec.name!r} are in use; retry later")
        listed: list[LlamaSlot] = [
            {"id": index, "id_task": -1, "n_ctx": context_of(loaded), "speculative": False, "is_processing": index < num_running}
            for index in range(found.spec.max_batch)
        ]
        return json_answer(listed)

    return routes


def _infill_prompt(body: LlamaInfillBody, loaded: Loaded) -> list[int]:
    """Return the token ids of the fill-in-the-middle prompt: the special tokens that the tokenizer puts before a text, the files of
    `input_extra`, prefix and suffix with their markers, and `prompt`, the beginning of the text that is missing. If the model has a token
    for file names, each file's name precedes it. Raise ApiError if the model has no tokens for filling in the middle, or if a text
    certainly exceeds the context."""
    infill, tokenizer, context = loaded.dialect.infill, loaded.tokenizer, context_of(loaded)
    if infill is None:
        message = "/infill is not supported: this model has no tokens for filling in the middle"
        raise ApiError(UNSUPPORTED_FIELD, message, param="input_suffix")
    prefix, suffix, begun = (
        encode_prompts([text], tokenizer, param, special=False, context=context)[0]
        for text, param in ((body.input_prefix, "input_prefix"), (body.input_suffix, "input_suffix"), (body.prompt, "prompt"))
    )
    extra: list[int] = []
    for snippet in body.input_extra or ():
        if infill.file is not None:
            extra.append(infill.file)
        text = f"{snippet.filename}\n{snippet.text}\n" if infill.file is not None else f"{snippet.text}\n"
        extra += encode_prompts([text], tokenizer, "input_extra", special=False, context=context)[0]
    return [*tokenizer.encode("", add_special_tokens=True), *extra, *infill.prompt(prefix, suffix), *begun]


def _props(model: Model, loaded: Loaded) -> LlamaProps:
    """Describe a model in llama.cpp's shape."""
    params = loaded.sampling
    params["repeat_penalty"] = params.pop("repetition_penalty")
    template = loaded.tokenizer.chat_template
    return {
        "default_generation_settings": {
            "id": 0,
            "n_ctx": context_of(loaded),
            "speculative": False,
            "is_processing": False,
            "params": {"n_predict": loaded.defaults.max_tokens or -1, "seed": -1, **params},
        },
        "total_slots": model.spec.max_batch,
        "model_alias": model.spec.name,
        "model_path": model.spec.name,  # the path is shown only to administrators, at /admin/models
        "chat_template": "" if template is None else template.source,
        "modalities": {"vision": loaded.sight is not None, "audio": loaded.ears is not None},
        "media_marker": MARKER,
        "build_info": f"relaxserve-{distribution_version()}",
        "is_sleeping": model.is_sleeping,
    }
