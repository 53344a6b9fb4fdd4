"""POST /invocations, SageMaker's only path for requests. The fields of the body decide which API answers."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, cast

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from server.api.context import Context
from server.api.routes import new_router
from server.errors import INVALID_JSON, MISSING_FIELD, ApiError

# field of the body -> endpoint that answers if the field is not null; if a body has several of these fields, the first in this order
# decides
PATHS = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "documents": "/v1/rerank",
    "text_1": "/v1/score",
    "input": "/v1/embeddings",
}


def router(context: Context) -> APIRouter:
    routes = new_router("Operation")

    @routes.post("/invocations", include_in_schema=False)
    async def invocations(request: Request) -> Response:
        """Answer a request for chat, completions, rerank, scores or embeddings, as the endpoint for this kind of request does. A field that
        is null counts as absent."""
        try:
            body: Any = await request.json()
        except ValueError as error:
            raise ApiError(INVALID_JSON, f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ApiError(INVALID_JSON, "the body is not a JSON object")
        fields = cast("dict[str, Any]", body)
        path = next((path for field, path in PATHS.items() if fields.get(field) is not None), None)
        if path is None:
            raise ApiError(MISSING_FIELD, f"the body has none of {', '.join(PATHS)}; one of them is required", param="messages")
        return _Forwarded(request, path, await request.body())

    return routes


class _Forwarded(Response):
    """The response of the endpoint at `path` to the same request."""

    def __init__(self, request: Request, path: str, body: bytes) -> None:
        super().__init__()
        self._request = request
        self._path = path
        self._unread = [body]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the endpoint at `path` answer. The first message that the endpoint receives is the body, which was already read."""

        async def replayed() -> MutableMapping[str, Any]:
            if self._unread:
                return {"type": "http.request", "body": self._unread.pop(), "more_body": False}
            return await receive()

        there = {**self._request.scope, "path": self._path, "raw_path": self._path.encode()}
        await self._request.app.router(there, replayed, send)
