"""GET and POST /admin/downloads: list the models that can be downloaded and those that were downloaded, and begin a download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from server.api.answer.respond import json_answer
from server.api.context import Context, path_for
from server.api.request.fields import Options, check_unknown, ignored_header
from server.api.routes import ADMINISTRATION, gives, new_router
from server.interfaces import LoadError
from server.models.downloads import begin_download
from server.models.operations import OperationReport


class DownloadBody(Options):
    """The body that begins a download."""

    source: Annotated[str, Field(min_length=1, max_length=1024)]


class ListedModel(TypedDict):
    """A model that has a short name."""

    name: str
    about: str
    licence: str
    here: bool  # whether the model is on this machine


class StoredModel(TypedDict):
    """A model that was downloaded to this machine. `used_at`: Unix time of the model's last use."""

    source: str
    bytes: int
    used_at: float


class Downloadable(TypedDict):
    """The models that have short names (`catalogue`), and those that were downloaded (`data`)."""

    object: Literal["list"]
    allowed: bool  # whether this server downloads models, which --allow-hub permits
    catalogue: Sequence[ListedModel]
    data: Sequence[StoredModel]


def router(context: Context) -> APIRouter:
    routes = new_router(ADMINISTRATION, prefix="/admin")
    registry, settings = context.registry, context.settings

    @routes.get("/downloads", responses=gives(Downloadable))
    async def list_downloads() -> Response:
        """List the downloaded models on this machine, and the models that have short names. `allowed` says whether this server downloads
        models."""
        library = registry.library
        try:
            stored = [] if library is None else await library.stored()
        except LoadError as error:
            raise registry.budget.as_api_error(error) from error
        here = {name for one in stored for name in one.names}
        listed: Downloadable = {
            "object": "list",
            "allowed": settings.allow_hub and library is not None,
            "catalogue": [
                {"name": one.name, "about": one.about, "licence": one.licence, "here": one.name in here}
                for one in (() if library is None else library.catalogue)
            ],
            "data": [{"source": one.source, "bytes": one.num_bytes, "used_at": one.used_s} for one in stored],
        }
        return json_answer(listed)

    @routes.post("/downloads", responses={**gives(OperationReport), **gives(OperationReport, status=202)})
    async def download(request: Request, body: DownloadBody) -> Response:
        """Begin to download a model, or continue an interrupted download. The answer is an operation to watch, or to cancel, under
        /admin/operations. If the model is being downloaded already, answer 200 with the running operation."""
        headers = ignored_header(check_unknown(body, strict=settings.strict))
        operation, is_new = begin_download(body.source, registry)
        location = {"location": path_for(request, f"/admin/operations/{operation.id}")}
        return json_answer(operation.describe(), 202 if is_new else 200, headers={**headers, **location})

    return routes
