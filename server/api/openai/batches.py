"""/v1/batches: files of requests that run while the server has nothing else to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NotRequired

from fastapi import APIRouter, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from server.api.answer.respond import json_answer
from server.api.context import Context, caller
from server.api.openai.files import page_of
from server.api.request.fields import Options, check_unknown, ignored_header
from server.api.routes import gives, new_router
from server.batches.records import BatchRecord, Status

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MOST_LISTED = 100
Label = Annotated[str, Field(max_length=512)]


class BatchBody(Options):
    input_file_id: Label
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)] | None = None


class BatchFault(TypedDict):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchFaults(TypedDict):
    object: Literal["list"]
    data: Sequence[BatchFault]


class RequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


class BatchObject(TypedDict):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: NotRequired[int | None]
    expires_at: int
    finalizing_at: NotRequired[int | None]
    completed_at: NotRequired[int | None]
    failed_at: NotRequired[int | None]
    expired_at: NotRequired[int | None]
    cancelling_at: NotRequired[int | None]
    cancelled_at: NotRequired[int | None]
    request_counts: RequestCounts
    metadata: Mapping[str, str] | None


class BatchList(TypedDict):
    object: Literal["list"]
    data: Sequence[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def router(context: Context) -> APIRouter:
    routes, batches, strict = new_router("OpenAI"), context.batches, context.settings.strict

    def shown(record: BatchRecord) -> BatchObject:
        return describe(record, frozenset(batches.store.files))

    @routes.post("/v1/batches", responses=gives(BatchObject))
    async def create_batch(request: Request, body: BatchBody) -> Response:
        """Run the requests of a file while the server has nothing else to do."""
        ignored, who = check_unknown(body, strict=strict), caller(request)
        file = batches.store.file(body.input_file_id, who.tenant)
        record = batches.create(file, who.key_digest, body.endpoint, body.metadata)
        return json_answer(shown(record), headers=ignored_header(ignored))

    @routes.get("/v1/batches", responses=gives(BatchList))
    async def list_batches(request: Request, limit: int = 20, after: str | None = None) -> Response:
        """List the caller's batches, the newest first."""
        records = batches.batches_of(caller(request).tenant)
        found, has_more = page_of([record.id for record in records], limit, after, MOST_LISTED)
        data = [shown(record) for record in records if record.id in found]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        listed: BatchList = {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}
        return json_answer(listed)

    @routes.get("/v1/batches/{batch_id}", responses=gives(BatchObject))
    async def get_batch(request: Request, batch_id: str) -> Response:
        """Describe a batch and its progress."""
        return json_answer(shown(batches.batch(batch_id, caller(request).tenant)))

    @routes.post("/v1/batches/{batch_id}/cancel", responses=gives(BatchObject))
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        """Stop a batch. Its answers so far become readable."""
        record = batches.batch(batch_id, caller(request).tenant)
        batches.cancel(record)
        return json_answer(shown(record))

    return routes


def describe(record: BatchRecord, files: frozenset[str]) -> BatchObject:
    """Describe a batch. Its output files are named once they are in `files`, which is when the batch has ended."""
    faults: BatchFaults | None = None
    if record.faults:
        data: list[BatchFault] = [
            {"code": fault.code, "message": fault.message, "param": fault.param, "line": fault.line} for fault in record.faults
        ]
        faults = {"object": "list", "data": data}
    described: BatchObject = {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "errors": faults,
        "input_file_id": record.input_file_id,
        "completion_window": record.window,
        "status": record.status,
        "output_file_id": record.output_file_id if record.output_file_id in files else None,
        "error_file_id": record.error_file_id if record.error_file_id in files else None,
        "created_at": record.created_at,
        "in_progress_at": record.times.get(Status.IN_PROGRESS),
        "expires_at": record.expires_at,
        "finalizing_at": record.times.get(Status.FINALIZING),
        "completed_at": record.times.get(Status.COMPLETED),
        "failed_at": record.times.get(Status.FAILED),
        "expired_at": record.times.get(Status.EXPIRED),
        "cancelling_at": record.times.get(Status.CANCELLING),
        "cancelled_at": record.times.get(Status.CANCELLED),
        "request_counts": {"total": record.total, "completed": record.completed, "failed": record.failed + record.unanswered},
        "metadata": record.metadata,
    }
    return described
