"""Download models, as operations that an administrator can watch and cancel."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

from server.errors import FETCH_FAILED, INVALID_SOURCE, ApiError
from server.interfaces import LoadError
from server.models.library import Library
from server.models.operations import Operation, OperationState
from server.models.registry import Registry
from server.models.sources import require_download

DOWNLOAD = "download"

log = logging.getLogger(__name__)


def begin_download(source: str, registry: Registry) -> tuple[Operation, bool]:
    """Begin to download a model. Return the operation, and whether it begins now: False if the same download was running already. Raise
    ApiError if this server does not download the model."""
    require_download(source, registry.settings, registry.downloads)
    library = registry.library
    if library is None:
        raise ApiError(
            INVALID_SOURCE, f"source {source!r:.120} cannot be downloaded: this server was started without a library", param="source"
        )
    for operation in registry.operations.all():
        if (operation.kind, operation.model, operation.state) == (DOWNLOAD, source, OperationState.RUNNING):
            return operation, False
    operation = registry.operations.begin(DOWNLOAD, source)
    operation.task = asyncio.create_task(_download(operation, library, registry))
    return operation, True


async def _download(operation: Operation, library: Library, registry: Registry) -> None:
    """Download a model, and report the progress to the operation. A failure is logged and ends the operation."""
    log.info("downloading %s", operation.model)
    try:
        async with aclosing(library.pull(operation.model)) as parts:
            async for part in parts:
                operation.count(part)
    except asyncio.CancelledError:
        operation.end(OperationState.CANCELLED)
        log.info("the download of %s was cancelled; the next one continues with the first file that is missing", operation.model)
        raise
    except LoadError as error:
        operation.end(OperationState.FAILED, registry.budget.as_api_error(error))
        log.error("downloading %s: %s", operation.model, error.message)
        return
    except Exception as error:
        log.exception("downloading %s failed", operation.model)
        operation.end(OperationState.FAILED, ApiError(FETCH_FAILED, f"{type(error).__name__}: {error}"))
        return
    operation.end(OperationState.SUCCEEDED)
    log.info("downloaded %s", operation.model)
