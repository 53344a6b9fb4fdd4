"""The two pages for people: the console at `/`, the API at `/docs`. Each is one file and needs nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter, Response

from server.api.context import Context
from server.api.routes import new_router

INLINE_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def router(context: Context) -> APIRouter:
    del context  # pages are the same for everybody; what they show, they ask the API for
    routes = new_router("Pages")
    console, docs = _page("index.html"), _page("docs.html")

    @routes.get("/", include_in_schema=False)
    async def get_console() -> Response:
        return console

    @routes.get("/docs", include_in_schema=False)
    async def get_docs() -> Response:
        return docs

    return routes


def _page(name: str) -> Response:
    """A page that may run its own script and talk to this server, and nothing else."""
    text = files("server.console").joinpath(name).read_text(encoding="utf-8")
    digests = [hashlib.sha256(script.encode()).digest() for script in INLINE_SCRIPT.findall(text)]
    scripts = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Response(text, headers={"content-security-policy": policy, "referrer-policy": "no-referrer"}, media_type="text/html")
