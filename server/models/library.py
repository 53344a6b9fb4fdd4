"""The models of the hub on this machine, as the front asks for them: how one comes, and how it goes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Pulled:
    """How far a download is."""

    total_bytes: int  # that were missing; 0 where the hub does not say
    completed_bytes: int


class Library(Protocol):
    def pull(self, source: str, /) -> AsyncGenerator[Pulled, None]:
        """Ends when all is here; closing it ends the download, and the next goes on from there. Raises LoadError."""
        ...

    async def remove(self, source: str, /) -> int:
        """How many bytes that gave; 0 if it was not here. Raises LoadError."""
        ...
