"""Administration endpoints under /admin: load, watch and unload models, compare formats, set aliases, report memory, and clear the cache of
compiled models."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import Field

from runtime.device.registry import NAME as DEVICE
from runtime.errors import RuntimeFault
from server.api.admin.answers import (
    CachedModels,
    FinishedLoad,
    Form,
    Forms,
    Freed,
    Memory,
    ModelReport,
    ModelReports,
    OfferedModel,
    Offers,
    OperationReports,
    Plan,
    StageEntry,
)
from server.api.answer.respond import json_answer, while_connected
from server.api.answer.sse import EventStream
from server.api.context import Context, path_for
from server.api.openai.models import describe, progress_of
from server.api.request.fields import Options, check_unknown, ignored_header
from server.api.request.prepare import invalid
from server.api.routes import ADMINISTRATION, Responses, events, gives, new_router
from server.defaults import Defaults, DefaultsError, read_values
from server.errors import CACHE_NOT_CLEARED, CACHE_UNAVAILABLE, OPERATION_NOT_FOUND, PREFLIGHT_UNAVAILABLE, ApiError
from server.interfaces import LoadError
from server.load_settings import LEAST_CONTEXT, LONGEST_GAP_MS, MOST_RANKS, MOST_SEQUENCES, LoadSettings
from server.messages import StageReport
from server.models.model import Model, Unloaded
from server.models.operations import Operation, OperationReport, OperationState
from server.models.probe import PLAIN, Probe
from server.models.registry import Registry
from server.models.sources import names_of, offered, real, resolve
from server.models.state import NAME, NAMED, ModelSpec
from server.text.dialects.registry import FORMATS

Name = Annotated[str, Field(pattern=NAME, max_length=128)]
Bytes = Annotated[int, Field(ge=1, lt=2**63)]
Share = Annotated[float, Field(gt=0, lt=1)]


WeightForm = Literal[
    "auto",
    "auto-fast",
    "f32",
    "bf16",
    "int8",
    "int8-fast",
    "int8-32",
    "int8-64",
    "int8-128",
    "6bit",
    "5bit",
    "4bit",
    "int4-32",
    "int4-64",
    "int4-128",
]
# bits per weight on average, such as 4.6; the worker checks the range
Bits = Annotated[str, Field(pattern=r"^[0-9](\.[0-9]{1,8})?$", max_length=10)]


class LoadBody(Options):
    """The body that loads a model. Most fields are settings of a `ModelSpec`, which `LoadSettings` describes; the last ones say how to
    load, and when to answer."""

    name: Name | None = None
    source: Annotated[str, Field(min_length=1, max_length=1024)]
    quantize: WeightForm | Bits | None = None
    dtype: WeightForm | Bits | None = None  # another name of quantize
    max_context: int | None = Field(default=None, ge=LEAST_CONTEXT, lt=2**31)
    max_batch: int | None = Field(default=None, ge=1, le=MOST_SEQUENCES)
    max_gap_ms: int | None = Field(default=None, ge=1, le=LONGEST_GAP_MS)
    kv_cache_bytes: Bytes | Share | None = None
    kv_dtype: Literal["auto", "f32", "f16", "bf16", "int8"] = "auto"
    numerics: Literal["auto", "portable", "fast"] = "auto"
    target: Annotated[str, Field(max_length=64)] = "host"
    device: Annotated[str, Field(pattern=f"^{DEVICE}$", max_length=64)] = "cpu"
    tensor_parallel: int = Field(default=1, ge=1, le=MOST_RANKS)
    embeddings: bool = False
    label: bool = False
    aliases: list[Name] = Field(default_factory=list, max_length=64, fail_fast=True)
    pin: bool = False
    tool_parser: Annotated[str, Field(max_length=64)] | None = None
    reasoning: bool | None = None
    defaults: Annotated[dict[str, Any], Field(max_length=64)] | None = None  # values for fields that requests leave out
    dry_run: bool = False  # load nothing, and answer with the memory that the load would take
    wait: bool = False  # answer when the load has ended
    swap: bool = False  # once this model is ready and has taken its aliases, unload each model that lost its last alias


class ProbeBody(Options):
    """The request that probes a model before an alias is pointed at it. The answer is decoded greedily."""

    prompt: str = Field(default=PLAIN.prompt, min_length=1, max_length=4096)
    expect: str = Field(default="", max_length=4096)  # text that the answer must contain
    max_tokens: int = Field(default=PLAIN.max_tokens, ge=1, le=1024)
    timeout: float = Field(default=PLAIN.timeout_s, gt=0, le=600)


class AliasBody(Options):
    """The model at which an alias is to point, and the request that probes the model."""

    model: Name
    probe: ProbeBody = Field(default_factory=ProbeBody)


ALIASES = {"type": "object", "additionalProperties": {"type": "string"}}  # JSON schema of an object: alias -> name of a model
EVENTS: Responses = {200: {"content": events(OperationReport), "description": "A report of the operation at once and after each change."}}


def router(context: Context) -> APIRouter:
    routes = new_router(ADMINISTRATION, prefix="/admin")
    registry, settings = context.registry, context.settings

    @routes.post("/models", responses={**gives(OperationReport, FinishedLoad, Plan), **gives(OperationReport, status=202)})
    async def load(request: Request, body: LoadBody) -> Response:
        """Load a model. Answer 202 with an operation at once, or 200 if the operation has already ended. With `wait`, answer 200 when the
        model is ready. With `dry_run`, load nothing, and answer with the memory that the load would take."""
        headers = ignored_header(check_unknown(body, strict=settings.strict))
        spec = spec_of(body, registry)
        if body.dry_run:
            return json_answer(await while_connected(request, dry_run(spec, registry)), headers=headers)
        if body.swap and not body.aliases:
            raise invalid("aliases", "swap is true and aliases is empty; name the aliases that are to move to this model")
        operation = await registry.load(spec, swap=body.swap)
        if body.wait:
            return json_answer(await waited(operation, registry), headers=headers)
        location = {"location": path_for(request, f"/admin/operations/{operation.id}")}
        running = operation.state is OperationState.RUNNING
        return json_answer(operation.describe(), 202 if running else 200, headers={**headers, **location})

    @routes.get("/models", responses=gives(ModelReports))
    async def list_models() -> Response:
        """List every model with its state, memory and worker, and the last load of each model that failed to load, with the cause."""
        await registry.measuring.measure()
        listed: ModelReports = {
            "object": "list",
            "data": [describe_fully(model, registry) for model in registry.models()],
            "failed": [operation.describe() for operation in registry.failed()],
        }
        return json_answer(listed)

    @routes.get("/sources", responses=gives(Offers))
    async def list_sources() -> Response:
        """List the models below the model root that may be loaded. `loaded_as` has the names under which a model is loaded already."""
        loaded: dict[str, list[str]] = {}
        for model in registry.models():
            loaded.setdefault(model.spec.source, []).append(model.spec.name)
        offers = await asyncio.to_thread(offered, settings)
        data: list[OfferedModel] = [
            {
                "source": offer.source,
                "bytes": offer.num_bytes,
                "modified_at": offer.modified_s,
                "loaded_as": loaded.get(offer.path, []),
            }
            for offer in offers
        ]
        listed: Offers = {"object": "list", "model_root": str(real(settings.model_root)), "data": data}
        return json_answer(listed)

    @routes.get("/forms", responses=gives(Forms))
    async def list_forms(request: Request, source: Annotated[str, Query(min_length=1, max_length=1024)]) -> Response:
        """Compare the formats in which a source can be served: bytes of the weights and rounding error. Nothing is compiled or loaded; a
        source of the hub is downloaded first, if it is not on this machine. `cached`: a load has probably stored the source's compiled
        program and weights."""
        if registry.compare_forms is None:
            raise ApiError(PREFLIGHT_UNAVAILABLE, "this server was started without a process that compares formats", param="source")
        try:
            place = resolve(source, settings, registry.downloads)
            forms = await while_connected(request, registry.compare_forms(place))
        except LoadError as error:
            raise registry.budget.as_api_error(error) from error
        data: list[Form] = [{"quantize": form.quantize, "weights_bytes": form.weights_bytes, "loss": form.loss} for form in forms]
        cached = await asyncio.to_thread(registry.is_cached, ModelSpec(source, place))
        listed: Forms = {"object": "list", "source": source, "cached": cached, "data": data}
        return json_answer(listed)

    @routes.get("/models/{name:path}", responses=gives(ModelReport))
    async def get_model(name: str) -> Response:
        """Describe the model of a name or alias."""
        await registry.measuring.measure()
        return json_answer(describe_fully(registry.find(name), registry))

    @routes.delete("/models/{name:path}", responses=gives(Unloaded))
    async def unload(name: str, drain_s: Annotated[float, Query(ge=0, le=86400)] = settings.drain_s, force: bool = False) -> Response:
        """Unload a model once its running requests have finished, or after `drain_s` seconds. A pinned model needs `force`."""
        return json_answer(await registry.unload(name, drain_s=drain_s, force=force))

    @routes.get("/operations", responses=gives(OperationReports))
    async def list_operations() -> Response:
        """List the loads and downloads that are running, and those of the last hour."""
        listed: OperationReports = {"object": "list", "data": [operation.describe() for operation in registry.operations.all()]}
        return json_answer(listed)

    @routes.get("/operations/{operation_id}", responses=gives(OperationReport))
    async def get_operation(operation_id: str) -> Response:
        """Return the progress of a load or download, or how it ended."""
        return json_answer(find_operation(operation_id, registry).describe())

    @routes.get("/operations/{operation_id}/events", response_class=Response, responses=EVENTS)
    async def watch_operation(operation_id: str) -> Response:
        """Stream the reports of a load or download as events until it ends."""
        operation = find_operation(operation_id, registry)
        return EventStream(_events(operation), {}, heartbeat_s=settings.heartbeat_s)

    @routes.delete("/operations/{operation_id}", responses=gives(OperationReport))
    async def cancel_operation(operation_id: str) -> Response:
        """Cancel a running load or download. Cancelling a load frees its name and memory. A later download continues a cancelled one."""
        operation = find_operation(operation_id, registry)
        await registry.cancel(operation)
        return json_answer(operation.describe())

    @routes.get("/aliases", responses=gives(ALIASES))
    async def list_aliases() -> Response:
        """List the aliases and the model of each."""
        return json_answer(registry.aliases())

    @routes.put("/aliases/{alias:path}", responses=gives(ALIASES))
    async def set_alias(alias: Annotated[str, Field(pattern=NAME)], body: AliasBody) -> Response:
        """Point an alias at a model, if the model answers a probe. New requests for the alias use this model; running requests continue."""
        headers = ignored_header(check_unknown(body, strict=settings.strict))
        asked = body.probe
        probe = Probe(asked.prompt, asked.expect, asked.max_tokens, asked.timeout)
        await registry.set_alias(alias, body.model, probe)
        return json_answer(registry.aliases(), headers=headers)

    @routes.delete("/aliases/{alias:path}", responses=gives(ALIASES))
    async def remove_alias(alias: str) -> Response:
        """Remove an alias."""
        await registry.remove_alias(alias)
        return json_answer(registry.aliases())

    @routes.get("/memory", responses=gives(Memory))
    async def memory() -> Response:
        """Report the budget of host memory: the bytes that models take, by model and part, and the bytes that are free."""
        held: Memory = {
            "limit_bytes": settings.memory_limit_bytes,
            "used_bytes": registry.budget.used_bytes,
            "free_bytes": registry.budget.free_bytes,
            "resident_bytes": await registry.measuring.resident_bytes(),
            "models": {model.spec.name: model.bytes_by_part for model in registry.models()},
            "evictable": registry.budget.evictable(),
        }
        return json_answer(held)

    @routes.get("/cache", responses=gives(CachedModels))
    async def list_cache() -> Response:
        """List the compiled models on disk."""
        if registry.cache is None:
            raise ApiError(CACHE_UNAVAILABLE, "this server was started without a cache of compiled models")
        listed: CachedModels = {"object": "list", "data": await asyncio.to_thread(registry.cache.entries)}
        return json_answer(listed)

    @routes.delete("/cache", responses=gives(Freed))
    async def clear_cache() -> Response:
        """Remove the compiled models that no loaded model uses, with their packed weights."""
        if registry.cache is None:
            raise ApiError(CACHE_UNAVAILABLE, "this server was started without a cache of compiled models")
        used = frozenset(model.loaded.ready.signature for model in registry.models() if model.loaded is not None)
        try:
            freed: Freed = {"freed_bytes": await asyncio.to_thread(registry.cache.clear, keep=used)}
        except RuntimeFault as fault:
            raise ApiError(CACHE_NOT_CLEARED, str(fault)) from fault
        return json_answer(freed)

    return routes


def spec_of(body: LoadBody, registry: Registry) -> ModelSpec:
    """Return the specification of a load. Raise ApiError if a setting or a default is not valid, if two settings contradict each other, if
    the source gives no valid name and none is set, or if this server cannot load the source."""
    if body.dtype is not None and body.quantize not in (None, body.dtype):
        raise invalid("dtype", f"dtype is {body.dtype!r} and quantize is {body.quantize!r}; give one of them")
    if body.tool_parser is not None and body.tool_parser not in FORMATS:
        raise invalid("tool_parser", f"tool_parser is {body.tool_parser!r:.40}; expected one of {', '.join(FORMATS)}")
    if body.target not in registry.targets:
        raise invalid("target", f"target is {body.target!r}; expected one of {', '.join(registry.targets)}")
    source = resolve(body.source, registry.settings, registry.downloads)
    name, aliases = (body.name, ()) if body.name else names_of(source)
    if not re.fullmatch(NAME, name):
        raise invalid("name", f"the source ends with {name!r:.140}, which cannot be the model's name; set name to {NAMED}")
    # Read only declared fields: unknown fields of a body are attributes, too, and a client must not name a file of this machine by the
    # setting `calibrate`.
    declared = [field for field in LoadBody.model_fields if field in LoadSettings.__struct_fields__]
    asked = {field: value for field in declared if (value := getattr(body, field)) is not None}
    asked |= {"name": name, "source": source, "quantize": body.quantize or body.dtype or "auto"}
    return ModelSpec(
        **asked,
        aliases=tuple(dict.fromkeys((*body.aliases, *aliases))),
        pin=body.pin,
        tool_parser=body.tool_parser,
        reasoning=body.reasoning,
        defaults=defaults_of(body.defaults or {}, "defaults"),
    )


def defaults_of(values: Mapping[str, Any], param: str) -> Defaults:
    """Return the defaults that a request gives in the field `param`. Raise ApiError if the defaults are not valid."""
    try:
        return read_values(values, param)
    except DefaultsError as error:
        raise invalid(param, str(error)) from error


async def waited(operation: Operation, registry: Registry) -> FinishedLoad:
    """Wait for a load and return its operation with the model. If the load failed or was cancelled, raise its error."""
    await operation.wait()
    if operation.error is not None:
        raise operation.error
    await registry.measuring.measure()
    return {**operation.describe(), "result": describe_fully(registry.find(operation.model), registry)}


async def dry_run(spec: ModelSpec, registry: Registry) -> Plan:
    """Return the memory that a load would take. Raise ApiError if the load would be refused."""
    footprint, free_bytes = await registry.budget.dry_run(spec)
    return {
        "object": "dry_run",
        "model": spec.name,
        "required_bytes": footprint.total_bytes,
        "free_bytes": free_bytes,
        "fits": True,  # always true: a load that does not fit is refused with 507
        "weights_bytes": footprint.weights_bytes,
        "arena_bytes": footprint.arena_bytes,
        "kv_cache_bytes": footprint.kv_cache_bytes,
        "graphs_bytes": footprint.graphs_bytes,
        "page_bytes": footprint.page_bytes,
        "cache_hit": footprint.cache_hit,
    }


def describe_fully(model: Model, registry: Registry) -> ModelReport:
    """Describe a model for administrators. Call `Measuring.measure` before this function, because the memory in the report is what was
    measured last."""
    described: ModelReport = {
        **describe(model, registry),
        "state": model.condition,
        "source": model.spec.source,
        "quantize": model.spec.quantize,
        "numerics": model.spec.numerics,
        "target": model.spec.target,
        "device": model.spec.device,
        "pin": model.spec.pin,
        "bytes": model.bytes_by_part,
        "memory": model.memory,
        "operation": model.operation.id,
    }
    if model.loaded is not None:
        ready, worker = model.loaded.ready, model.loaded.worker
        stats = model.stats
        described["pages"] = {"total": ready.num_pages, "used": stats.num_pages_used, "tokens": ready.page_size}
        described["cache_hit"] = ready.cache_hit
        if ready.context_note:
            described["context_note"] = ready.context_note
        if ready.device_note:
            described["device_note"] = ready.device_note
        described["numeric_class"] = ready.numeric_class
        described["system_fingerprint"] = model.loaded.fingerprint
        if ready.card is not None:
            described["graphs"] = ready.card.num_graphs
        if len(ready.devices) > 1:
            described["devices"] = ready.devices
        if ready.stages:
            described["stages"] = [_stage_entry(stage) for stage in ready.stages]
        described["compile_s"] = ready.compile_s
        described["load_s"] = ready.load_s
        described["restarts"] = worker.restarts
        if worker.outage is not None:
            described["restarting"] = {**progress_of(worker.outage), "error": worker.outage.error}
        described["resubmitted"] = worker.resubmitted
        described["tool_parser"] = model.loaded.dialect.format.name
        described["reasoning"] = model.loaded.dialect.thinks
        described["running"] = stats.num_running
        described["waiting"] = stats.num_waiting
    return described


def _stage_entry(stage: StageReport) -> StageEntry:
    """Describe a stage of a model."""
    parts = {"weights": stage.weights_bytes, "arena": stage.arena_bytes, "kv_cache": stage.kv_cache_bytes}
    return {
        "place": stage.place,
        "layers": (stage.first_layer, stage.end_layer - 1) if stage.first_layer < stage.end_layer else (),
        "bytes": parts,
    }


def find_operation(operation_id: str, registry: Registry) -> Operation:
    """Return an operation. Raise ApiError if the operation is unknown."""
    operation = registry.operations.get(operation_id)
    if operation is None:
        raise ApiError(OPERATION_NOT_FOUND, f"operation {operation_id!r:.80} is unknown; expected a load or download of the last hour")
    return operation


async def _events(operation: Operation) -> AsyncGenerator[bytes, None]:
    """Yield the reports of an operation as JSON, until it ends."""
    async for description in operation.watch():
        yield msgspec.json.encode(description)
