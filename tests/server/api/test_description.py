"""The OpenAPI document is complete: it describes the answer of every path, and all its references resolve."""

from __future__ import annotations

import json
import logging
import re

import msgspec

from server.messages import QualityLabel
from tests.doubles.worker import NullScript


def test_every_path_says_what_it_answers(server):
    document = server.http().get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["responses"].keys() >= {"200", "4XX", "5XX"} and "422" not in operation["responses"], (method, path)
            contents = operation["responses"]["200"].get("content", {}).values()  # an answer without a body has no content
            assert all(content.get("schema") or content.get("itemSchema") for content in contents), (method, path)
    referred = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert len(referred) > 40 and referred <= document["components"]["schemas"].keys()


def test_a_model_states_its_quality_if_it_was_measured(serve, caplog):
    caplog.set_level(logging.INFO, "server.models.load_report")
    label = QualityLabel(5.6e-4, 0.983, 18.9, 18.88, 2048)
    for script, expected in ((NullScript(label=label), msgspec.structs.asdict(label)), (NullScript(), None)):
        http = serve(script=script).http()
        (entry,), (report,) = (http.get(path).json()["data"] for path in ("/v1/models", "/admin/models"))
        assert entry.get("quality") == report.get("quality") == expected
    said = [record.getMessage() for record in caplog.records]
    assert sum("has a quality of KL 5.6e-04, top-1 98.3%" in line for line in said) == 1
