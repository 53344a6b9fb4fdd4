"""Random requests, valid and invalid by the OpenAPI document, never cause an unexpected 5xx status. All answers match the document."""

from __future__ import annotations

from itertools import count

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi import checks

from server.app import create_app
from server.models.registry import Registry
from server.settings import ServerSettings
from tests.doubles.worker import ByteTokenizer, NullScript, NullWorker


def _document() -> dict:
    options = ServerSettings()
    return create_app(
        options, Registry(options, lambda _spec, _progress: NullWorker(NullScript()), lambda _source: ByteTokenizer())
    ).openapi()


DOCUMENT = _document()
OPERATIONS = [(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods]
EXPECTED = {501, 503, 504}  # 501: the server has no planner or cache; 503: the model was unloaded; 504: the random deadline was too short
CONFORMANCE = [checks.status_code_conformance, checks.content_type_conformance, checks.response_schema_conformance]
TWIN = "/v1/chat/completions/render"  # accepts the same body as the path without /render
FURTHER_FIELDS = 2  # optional fields in a random request; with more fields, at least one would usually be out of range


def answer_to(case, server, client):
    """Send a random request and return the answer. Fail if the status is a 5xx that is not in EXPECTED."""
    arguments = case.as_transport_kwargs(base_url=server.url)
    arguments["content"] = arguments.pop("data", None)  # httpx calls the raw body `content`
    arguments.pop("cookies", None)
    response = client.request(**arguments)
    assert response.status_code < 500 or response.status_code in EXPECTED, response.text
    return response


pytestmark = pytest.mark.parametrize("shared_server", [{"script": NullScript(embedding_size=8)}], indirect=True, ids=[""], scope="module")


@pytest.mark.parametrize("num_examples", [3, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_nothing_breaks_it(shared_server, method, path, num_examples):
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method]
    client = shared_server.http()
    statuses, turns = set(), count()

    def check(case) -> None:
        response = answer_to(case, shared_server, client)
        statuses.add(response.status_code)
        if response.status_code >= 400:
            answer = response.json()
            error = answer["error"]
            told = (
                (error, answer["code"]) if isinstance(error, str) else (error["message"], error["code"], error["type"])
            )  # in Ollama's format, `error` is a string
            assert all(told)
        case.validate_response(response, checks=CONFORMANCE)

    def check_of_the_model(case) -> None:
        case.body = narrowed(case.body, required)
        if next(turns) % 2:
            case.body = with_texts(case.body)
        if method == "GET":
            case.path_parameters = dict.fromkeys(case.path_parameters, "null")
        check(case)

    body = DOCUMENT["paths"][path][method.lower()].get("requestBody")
    required = required_fields(body)
    every = settings(max_examples=num_examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    every(given(operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE))(check_of_the_model))()
    if body and path != TWIN:
        few = settings(every, max_examples=(num_examples + 1) // 2)  # fewer examples, because generating them takes long
        few(given(operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))(check))()
    if path.startswith(("/v1/chat", "/v1/completions", "/v1/embeddings", "/detokenize")):
        assert statuses >= {200}, "no request came through to the model"


def narrowed(body, required):
    """Return the body with only a few of its optional fields, so that the request is likely to be accepted."""
    if not isinstance(body, dict):
        return body
    further = [name for name in body if name not in required and name != "model"][:FURTHER_FIELDS]
    return {name: body[name] for name in body if name in required or name in further}


def with_texts(body):
    """Replace the messages of the body by plain user messages. The chat template would refuse most random messages. Replace `input` by a
    text, without messages beside it: most random lists of parts have both a text and an image in one part, or none."""
    if isinstance(body, dict) and "input" in body:
        return {**{name: value for name, value in body.items() if name != "messages"}, "input": "x"}
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        return body
    plain = [{**message, "role": "user", "content": "x", "tool_calls": None} for message in body["messages"]]
    return {**body, "messages": plain}


def required_fields(body) -> list[str]:
    schema = body["content"]["application/json"]["schema"] if body else {}
    described = DOCUMENT["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], {})
    return described.get("required") or described.get("anyOf", [{}])[0].get("required", [])
