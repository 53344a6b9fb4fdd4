"""A model whose files were downloaded to this machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """A downloaded model. `source` is the name that `pull` and `serve` accept."""

    source: str
    num_bytes: int
    used_s: float  # time of the last use, in seconds since 1970
    names: tuple[str, ...] = ()  # names of the catalogue that stand for this model
