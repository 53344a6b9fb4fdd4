"""Serve published models: a page at /web/MODEL/ on which a browser runs the model itself. Requests for the page need no key; requests for
the model's files do.

The page is isolated from other origins, so that it may share memory between threads. The page loads files of this server only.
"""

from __future__ import annotations

import hashlib
from pathlib import PurePosixPath

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse

from runtime.web import page_files
from server.api.context import Context, caller
from server.api.routes import is_known, new_router
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
# The page may run only scripts of this server, which may compile WebAssembly. One named policy of trusted types is allowed: it checks the
# address of the script of the page's web worker.
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
        """Return a file of the page, or a file of a model. All published models have the same page. `path` is MODEL/NAME; without NAME, it
        stands for the page. Raise ApiError if there is no such file, if the model is not exported yet, or if the key may not use the
        model."""
        model, name = publications.find(path)
        name = name or PAGE
        if name in page:
            return _unless_known(request, etags[name]) or Response(page[name], headers=_headers(name, etags[name]))
        if PurePosixPath(name).suffix in WEB_PAGE_SUFFIXES or name.endswith("/"):
            raise ApiError(NOT_FOUND_PATH, f"the page has no file {name!r:.80}")
        if not caller(request).limits.allow(model):
            raise ApiError(NOT_FOUND_PATH, f"there is nothing at /web/{path:.200} for this key")
        found = publications.file(model, name)
        return _unless_known(request, found.etag) or _part_or_whole(name, found)

    return routes


def _part_or_whole(name: str, found: PublishedFile) -> Response:
    """Return the file, or the part of it that the request asks for: FileResponse reads the headers `Range` and `If-Range`."""
    return FileResponse(found.path, headers=_headers(name, found.etag))


def _unless_known(request: Request, etag: str) -> Response | None:
    """Return an answer without content if the browser has this version of the file already, otherwise None."""
    return Response(status_code=304, headers={**HEADERS, "etag": etag}) if is_known(request, etag) else None


def _headers(name: str, etag: str) -> dict[str, str]:
    """Return the headers of a file."""
    kind = MEDIA_TYPES.get(PurePosixPath(name).suffix, "application/octet-stream")
    return {**HEADERS, "etag": etag, "content-type": kind}
