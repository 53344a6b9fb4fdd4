"""Whatever the OpenAPI document allows, and what it does not: never a 5xx that is a bug, always the envelope."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from server.app import create_app
from server.null import ByteTokenizer, NullScript, NullWorker
from server.registry import Registry
from server.settings import ServerSettings


def _document() -> dict:
    options = ServerSettings()
    return create_app(
        options, Registry(options, lambda _spec, _progress: NullWorker(NullScript()), lambda _source: ByteTokenizer())
    ).openapi()


DOCUMENT = _document()
OPERATIONS = [(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods]
EXPECTED = {501, 503, 504}  # no planner, no cache; a model that is gone; a deadline that is as good as over


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_nothing_breaks_it(shared_server, method, path):
    schema = schemathesis.openapi.from_dict(DOCUMENT)
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

    relaxed = settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    has_body = "requestBody" in DOCUMENT["paths"][path][method.lower()]  # nothing else can be wrong
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    for mode in modes if has_body else modes[:1]:
        relaxed(given(operation.as_strategy(generation_mode=mode))(check))()
