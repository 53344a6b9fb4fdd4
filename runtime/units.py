"""Format amounts of memory for people."""

from __future__ import annotations


def in_mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f} MiB"
