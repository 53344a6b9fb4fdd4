"""/v1/files: store, list, return and delete files: those with requests, which clients upload, and those with answers, which batches
write."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Literal, NotRequired

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse
from typing_extensions import TypedDict

from server.api.answer.respond import json_answer
from server.api.context import Context, caller
from server.api.request.paging import NO_ID, Ends, page_after
from server.api.request.prepare import invalid
from server.api.request.uploads import limited, sized
from server.api.routes import gives, new_router
from server.batches.records import FileRecord, now
from server.batches.store import Upload
from server.http.multipart import Form

PURPOSES = ("batch", "user_data")
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
SHORTEST_S, LONGEST_S = 3600, 2592000  # limits of expires_after, as in OpenAI's API
MOST_LISTED = 10_000


class FileObject(TypedDict):
    """A file in OpenAI's shape."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: NotRequired[int]
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(Ends):
    object: Literal["list"]
    data: Sequence[FileObject]


class FileDeleted(TypedDict):
    id: str
    object: Literal["file"]
    deleted: bool


def router(context: Context) -> APIRouter:
    routes, settings, batches = new_router("OpenAI"), context.settings, context.batches

    @routes.post("/v1/files", responses=gives(FileObject))
    async def upload_file(request: Request) -> Response:
        """Store a file. The body is a form with `file`, `purpose` and, if the file shall expire, `expires_after`."""
        owner = caller(request).tenant
        upload = await batches.store.on_disk(batches.store.new_upload)
        try:
            form = Form(request.headers.get("content-type", ""), sized(upload.add, settings, "max_file_bytes"))
            await form.read(_written(limited(request, settings, "max_file_bytes"), upload), "file")
            kept = await batches.store.on_disk(lambda: upload.finish(lambda file_id, size: _record(file_id, size, owner, form)))
        except BaseException:
            await batches.store.on_disk(upload.abandon)
            raise
        return json_answer(describe(kept))

    @routes.get("/v1/files", responses=gives(FileList))
    async def list_files(
        request: Request,
        purpose: str | None = None,
        limit: int = MOST_LISTED,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """List the caller's files, the newest first unless `order` is `asc`."""
        files = [file for file in batches.files_of(caller(request).tenant) if purpose is None or file.purpose == purpose]
        files = files if order == "desc" else files[::-1]
        page, ends = page_after(files, after, limit, MOST_LISTED, NO_ID)
        listed: FileList = {"object": "list", "data": [describe(file) for file in page], **ends}
        return json_answer(listed)

    @routes.get("/v1/files/{file_id}", responses=gives(FileObject))
    async def get_file(request: Request, file_id: str) -> Response:
        """Describe a file."""
        return json_answer(describe(batches.store.file(file_id, caller(request).tenant)))

    @routes.get("/v1/files/{file_id}/content", response_class=Response)
    async def get_content(request: Request, file_id: str) -> Response:
        """Return the bytes of a file."""
        file = batches.store.file(file_id, caller(request).tenant)
        return FileResponse(batches.store.data(file.id), media_type="application/octet-stream")

    @routes.delete("/v1/files/{file_id}", responses=gives(FileDeleted))
    async def delete_file(request: Request, file_id: str) -> Response:
        """Delete a file, unless a batch that has not ended uses it."""
        file = batches.store.file(file_id, caller(request).tenant)
        await batches.delete_file(file)
        deleted: FileDeleted = {"id": file_id, "object": "file", "deleted": True}
        return json_answer(deleted)

    return routes


async def _written(body: AsyncIterator[bytes], upload: Upload) -> AsyncIterator[bytes]:
    """Yield the pieces of a body. After each piece, write the part of it that belongs to the file to disk, on a thread, so that other
    requests do not wait for the disk."""
    async for piece in body:
        yield piece
        await upload.store.on_disk(upload.write)


def describe(file: FileRecord) -> FileObject:
    """Describe a file in OpenAI's shape."""
    described: FileObject = {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }
    if file.expires_at is not None:
        described["expires_at"] = file.expires_at
    return described


def _record(file_id: str, size: int, owner: str, form: Form) -> FileRecord:
    """Return the record of an uploaded file. Raise ApiError if the form lacks a field, or if a field is not valid."""
    if form.filename is None:
        raise invalid("file", "file is absent; expected a form with a file")
    purpose = form.fields.get("purpose", "")
    if purpose not in PURPOSES:
        raise invalid("purpose", f"purpose is {purpose!r:.40}; expected one of {', '.join(PURPOSES)}")
    return FileRecord(file_id, owner, form.filename[:255], purpose, size, now(), _expiry(form))


def _expiry(form: Form) -> int | None:
    """Return the time at which the file expires, in seconds since 1970, or None if the form sets no expiry. Raise ApiError if the form's
    `expires_after` is not valid."""
    anchor, seconds = form.fields.get(ANCHOR), form.fields.get(SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid(ANCHOR, f"{ANCHOR} is {anchor!r:.40}; expected 'created_at'")
    if seconds is None or not seconds.isdecimal() or len(seconds) > 12 or not SHORTEST_S <= int(seconds) <= LONGEST_S:
        raise invalid(SECONDS, f"{SECONDS} is {seconds!r:.40}; expected {SHORTEST_S} to {LONGEST_S}")
    return now() + int(seconds)
