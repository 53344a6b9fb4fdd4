"""A request goes to the pool that serves its model. What means one server goes to none."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from deploy.ray.destination import means_one_server, pool_of
from deploy.ray.wish import REPEATABLE
from server.app import create_app
from server.models.registry import Registry
from server.settings import ServerSettings
from tests.doubles.worker import ByteTokenizer, NullScript, NullWorker

POOLS = {"a": "one", "org/b": "two", "c": "two"}


@pytest.mark.parametrize(
    ("named", "pool"),
    [
        ("a", "one"),
        ("a:latest", "one"),
        ("org/b", "two"),
        ("org/b/ready", "two"),
        ("c/x/y.html", "two"),
        ("org", None),
        ("d", None),
        ("", None),
    ],
)
def test_a_model_is_found_by_its_name(named: str, pool: str | None) -> None:
    assert pool_of(named, POOLS) == pool


@pytest.mark.parametrize(
    ("path", "is_own"),
    [
        *((path, True) for path in ("/admin", "/admin/models/x", "/sleep", "/api/pull", "/v1/models/x/load", "/v2/repository/index")),
        *((path, True) for path in ("/internal/pages", "/metrics", "/load", "/v1/files", "/v1/batches/x", "/v1/realtime")),
        *((path, False) for path in ("/v1/models", "/v1/models/x", "/api/tags", "/health", "/v1/filesystem", "/administer", "/")),
    ],
)
def test_what_means_one_server(path: str, is_own: bool) -> None:
    assert means_one_server(path) is is_own


def routes() -> Iterator[tuple[str, str]]:
    """Yield the methods and paths of a server, the administration among them."""
    settings = ServerSettings()
    app = create_app(settings, Registry(settings, lambda _spec, _progress: NullWorker(NullScript()), lambda _source: ByteTokenizer()))
    for route in app.routes:
        for method in getattr(route, "methods", None) or ():
            yield method, re.sub(r"\{[^}]*\}", "x", route.path)  # type: ignore[attr-defined]


def test_every_request_of_a_server_is_known_to_the_ingress() -> None:
    """A new path must be named: a request that only computes goes to another replica if its own one dies."""
    acting = {"/v1/responses/x/cancel"}
    posted = {path for method, path in routes() if method == "POST" and not means_one_server(path)}
    assert posted - acting == REPEATABLE
