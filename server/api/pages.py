"""Serve the HTML pages: the console at `/`, the list of endpoints at `/docs`, and their files below `/console/`. The pages load nothing
from other servers."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request, Response

from server.api.context import Context
from server.api.routes import is_known, new_router
from server.errors import NOT_FOUND_PATH, ApiError

MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
# A page may run only scripts of this server. Browsers that support trusted types refuse to assign a text to `innerHTML` and similar
# properties, so that no text becomes markup or code.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # browsers ask at every load whether there is a newer version
}


def router(context: Context) -> APIRouter:
    del context  # pages are the same for everybody; their scripts get data from the API
    routes = new_router("Pages")
    pages = _read(files("server.console"), "")

    def answer(name: str, request: Request) -> Response:
        """Return a file of the console, or an answer without content if the browser already has the file's present version. Raise ApiError
        if the console has no such file."""
        if name not in pages:
            raise ApiError(NOT_FOUND_PATH, f"the console has no file {name!r:.80}")
        data = pages[name]
        headers = {**HEADERS, "etag": f'"{hashlib.sha256(data).hexdigest()[:16]}"'}
        if is_known(request, headers["etag"]):
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type=MEDIA_TYPES[name.rpartition(".")[2]])

    @routes.get("/", include_in_schema=False)
    async def get_console(request: Request) -> Response:
        return answer("index.html", request)

    @routes.get("/docs", include_in_schema=False)
    async def get_docs(request: Request) -> Response:
        return answer("docs.html", request)

    @routes.get("/console/{name:path}", include_in_schema=False)
    async def get_file(name: str, request: Request) -> Response:
        return answer(name, request)

    return routes


def _read(folder: Traversable, prefix: str) -> dict[str, bytes]:
    """Return the contents of the files below `folder` whose types are in MEDIA_TYPES: browsers may request these files. The keys are
    `prefix` and the file's path below the folder."""
    found: dict[str, bytes] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= _read(entry, f"{prefix}{entry.name}/")
        elif entry.name.rpartition(".")[2] in MEDIA_TYPES:
            found[prefix + entry.name] = entry.read_bytes()
    return found
