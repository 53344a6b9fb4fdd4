"""/v1/batches: run the requests of a file, with the capacity that other requests leave free."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Literal, NotRequired

from fastapi import APIRouter, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from server.api.answer.respond import json_answer
from server.api.context import Context, caller
from server.api.request.fields import Options, check_unknown, ignored_header
from server.api.request.paging import NO_ID, Ends, page_after
from server.api.routes import gives, new_router
from server.batches.records import BatchRecord, Status

TimeField = Literal["in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at"]
REACHED: Mapping[Status, TimeField] = {
    Status.IN_PROGRESS: "in_progress_at",
    Status.FINALIZING: "finalizing_at",
    Status.COMPLETED: "completed_at",
    Status.FAILED: "failed_at",
    Status.EXPIRED: "expired_at",
    Status.CANCELLING: "cancelling_at",
    Status.CANCELLED: "cancelled_at",
}
MOST_LISTED = 100
Label = Annotated[str, Field(max_length=512)]


class BatchBody(Options):
    """The body that creates a batch."""

    input_file_id: Label
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)] | None = None


class BatchFault(TypedDict):
    """An error in the input file of a batch."""

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
    """A batch and its progress. A field such as `failed_at` is the time, in seconds since 1970, at which the batch reached the state."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: NotRequired[BatchFaults]
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: NotRequired[str]
    error_file_id: NotRequired[str]
    created_at: int
    in_progress_at: NotRequired[int]
    expires_at: int
    finalizing_at: NotRequired[int]
    completed_at: NotRequired[int]
    failed_at: NotRequired[int]
    expired_at: NotRequired[int]
    cancelling_at: NotRequired[int]
    cancelled_at: NotRequired[int]
    request_counts: RequestCounts
    metadata: Mapping[str, str] | None


class BatchList(Ends):
    object: Literal["list"]
    data: Sequence[BatchObject]


def router(context: Context) -> APIRouter:
    routes, batches, strict = new_router("OpenAI"), context.batches, context.settings.strict

    def shown(record: BatchRecord) -> BatchObject:
        return describe(record, batches.store.files)

    @routes.post("/v1/batches", responses=gives(BatchObject))
    async def create_batch(request: Request, body: BatchBody) -> Response:
        """Run the requests of a file, with the capacity that other requests leave free."""
        ignored, who = check_unknown(body, strict=strict), caller(request)
        file = batches.store.file(body.input_file_id, who.tenant)
        record = batches.create(file, who.key_digest, body.endpoint, body.metadata, models=who.limits.models)
        return json_answer(shown(record), headers=ignored_header(ignored))

    @routes.get("/v1/batches", responses=gives(BatchList))
    async def list_batches(request: Request, limit: int = 20, after: str | None = None) -> Response:
        """List the caller's batches, the newest first."""
        records = batches.batches_of(caller(request).tenant)
        page, ends = page_after(records, after, limit, MOST_LISTED, NO_ID)
        listed: BatchList = {"object": "list", "data": [shown(record) for record in page], **ends}
        return json_answer(listed)

    @routes.get("/v1/batches/{batch_id}", responses=gives(BatchObject))
    async def get_batch(request: Request, batch_id: str) -> Response:
        """Describe a batch and its progress."""
        return json_answer(shown(batches.batch(batch_id, caller(request).tenant)))

    @routes.post("/v1/batches/{batch_id}/cancel", responses=gives(BatchObject))
    async def cancel_batch(request: Request, batch_id: str) -> Response:
        """Cancel a batch. Its answers so far become readable once the batch has ended."""
        record = batches.batch(batch_id, caller(request).tenant)
        batches.cancel(record)
        return json_answer(shown(record))

    return routes


def describe(record: BatchRecord, files: Container[str]) -> BatchObject:
    """Describe a batch. Name its output files only while they are in `files`: from the end of the batch until they are deleted. Fields that
    are not known yet are absent, because OpenAI's API description allows no null for them."""
    described: BatchObject = {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "input_file_id": record.input_file_id,
        "completion_window": record.window,
        "status": record.status,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "request_counts": {"total": record.total, "completed": record.completed, "failed": record.failed + record.unanswered},
        "metadata": record.metadata,
    }
    if record.faults:
        data: list[BatchFault] = [
            {"code": fault.code, "message": fault.message, "param": fault.param, "line": fault.line} for fault in record.faults
        ]
        described["errors"] = {"object": "list", "data": data}
    if record.output_file_id in files:
        described["output_file_id"] = record.output_file_id
    if record.error_file_id in files:
        described["error_file_id"] = record.error_file_id
    for status, reached_at in record.times.items():
        described[REACHED[status]] = reached_at
    return described
