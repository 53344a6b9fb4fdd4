"""Decide where a request goes: to the pool that serves its model, or to no pool, because its path means one server."""

from __future__ import annotations

from collections.abc import Mapping

from server.http.auth import Access, access_of
from server.models.aliases import names_like

# Paths that mean one server, not the fleet, besides those of the administration.
OF_ONE_SERVER = ("/internal", "/metrics", "/load", "/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/realtime")


def means_one_server(path: str) -> bool:
    """Return whether a path means one server, so that the ingress refuses it."""
    is_own = any(path == own or path.startswith(f"{own}/") for own in OF_ONE_SERVER)
    return is_own or access_of(path, open_metrics=False) is Access.ADMIN


def pool_of(model: str, models: Mapping[str, str]) -> str | None:
    """Return the pool of a model, or None if no pool has it. The name may be followed by the tag of Ollama's clients or by further parts of
    a path."""
    while model:
        for name in names_like(model):
            if name in models:
                return models[name]
        model = model.rpartition("/")[0]
    return None
