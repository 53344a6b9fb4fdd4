"""Numbers beyond every type, in each number of each body that the API describes: the answer is an error of the client, never of the
server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

REQUIRED = {
    "model": "null", "prompt": "x", "input": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "content": "x",
    "tokens": [1], "query": "x", "documents": ["x"], "texts": ["x"], "text": "x", "text_1": "x", "text_2": "x", "n_predict": 1,
    "max_output_tokens": 1, "num_predict": 1, "name": "null", "source": "null",
}  # fmt: skip
NUMBERS = ["9" * 5000, "9" * 400, "-1e308", "9" * 20]
SLOTS = {
    "logit_bias": ['{"1": #}', '{"' + "9" * 5000 + '": 1}', "[[1, #]]", "[[#, 1]]", '[["' + "9" * 5000 + '", 1]]']
}  # not described as numbers


def resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def kinds(schema: dict[str, Any], document: dict[str, Any]) -> set[str]:
    schema = resolved(schema, document)
    found = {schema["type"]} if isinstance(schema.get("type"), str) else set()
    return found.union(*(kinds(option, document) for option in (*schema.get("anyOf", ()), *schema.get("oneOf", ()))))


def bodies(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield paths, each with bodies that have a hostile number in one field."""
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if content is None or "{" in path:
            continue
        fields = resolved(content["schema"], document).get("properties", {})
        plain = {name: value for name, value in REQUIRED.items() if name in fields}
        for name, schema in fields.items():
            slots = SLOTS.get(name, ["#", "[#]", '{"a": #}'] if kinds(schema, document) & {"integer", "number", "array", "object"} else [])
            for slot in slots:
                for number in NUMBERS:
                    rest = json.dumps({other: value for other, value in plain.items() if other != name})[1:-1]
                    yield path, f'{{"{name}": {slot.replace("#", number)}{", " * bool(rest)}{rest}}}'


@pytest.mark.parametrize("part", range(2))
def test_no_number_in_a_body_is_the_server_s_fault(server, part: int):
    http = server.http()
    document = http.get("/openapi.json").json()
    failed: list[str] = []
    found = list(bodies(document))
    assert len(found) > 500
    for path, body in found[part::2]:
        answer = http.post(path, content=body, headers={"content-type": "application/json"}, timeout=30)
        if answer.status_code == 500:
            failed.append(f"{path} {body[:80]}")
    assert not failed


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "seed": 2**64}),
        ("/v1/completions", {"prompt": "x", "seed": 2**64}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "seed": 2**64}),
        ("/v1/responses", {"input": "x", "seed": 2**64}),
        ("/api/generate", {"prompt": "x", "options": {"seed": 2**64}}),
        ("/completion", {"prompt": "x", "seed": 2**64}),
    ],
)
@pytest.mark.parametrize("value", [2**64, 10**30, 1e30, -(2**63) - 1])
def test_an_error_states_the_limits_of_a_seed_exactly(server, path: str, body: dict[str, Any], value: float) -> None:
    """pydantic rounds large limits of unions in its messages."""
    text = json.dumps({"model": "null", **body}).replace(str(2**64), json.dumps(value))
    answer = server.http().post(path, content=text, headers={"content-type": "application/json"})
    limit = f"greater than or equal to {-(2**63)}" if value < 0 else f"less than {2**64}"
    assert answer.status_code == 400 and limit in answer.text, answer.text
