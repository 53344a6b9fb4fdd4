"""Refuse a request in the shape of its API, as a server would."""

from __future__ import annotations

from starlette.responses import Response

from server.api.endpoints import error_shapes
from server.errors import ApiError

SHAPES = error_shapes()  # made here, because the import of all APIs takes so long that requests would have to wait


def refusal(path: str, error: ApiError) -> Response:
    """Return the answer to a request of `path` that ends with this error."""
    root = next((root for root in SHAPES if path == root or path.startswith(f"{root}/")), None)
    body = error.body() if root is None else SHAPES[root](error)
    return Response(body, error.kind.status, error.response_headers(), "application/json")
