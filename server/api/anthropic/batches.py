"""/v1/messages/batches: create and manage batches of conversations, in Anthropic's shape. These batches run like those of /v1/batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.responses import StreamingResponse
from typing_extensions import TypedDict

from server.api.answer.respond import json_answer
from server.api.context import Caller, Context, caller, path_for
from server.api.request.fields import Options, check_unknown, ignored_header
from server.api.request.paging import Ends, page_after, page_before
from server.api.request.prepare import invalid, off_loop
from server.api.request.schema import Label
from server.api.routes import gives, new_router
from server.batches import lines
from server.batches.lines import MAX_ID_CHARS, Written
from server.batches.records import REQUESTS, BatchRecord, FileRecord, Status, now
from server.batches.service import OF_ANTHROPIC, Batches
from server.models.model import rfc3339

ENDPOINT = "/v1/messages"
MOST_LISTED = 1000
MAX_REQUESTS = 10_000  # further limited by the size of a body


class BatchedRequest(Options):
    """A request of a batch: `params` is the body for /v1/messages."""

    custom_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
    params: Annotated[dict[str, Any], Field(max_length=64)]


class MessageBatchBody(Options):
    """The body that creates a batch."""

    requests: Annotated[list[BatchedRequest], Field(min_length=1, max_length=MAX_REQUESTS)]
    user_profile_id: Label | None = None  # no effect, like the next field
    workspace_id: Label | None = None


class MessageCounts(TypedDict):
    """How many requests of a batch are in each state."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(TypedDict):
    """A batch and its progress."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None
    results_url: str | None


class MessageBatchList(Ends):
    data: Sequence[MessageBatch]


class MessageBatchDeleted(TypedDict):
    id: str
    type: Literal["message_batch_deleted"]


def router(context: Context) -> APIRouter:
    routes, batches, strict = new_router("Anthropic"), context.batches, context.settings.strict

    def found(request: Request, batch_id: str) -> BatchRecord:
        """Return a batch of the caller. Raise ApiError if the caller has no batch with this id."""
        return batches.batch(batch_id, caller(request).tenant, OF_ANTHROPIC)

    @routes.post("/v1/messages/batches", responses=gives(MessageBatch))
    async def create_message_batch(request: Request, body: MessageBatchBody) -> Response:
        """Create a batch. Its conversations are answered with the capacity that other requests leave free."""
        ignored, who = check_unknown(body, strict=strict), caller(request)
        data = await off_loop(who.num_body_bytes, lambda: _lines(body.requests, context.settings.max_body_bytes))
        file = await batches.store.on_disk(lambda: _stored(batches, data, who))
        try:
            record = batches.create(file, who.key_digest, ENDPOINT, None, OF_ANTHROPIC, who.limits.models)
        except BaseException:
            await batches.store.on_disk(lambda: batches.store.delete_file(file.id))
            raise
        return json_answer(describe(record, request), headers=ignored_header(ignored))

    @routes.get("/v1/messages/batches", responses=gives(MessageBatchList))
    async def list_message_batches(
        request: Request, limit: int = 20, after_id: str | None = None, before_id: str | None = None
    ) -> Response:
        """List the caller's batches, the newest first."""
        records = batches.batches_of(caller(request).tenant, OF_ANTHROPIC)
        if before_id is None:
            page, ends = page_after(records, after_id, limit, MOST_LISTED, None, name="after_id")
        else:
            page, ends = page_before(records, before_id, limit, MOST_LISTED, None, name="before_id")
        listed: MessageBatchList = {"data": [describe(record, request) for record in page], **ends}
        return json_answer(listed)

    @routes.get("/v1/messages/batches/{batch_id}", responses=gives(MessageBatch))
    async def get_message_batch(request: Request, batch_id: str) -> Response:
        """Describe a batch and its progress."""
        return json_answer(describe(found(request, batch_id), request))

    @routes.post("/v1/messages/batches/{batch_id}/cancel", responses=gives(MessageBatch))
    async def cancel_message_batch(request: Request, batch_id: str) -> Response:
        """Stop a batch."""
        record = found(request, batch_id)
        batches.cancel(record)
        return json_answer(describe(record, request))

    @routes.delete("/v1/messages/batches/{batch_id}", responses=gives(MessageBatchDeleted))
    async def delete_message_batch(request: Request, batch_id: str) -> Response:
        """Delete a batch that has ended, with its requests and results. A batch that has not ended is kept, and the answer is an error."""
        record = found(request, batch_id)
        await batches.store.on_disk(lambda: batches.delete(record))
        deleted: MessageBatchDeleted = {"id": batch_id, "type": "message_batch_deleted"}
        return json_answer(deleted)

    @routes.get("/v1/messages/batches/{batch_id}/results", response_class=Response)
    async def get_results(request: Request, batch_id: str) -> Response:
        """Return one line of JSON per request: first the requests that succeeded, then the others."""
        record = found(request, batch_id)
        if not record.has_ended:
            raise invalid("batch_id", f"batch {batch_id} is {record.status}; its results are readable once it has ended")
        return StreamingResponse(_results(batches, record), media_type="application/x-jsonl")

    return routes


