"""The document of the API is whole: every path says what it answers, and whatever it refers to is there."""

from __future__ import annotations

import json
import re


def test_every_path_says_what_it_answers(server):
    document = server.http().get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["responses"].keys() >= {"200", "4XX", "5XX"} and "422" not in operation["responses"], (method, path)
            contents = operation["responses"]["200"].get("content", {}).values()  # an answer may be empty
            assert all(content.get("schema") or content.get("itemSchema") for content in contents), (method, path)
    referred = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert len(referred) > 40 and referred <= document["components"]["schemas"].keys()
