"""Describe a replica's server to the ingress: its address, its `ingress_key`, and a server that may give it pages."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Lease:
    replica: str  # the replica's name
    url: str
    key: str = field(repr=False)  # the server accepts open values, and the name of a giver, only with this key
    giver: str = ""  # address of another server, which has more of the prompt in its cache or is to compute it; empty: there is none
    computes: bool = False  # whether the giver is to compute the prompt first
    num_new: int = 0  # number of blocks of the prompt that no replica is known to have in its cache
