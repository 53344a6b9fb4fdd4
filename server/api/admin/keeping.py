"""GET and PUT /admin/kept_requests: show and change for which models and keys requests are stored for `relaxserve replay`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field
from typing_extensions import TypedDict

from server.api.answer.respond import json_answer
from server.api.context import Context
from server.api.request.fields import Options, check_unknown, ignored_header
from server.api.routes import ADMINISTRATION, gives, new_router
from server.errors import NOTHING_KEPT, ApiError
from server.http.kept_requests import KeptRequests
from server.settings import KEEP

log = logging.getLogger(__name__)


class KeepBody(Options):
    """The models and keys whose requests are to be stored, each as model=PATTERN or key=PATTERN."""

    of: list[Annotated[str, Field(pattern=f"^{KEEP}$", max_length=140)]] = Field(max_length=256, fail_fast=True)  # empty: store none


class Keeping(TypedDict):
    """The models and keys whose requests are stored, in the form of KeepBody."""

    of: Sequence[str]


def router(context: Context) -> APIRouter:
    routes = new_router(ADMINISTRATION, prefix="/admin")

    def kept() -> KeptRequests:
        """Return the file of requests. Raise ApiError if the server has none."""
        if context.kept is None:
            raise ApiError(NOTHING_KEPT, "this server has no file for requests; start it with --keep-requests FILE")
        return context.kept

    def told(headers: dict[str, str]) -> Response:
        """Return the answer with the models and keys whose requests are stored."""
        keeping: Keeping = {"of": kept().of}
        return json_answer(keeping, headers=headers)

    @routes.get("/kept_requests", responses=gives(Keeping))
    async def get_kept_requests() -> Response:
        """Return the models and keys whose requests are stored."""
        return told({})

    @routes.put("/kept_requests", responses=gives(Keeping))
    async def set_kept_requests(body: KeepBody) -> Response:
        """From now on, store only the requests of the models and keys in `of`. After a restart, the setting `keep_requests_of` applies
        again."""
        headers = ignored_header(check_unknown(body, strict=context.settings.strict))
        kept().of = tuple(body.of)
        log.info("requests are stored for: %s", ", ".join(body.of) or "none")
        return told(headers)

    return routes
