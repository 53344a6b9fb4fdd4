"""Define the interface to models that are downloaded to this machine: list them, download a model, or remove it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Container, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry of the catalogue: a model that can be downloaded by its short name."""

    name: str
    about: str
    licence: str


@dataclass(frozen=True, slots=True)
class Stored:
    """A model that was downloaded to this machine."""

    source: str
    num_bytes: int
    used_s: float  # time of the last use in seconds since the epoch
    names: tuple[str, ...] = ()  # short names that stand for this model


@dataclass(frozen=True, slots=True)
class Pulled:
    """The progress of a download."""

    total_bytes: int  # bytes that were missing when the download began; 0 if the hub does not tell their number
    completed_bytes: int


class Library(Protocol):
    """The models that are downloaded to this machine, and those that can be downloaded."""

    @property
    def names(self) -> Container[str]:
        """Return the short names of models that can be downloaded. `pull` also accepts every hub id."""
        ...

    @property
    def catalogue(self) -> Sequence[Listed]:
        """Return the models that have short names."""
        ...

    async def stored(self) -> Sequence[Stored]:
        """Return the downloaded models on this machine."""
        ...

    def pull(self, source: str, /) -> AsyncGenerator[Pulled, None]:
        """Download a model and yield the progress. Closing the generator stops the download; the next `pull` continues with the first file
        that is missing. Raise LoadError if the download fails."""
        ...

    async def remove(self, source: str, /) -> int:
        """Remove a model. Return how many bytes were freed: 0 if no file of the model was stored on this machine. Raise LoadError if it
        cannot be removed."""
        ...
