"""The document docs/api.md names only fields and paths that exist."""

from __future__ import annotations

import re
from pathlib import Path

from server.api.request.schema import ChatBody, CompletionBody

PAGE = (Path(__file__).parents[4] / "docs" / "api.md").read_text()


def test_the_page_names_fields_that_exist():
    fields = ChatBody.model_fields.keys() | CompletionBody.model_fields.keys()
    rows = re.search(r"\| Field \|(.*?)\n\n", PAGE, re.DOTALL)[1]
    cells = [line.split("|")[1] for line in rows.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert len(named) > 20 and named <= fields


def test_the_page_names_paths_that_exist(server):
    paths = server.http().get("/openapi.json").json()["paths"]
    for path in re.findall(r"(/admin/[a-z]+)", PAGE):
        assert any(known.startswith(path) for known in paths), path
