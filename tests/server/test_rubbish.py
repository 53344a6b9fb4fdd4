"""Whatever the OpenAPI document allows, and what it does not: never a 5xx that is a bug, always the envelope."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/admin/models"),
    ("PUT", "/admin/aliases/{alias}"),
    ("DELETE", "/admin/models/{name}"),
    ("POST", "/v1/models/{model}/load"),
    ("POST", "/models/load"),
]
EXPECTED = {501, 503}  # no planner, no cache; a model that is gone


@pytest.fixture(scope="module")
def document(shared_server) -> dict:
    return shared_server.http().get("/openapi.json").json()


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_nothing_breaks_it(shared_server, document, method, path):
    schema = schemathesis.openapi.from_dict(document)
    operation = schema[path][method]
    client = shared_server.http()

    def check(case) -> None:
        arguments = case.as_transport_kwargs(base_url=shared_server.url)
        arguments["content"] = arguments.pop("data", None)  # as httpx calls it
        arguments.pop("cookies", None)
        response = client.request(**arguments)
        assert response.status_code < 500 or response.status_code in EXPECTED, response.text
        if response.status_code >= 400:
            error = response.json()["error"]
            assert error["message"] and error["code"] and error["type"]

    relaxed = settings(max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
        relaxed(given(operation.as_strategy(generation_mode=mode))(check))()
