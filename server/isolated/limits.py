"""Set limits of this process, which the kernel enforces."""

from __future__ import annotations

import resource
from pathlib import Path


def bound_memory(num_bytes: int) -> None:
    """Let this process take at most `num_bytes` of address space more than it has now. Let it write no core file, which would contain all
    that memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    bound(resource.RLIMIT_AS, used + num_bytes)
    bound(resource.RLIMIT_CORE, 0)


def bound(name: int, most: int) -> None:
    """Lower a limit of this process. The limit cannot be raised again."""
    _, hard = resource.getrlimit(name)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(name, (most, most))
