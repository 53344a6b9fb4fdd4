"""What a replica tells the ingress about its server."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Lease:
    replica: str  # the replica's name
    url: str
    key: str = field(repr=False)  # with which the server takes open values
