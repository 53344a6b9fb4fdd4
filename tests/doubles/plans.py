"""A plan of a load that never ends by itself."""

from __future__ import annotations

import asyncio
import threading

from server.models.model import Footprint
from server.models.state import ModelSpec


class EndlessPlan:
    """Plans loads until it is cancelled, and tells tests when it begins and ends."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    async def __call__(self, _spec: ModelSpec) -> Footprint:
        self.begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            self.ended.set()
        raise AssertionError("nobody cancelled the plan")
