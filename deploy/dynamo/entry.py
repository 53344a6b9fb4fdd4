"""Read from a server's list of models how it describes the model of the worker."""

from __future__ import annotations

import msgspec

from server.settings import SettingsError


class Entry(msgspec.Struct, frozen=True):
    """The fields of a model that a worker needs."""

    id: str
    generates: bool
    aliases: tuple[str, ...]  # after `entry_in`: those that have no entry of their own in the list
    max_model_len: int | None = None  # None: the model is not loaded


class Listed(msgspec.Struct, frozen=True):
    """The answer to `/v1/models`."""

    data: tuple[Entry, ...]


def entry_in(answer: bytes, name: str, url: str) -> Entry:
    """Find a model by its name in the answer to `/v1/models`. Raise SettingsError if the server has not loaded it, if it generates no text,
    or if the server at `url` is no relaxserve."""
    try:
        listed = msgspec.json.decode(answer, type=Listed).data
    except (ValueError, RecursionError) as error:
        raise no_relaxserve(url, f"its answer to /v1/models is {answer[:100]!r}, {error}") from error
    entry = next((entry for entry in listed if entry.id == name), None)
    if entry is None or entry.max_model_len is None:
        names = ", ".join(entry.id for entry in listed) or "none"
        raise SettingsError(f"the server at {url} has no model {name!r}; it has: {names}. Name one as MODEL=NAME")
    if not entry.generates:
        raise SettingsError(f"the model {name} generates no text; expected one that does")
    # Leave out aliases that have an entry, and so defaults, of their own: Dynamo sends a request for an alias under the name of the model,
    # so the server would not apply these defaults.
    listed_names = {entry.id for entry in listed}
    return msgspec.structs.replace(entry, aliases=tuple(alias for alias in entry.aliases if alias not in listed_names))


def no_relaxserve(url: str, why: str) -> SettingsError:
    """Return the error that says that another server is at this address."""
    return SettingsError(f"the server at {url} is no relaxserve: {why}; expected the address of a relaxserve, http://HOST:PORT")
