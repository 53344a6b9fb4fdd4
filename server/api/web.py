"""Published models: a page at /web/MODEL/ on which a browser runs the model itself. The page needs no key, the model's files do.

A page that is isolated from other origins may share memory between threads; everything it loads is of this server.
"""

from __future__ import annotations

import hashlib
from pathlib import PurePosixPath

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse

from runtime.web import page_files
from server.api.context import Context
from server.api.routes import new_router
from server.errors import NOT_FOUND_PATH, ApiError
from server.http.auth import WEB_PAGE_SUFFIXES
from server.models.publications import PublishedFile

PAGE = "chat.html"
MEDIA_TYPES = {
    ".html": "text/html",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".json": "application/json",
    ".wasm": "application/wasm",
    ".bin": "application/octet-stream",
}
# Scripts of this server alone, which may compile WebAssembly; one named policy of trusted types, for the address of the worker.
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types relaxserve"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-embedder-policy": "require-corp",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def router(context: Context) -> APIRouter:
    routes = new_router("Pages")
    publications = context.registry.publications
    page = {name: data for name, data in page_files().items() if PurePosixPath(name).suffix in WEB_PAGE_SUFFIXES}
    etags = {name: f'"{hashlib.sha256(data).hexdigest()[:32]}"' for name, data in page.items()}

    @routes.get("/web/{path:path}", include_in_schema=False)
    async def get_file(path: str, request: Request) -> Response:
        model, name = publications.find(path)
        name = name or PAGE
        if name in page:
            return _unless_known(request, etags[name]) or Response(page[name], headers=_headers(name, etags[name]))
        if PurePosixPath(name).suffix in WEB_PAGE_SUFFIXES or name.endswith("/"):
            raise ApiError(NOT_FOUND_PATH, f"the page has no file {name!r:.80}")
        found = publications.file(model, name)
        return _unless_known(request, found.etag) or _part_or_whole(name, found)

    return routes


def _part_or_whole(name: str, found: PublishedFile) -> Response:
    """The response reads `Range` and `If-Range` of the request itself."""
    return FileResponse(found.path, headers=_headers(name, found.etag))


def _unless_known(request: Request, etag: str) -> Response | None:
    known = {text.strip().removeprefix("W/") for text in request.headers.get("if-none-match", "").split(",")}
    return Response(status_code=304, headers={**HEADERS, "etag": etag}) if etag in known else None


def _headers(name: str, etag: str) -> dict[str, str]:
    kind = MEDIA_TYPES.get(PurePosixPath(name).suffix, "application/octet-stream")
    return {**HEADERS, "etag": etag, "content-type": kind}