def describe(record: BatchRecord, request: Request) -> MessageBatch:
    """Describe a batch in Anthropic's shape. Requests that were not answered count as canceled if the batch was canceled, otherwise as
    expired."""
    is_canceled = Status.CANCELLING in record.times
    return {
        "id": record.id,
        "type": "message_batch",
        "processing_status": "ended" if record.has_ended else "canceling" if is_canceled else "in_progress",
        "request_counts": {
            "processing": 0 if record.has_ended else max(0, record.total - record.num_done),
            "succeeded": record.completed,
            "errored": record.failed,
            "canceled": record.unanswered if is_canceled else 0,
            "expired": 0 if is_canceled else record.unanswered,
        },
        "created_at": rfc3339(record.created_at),
        "expires_at": rfc3339(record.expires_at),
        "ended_at": rfc3339(record.times[record.status]) if record.has_ended else None,
        "cancel_initiated_at": rfc3339(record.times[Status.CANCELLING]) if is_canceled else None,
        "archived_at": None,
        "results_url": _results_url(record, request) if record.has_ended else None,
    }


def _lines(requests: Sequence[BatchedRequest], most: int) -> bytes:
    """Return the input file with a line for each request. Raise ApiError if a request has a fault or its line has more than `most` bytes,
    because the description of a batch has no field for faults."""
    written = [
        msgspec.json.encode({"custom_id": asked.custom_id, "method": "POST", "url": ENDPOINT, "body": asked.params}) + b"\n"
        for asked in requests
    ]
    _, faults = lines.check(written, ENDPOINT, most)
    for fault in faults[:1]:
        where = f"requests[{(fault.line or 1) - 1}]"
        field = (fault.param or "").replace("body", "params", 1)
        raise invalid(f"{where}.{field}" if field else where, f"{where}: {fault.message}")
    return b"".join(written)


def _stored(batches: Batches, data: bytes, who: Caller) -> FileRecord:
    """Store an input file of the caller, and return its record. If storing fails, delete what was written of the file."""
    upload = batches.store.new_upload()
    try:
        upload.add(data)
        return upload.finish(lambda file_id, size: FileRecord(file_id, who.tenant, "requests.jsonl", REQUESTS, size, now()))
    except BaseException:
        upload.abandon()
        raise


def _results_url(record: BatchRecord, request: Request) -> str:
    """Return the address at which the client reads the results of a batch."""
    return str(request.base_url).rstrip("/") + path_for(request, f"/v1/messages/batches/{record.id}/results")


def _results(batches: Batches, record: BatchRecord) -> Iterator[bytes]:
    """Yield the results of a batch that has ended, one line of JSON each."""
    for file_id in (record.output_file_id, record.error_file_id):
        for line in lines.written(batches.store.lines(file_id)):
            yield msgspec.json.encode({"custom_id": line.custom_id, "result": _result(line, record)}) + b"\n"


def _result(line: Written, record: BatchRecord) -> dict[str, Any]:
    """Return the result of a request in Anthropic's shape. A request without a response was canceled or has expired."""
    if line.response is None:
        return {"type": "canceled" if Status.CANCELLING in record.times else "expired"}
    if line.response.status_code == HTTPStatus.OK:
        return {"type": "succeeded", "message": line.response.body}
    return {"type": "errored", "error": line.response.body}
