"""Build the validators of request bodies after the server has started, between requests. A request that comes before the validator of its
body is built, builds this validator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from server.api.request.fields import Options

AFTER_S = 1.0  # seconds from the server's start to the first build, so that the first requests need not wait
PAUSE_S = 0.01  # seconds between two validators; building the largest takes 20 ms

log = logging.getLogger(__name__)


async def build_validators() -> None:
    """Build the validators one by one, with pauses, and log those that cannot be built. Building all validators during the server's start
    would lengthen the start by a tenth of a second."""
    await asyncio.sleep(AFTER_S)
    for body in _below(Options):
        if not body.__pydantic_complete__:
            try:
                body.model_rebuild()
            except Exception:
                log.exception("the validator of %s cannot be built", body.__name__)
            await asyncio.sleep(PAUSE_S)


def _below(parent: type[Options]) -> Iterator[type[Options]]:
    """Yield all classes that inherit from a class."""
    for child in parent.__subclasses__():
        yield child
        yield from _below(child)
