"""Random requests to the admin API. They name existing and missing models, aliases and operations."""

from __future__ import annotations

from collections import defaultdict

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.http.auth import Access, access_of
from server.models.model import Footprint, FormEstimate
from tests.doubles.library import Shelf
from tests.server.test_rubbish import CONFORMANCE, DOCUMENT, OPERATIONS, answer_to

ADMINISTRATION = [(method, path) for method, path in OPERATIONS if access_of(path, open_metrics=False) is Access.ADMIN]
# field -> a name that the server accepts
KNOWN = {"model": "null", "name": "null", "alias": "other", "source": "null", "destination": "third"}
# whole bodies and queries that the server accepts
KNOWN_BODIES = {"/api/create": {"model": "third", "from": "null"}, "/admin/downloads": {"source": "known"}}
KNOWN_QUERIES = {"/admin/forms": {"source": "null"}}
NOTHING_TO_REMOVE = ("/admin/cache", "/api/delete")  # here no request needs to succeed, because the server has no files to delete


def test_every_way_to_administrate_is_described():
    assert {path for _, path in ADMINISTRATION} >= {path for path in DOCUMENT["paths"] if path.startswith("/admin")}
    assert len(ADMINISTRATION) > 15


@pytest.mark.parametrize(("method", "path"), ADMINISTRATION)
def test_nothing_breaks_the_administration(serve, tmp_path, method, path):
    """Random requests to one path of the admin API: at least one succeeds, and every answer matches the OpenAPI document. Afterwards the
    admin API still works."""
    (tmp_path / "models" / "null").mkdir(parents=True)
    planned = {"footprints": defaultdict(lambda: Footprint(1, 1, 1, 1)), "forms": {"null": [FormEstimate("auto", 1, 0.0)]}}
    server = serve(initial=(), library=Shelf(), allow_hub=True, drain_s=0.01, **planned)
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method]
    client = server.http()
    statuses = set()

    def restore() -> str:
        """Load the model and set the alias again, in case an earlier random request removed them. Return the id of the load operation."""
        done = client.post("/admin/models", json={"source": "null", "wait": True})
        assert done.status_code == 200, done.text
        client.put("/admin/aliases/other", json={"model": "null"})
        return done.json()["id"]

    def ask(case) -> None:
        response = answer_to(case, server, client)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CONFORMANCE)

    def check(case, is_known) -> None:
        known = {**KNOWN, "operation_id": restore()}
        if is_known:
            case.path_parameters = {name: known[name] for name in case.path_parameters or {}}
            case.query = KNOWN_QUERIES.get(path, {})
            if isinstance(case.body, dict):
                case.body = KNOWN_BODIES.get(path) or {name: known[name] for name in case.body if name in known}
        ask(case)

    options = settings(max_examples=3, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    allowed = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
    for is_known in (False, True):
        options(given(allowed, st.just(is_known))(check))()
    if "requestBody" in DOCUMENT["paths"][path][method.lower()]:
        options(given(operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))(ask))()
    ended = method == "DELETE" and "operations" in path  # a finished operation cannot be cancelled
    assert ended or path in NOTHING_TO_REMOVE or any(status < 300 for status in statuses), statuses
    restore()
    assert server.complete().status_code == 200
