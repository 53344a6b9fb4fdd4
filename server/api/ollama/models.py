"""Ollama's /api/pull, /api/delete, /api/copy and /api/create: download and load a model, unload and delete it, or give it a further name.
These endpoints are only for admins."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, NotRequired

import msgspec
from fastapi import APIRouter, Response
from pydantic import AliasChoices, BeforeValidator, Field
from typing_extensions import TypedDict

from server.api.admin.endpoint import LoadBody, defaults_of, spec_of
from server.api.answer.sse import EventStream
from server.api.context import Context
from server.api.ollama.description import PARAMETERS
from server.api.ollama.endpoint import FRAMING, OllamaError
from server.api.request.fields import NEUTRAL, Options, check_unknown, ignored_header
from server.api.request.prepare import context_of
from server.api.request.schema import Label, Text
from server.api.routes import ADMINISTRATION, Responses, gives, new_router, schema_of
from server.defaults import Defaults
from server.errors import INVALID_SOURCE, INVALID_VALUE, MISSING_FIELD, MODEL_NOT_FOUND, UNSUPPORTED_FIELD, ApiError
from server.interfaces import LoadError
from server.models.aliases import LATEST, names_like
from server.models.operations import OperationState
from server.models.probe import PLAIN
from server.models.registry import Registry
from server.models.sources import is_hub_id, resolve, without_host
from server.models.state import NAME, ModelSpec
from server.settings import ServerSettings

Alias = Annotated[
    str, BeforeValidator(lambda name: name.removesuffix(LATEST) if isinstance(name, str) else name), Field(pattern=NAME, max_length=128)
]
CREATED = "a created model has the weights and the adapters of another; quantise with `relaxserve serve --quantize`"
encode = msgspec.json.encode


class OllamaPullBody(Options):
    """The body of /api/pull."""

    model: Label = Field(validation_alias=AliasChoices("model", "name"))
    stream: bool | None = None  # None: true
    insecure: bool | None = None  # no effect: downloads always go through the hub's own client


class OllamaDeleteBody(Options):
    """The body of /api/delete."""

    model: Label = Field(validation_alias=AliasChoices("model", "name"))


class OllamaCopyBody(Options):
    """The body of /api/copy."""

    source: Label
    destination: Alias


class OllamaCreateBody(Options):
    """The body of /api/create: a further name of a model, and the defaults of this name."""

    model: Alias = Field(validation_alias=AliasChoices("model", "name"))
    source: Label | None = Field(default=None, alias="from")
    system: Text | None = None
    template: Text | None = None
    parameters: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    stream: bool | None = None  # None: true


class OllamaProgress(TypedDict):
    """A line about the progress of a request."""

    status: str
    digest: NotRequired[str]
    total: NotRequired[int]
    completed: NotRequired[int]


def router(context: Context) -> APIRouter:
    routes, settings, registry = new_router(ADMINISTRATION, error_shape=OllamaError), context.settings, context.registry

    @routes.post("/api/pull", responses=_lines())
    async def pull(body: OllamaPullBody) -> Response:
        """Download the missing files of a model, and load it under the requested name. If nothing can be downloaded under the name, but it
        is the name or alias of a loaded model, do nothing."""
        headers = ignored_header(check_unknown(body, strict=settings.strict))
        name = _plain(body.model)
        try:
            spec = spec_of(LoadBody.model_construct(source=name, name=name, quantize=None, dtype=None), registry)
        except ApiError:
            if not _is_served(name, registry):
                raise
            spec = None
        lines = _pulled(spec, registry)
        if body.stream is not False:
            return EventStream(lines, headers, heartbeat_s=settings.heartbeat_s, framing=FRAMING)
        async with aclosing(lines):
            told = [line async for line in lines]
        return Response(told[-1], headers=headers, media_type="application/json")

    @routes.delete("/api/delete", response_class=Response, responses={200: {"description": "The model is gone."}})
    async def delete(body: OllamaDeleteBody) -> Response:
        """Unload a model that the server downloaded, and delete its files from this machine. If the name is an alias, remove only the
        alias."""
        headers = ignored_header(check_unknown(body, strict=settings.strict))
        given = without_host(body.model)
        name = next((one for one in names_like(given) if _is_named(one, registry)), _plain(given))
        if name in registry.aliases():  # the name is an alias, such as /api/copy makes
            await registry.remove_alias(name)
            return Response(headers=headers)
        source = await _unloaded(name, registry, settings)
        try:
            freed = 0 if registry.library is None else await registry.library.remove(source)
        except LoadError as error:
            raise registry.budget.as_api_error(error) from error
        if not freed:
            raise ApiError(MODEL_NOT_FOUND, f"model {body.model!r} is not on this machine", param="model")
        return Response(headers=headers)

    @routes.post("/api/copy", response_class=Response, responses={200: {"description": "The model has the further name."}})
    async def copy(body: OllamaCopyBody) -> Response:
        """Give a loaded model a further name. /api/delete removes the name again, and keeps the model."""
        headers = ignored_header(check_unknown(body, strict=settings.strict))
        await registry.set_alias(body.destination, body.source, PLAIN)
        return Response(headers=headers)

    @routes.post("/api/create", responses=_lines())
    async def create(body: OllamaCreateBody) -> Response:
        """Give a loaded model a further name with its own system message, chat template and parameters. Fields that would change the
        weights are refused."""
        if changes := [name for name, value in body.unknown.items() if value not in NEUTRAL]:
            raise ApiError(UNSUPPORTED_FIELD, f"{changes[0]} is not supported: {CREATED}", param=changes[0])
        if body.source is None:
            raise ApiError(MISSING_FIELD, "from is absent; expected the name of a loaded model", param="from")
        own, ignored = _defaults(body, registry)
        try:
            await registry.set_alias(body.model, body.source, PLAIN, own)
        except LoadError as error:
            raise ApiError(INVALID_VALUE, error.message, param="template") from error
        media_type = "application/json" if body.stream is False else FRAMING.media_type
        return Response(_line("success"), headers=ignored_header(ignored), media_type=media_type)

    return routes


OURS = {theirs: ours for ours, theirs in PARAMETERS.items()} | {"stop": "stop"}  # Ollama's name of a parameter -> this server's name
# parameters that say how to run a model, which is decided when it is loaded
OF_A_LOAD = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "repeat_last_n", "use_mmap", "use_mlock", "low_vram")


def _defaults(body: OllamaCreateBody, registry: Registry) -> tuple[Defaults, list[str]]:
    """Return the defaults of a model to create, and the names of parameters without effect: those that say how to run a model, which is
    decided when it is loaded. Raise ApiError if a parameter is unknown or not valid, if the model is not loaded, or if its context is
    shorter than `num_ctx`."""
    values: dict[str, Any] = {"system": body.system, "template": body.template or None}
    ignored: list[str] = []
    for name, value in (body.parameters or {}).items():
        if name in OF_A_LOAD:
            ignored.append(f"parameters.{name}")
        elif name == "num_predict" and isinstance(value, int) and value < 0:
            continue  # no limit on the tokens of an answer, which is the default
        elif name in OURS:
            values[OURS[name]] = value
        else:
            known = ", ".join((*OURS, *OF_A_LOAD))
            raise ApiError(UNSUPPORTED_FIELD, f"parameters has {name!r:.80}; expected {known}", param=f"parameters.{name}")
    asked = (body.parameters or {}).get("num_ctx")
    _, loaded = registry.serve(body.source)
    if isinstance(asked, int) and asked > context_of(loaded):
        message = (
            f"parameters.num_ctx is {asked}, and the model is loaded for {context_of(loaded)} tokens; load it with a larger max_context"
        )
        raise ApiError(INVALID_VALUE, message, param="parameters.num_ctx")
    return defaults_of({name: value for name, value in values.items() if value is not None}, "parameters"), ignored


def _lines() -> Responses:
    """Return the description of an endpoint that answers with one line, or with a stream of lines."""
    return {200: {"content": {**gives(OllamaProgress)[200]["content"], "application/x-ndjson": {"itemSchema": schema_of(OllamaProgress)}}}}


def _plain(name: str) -> str:
    """Return the name without the host and the tag `:latest` that Ollama's clients add."""
    return without_host(name).removesuffix(LATEST)


