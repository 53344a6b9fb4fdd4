"""Name fields in errors as the client's API does. Most APIs convert their requests to those of chat, completions or embeddings, so an error
about a converted request names a field that the client may not know."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from server.errors import ApiError

Names = Mapping[str, str]  # by the path of a field in the converted request: its path in the client's request


@contextmanager
def in_words(names: Names) -> Generator[None]:
    """Let errors that the `with` block raises name the fields of the client's request."""
    try:
        yield
    except ApiError as error:
        rename(error, names)
        raise


def rename(error: ApiError, names: Names) -> None:
    """Let an error name the fields of the client's request. A path in `names` also renames the paths below it, unless `names` has these.
    Replace the path with which the error's message usually begins. Elsewhere in the message, replace only names with an underscore: other
    names may be ordinary words."""
    param = error.param or ""
    known = max((path for path in names if re.match(rf"{re.escape(path)}(?![^.\[])", param)), key=len, default=None)
    if known is not None:
        error.param = names[known] + param[len(known) :]
        if re.match(rf"{re.escape(param)}(?![\w.\[])", error.message):
            error.message = error.param + error.message[len(param) :]
    if plain := "|".join(re.escape(name) for name in names if "_" in name and name.isidentifier()):
        error.message = re.sub(rf"(?<![\w.'\"])({plain})(?![\w'\"])", lambda found: names[found[0]], error.message)
