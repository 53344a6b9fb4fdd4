"""Describe a replica's server to the ingress: its address, the key that lets the ingress decide, and who may give it pages."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Lease:
    replica: str  # the replica's name
    url: str
    key: str = field(repr=False)  # with which the server takes open values, and hears of a giver
    giver: str = ""  # address of a server that has more of the prompt in its cache, or is to compute it
    computes: bool = False  # the giver is to compute the prompt first
    num_new: int = 0  # blocks of the prompt that no replica is known to have
