"""Where models may come from: folders below the model root, and hub ids when they are allowed."""

from __future__ import annotations

import re

from server.errors import INVALID_SOURCE, ApiError
from server.settings import ServerSettings

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[A-Za-z0-9][\w./-]*)?")  # with a file of it, or the end of its name


def resolve(source: str, settings: ServerSettings) -> str:
    """A path that exists below the model root, or a hub id. Links are followed before the path is judged."""
    root = settings.model_root.resolve()
    try:
        path = (root / source).resolve()
        exists = path.exists()
    except (OSError, ValueError) as error:  # too long, or with a zero byte
        raise _invalid(source, "cannot be a path") from error
    if not path.is_relative_to(root):
        raise _invalid(source, "lies outside the model root")
    if exists and path != root:
        return str(path)
    if settings.allow_hub and HUB_ID.fullmatch(source) and ".." not in source:
        return source
    hub = "" if settings.allow_hub else ", and hub ids are not allowed"
    raise _invalid(source, f"does not exist below the model root{hub}")


def _invalid(source: str, why: str) -> ApiError:
    return ApiError(INVALID_SOURCE, f"source {source!r:.120} {why}", param="source")