async def _pulled(spec: ModelSpec | None, registry: Registry) -> AsyncGenerator[bytes, None]:
    """Yield a line for each step of the download and the load. Raise ApiError if the download or the load fails. `spec` is None if there is
    nothing to do."""
    yield _line("pulling manifest")
    if spec is None:
        yield _line("success")
        return
    try:
        if registry.library is not None and _is_downloadable(spec.source, registry):
            async with aclosing(registry.library.pull(spec.source)) as parts:
                async for part in parts:
                    if part.total_bytes:
                        yield _line(f"pulling {spec.source}", digest=spec.source, total=part.total_bytes, completed=part.completed_bytes)
    except LoadError as error:
        raise registry.budget.as_api_error(error) from error
    operation = await registry.load(spec)
    async with aclosing(operation.watch()) as reports:
        async for report in reports:
            if report["state"] is OperationState.RUNNING:
                yield _line(f"loading: {report['stage']}")
    if operation.error is not None:
        raise operation.error
    yield _line("success")


def _line(status: str, **further: str | int) -> bytes:
    """Encode a line."""
    return encode({"status": status, **further})


async def _unloaded(name: str, registry: Registry, settings: ServerSettings) -> str:
    """Unload the model if it is loaded, or remove it from the state file if its last load failed, and return its source. Raise ApiError if
    there is no such model, if the server did not download it, or if it cannot be unloaded now."""
    model = next((model for model in registry.models() if model.spec.name == name or name in registry.aliases_of(model.spec.name)), None)
    try:
        source = resolve(name, settings, registry.downloads) if model is None else model.spec.source
    except ApiError as error:
        if _is_downloadable(name, registry):
            raise  # the model's files may be on this machine; without --allow-hub they are not deleted
        raise ApiError(MODEL_NOT_FOUND, f"model {name!r} is not on this machine", param="model") from error
    if not _is_downloadable(source, registry):
        message = f"model {name!r} was not downloaded by relaxserve, so its files are kept; unload it by DELETE /admin/models/{name}"
        raise ApiError(INVALID_SOURCE, message, param="model")
    try:
        await registry.unload(name if model is None else model.spec.name, drain_s=settings.drain_s)
    except ApiError as error:
        if model is not None or error.kind is not MODEL_NOT_FOUND:
            raise  # MODEL_NOT_FOUND without a model is no error: the state file does not have the name either
    return source


def _is_named(name: str, registry: Registry) -> bool:
    """Return whether a name is that of a model that is loaded or loading, or an alias."""
    return name in registry.aliases() or any(model.spec.name == name for model in registry.models())


def _is_served(name: str, registry: Registry) -> bool:
    """Return whether a name is that of a loaded model, or an alias."""
    return name in registry.aliases() or any(model.spec.name == name and model.loaded is not None for model in registry.models())


def _is_downloadable(source: str, registry: Registry) -> bool:
    """Return whether the server's library can download a source: a name of the library's list, or an id of the hub. Any other source is an
    absolute path."""
    return source in registry.downloads or is_hub_id(source)
