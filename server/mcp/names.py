"""Choose the names by which a model calls the tools of MCP servers."""

from __future__ import annotations

import re
from collections.abc import Collection

MAX_NAME = 64
OTHER = re.compile(r"[^A-Za-z0-9_-]")


def plain_name(tool: str) -> str:
    """Return a tool's name with only the characters that every API allows, at most MAX_NAME of them. Other characters become
    underscores."""
    return OTHER.sub("_", tool)[:MAX_NAME]


def free_name(tool: str, server: str, taken: Collection[str]) -> str:
    """Return the tool's plain name. If it is in `taken`, return a name that begins with the server's name, and ends with a number if
    necessary."""
    if (plain := plain_name(tool)) not in taken:
        return plain
    long = OTHER.sub("_", f"{server}_{tool}")[: MAX_NAME - 4]
    return next(one for number in range(len(taken) + 2) if (one := f"{long}_{number}" if number else long) not in taken)
