"""Describe a replica's server to the ingress: its address, and the key that lets the ingress decide open values."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Lease:
    replica: str  # the replica's name
    url: str
    key: str = field(repr=False)  # with which the server takes open values
