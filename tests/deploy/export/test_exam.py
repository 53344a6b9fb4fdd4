"""In the demo's exam, a web export of the demo model gives the same answers in Chromium as the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.sources import load_of
from deploy.export.web import export_web
from deploy.model_loading.known import begin
from deploy.model_loading.servable import Servable
from deploy.model_loading.stages import advance
from tests.conftest import DemoServer
from tests.lab.chromium import Page
from tests.lab.site import serving
from tests.lab.training.evaluate import Server, on_the_wire
from tests.lab.training.exam import questions

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("demo server")]
SEED, PER_SKILL = 4711, 6
LOAD = "import('./relaxserve.mjs').then(async ({ RelaxServe }) => { window.client = await RelaxServe.load(); })"


def test_an_export_passes_the_exam_as_the_server_does(page: Page, demo_server: DemoServer, tmp_path: Path) -> None:
    """The export answers the same questions correctly as the server. Questions with a schema are left out, because an export cannot
    constrain answers."""
    export_web(advance(begin(load_of("demo", quantize="bf16", max_batch=1)), Servable), "demo", tmp_path, levels=["wasm-relaxed"])
    asked = [question for question in questions(SEED, PER_SKILL) if question.schema is None]
    answers: list[dict[str, Any]] = []
    with serving(tmp_path) as (address, _):
        page.open(f"{address}/chat.html")
        page.js(LOAD)
        for question in asked:
            body: dict[str, Any] = {"messages": on_the_wire(question.messages), "max_tokens": question.max_tokens, "temperature": 0}
            body |= {"tools": question.tools} if question.tools else {}
            answers.append(page.js(f"client.chat.completions.create({json.dumps(body)}).then(({{ choices: [{{ message }}] }}) => message)"))
    for answer in answers:
        for call in answer.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    theirs = Server(f"{demo_server.url}/v1", "demo").answers(asked)
    ours, expected = ([q.skill for q, answer in zip(asked, found, strict=True) if q.is_right(answer)] for found in (answers, theirs))
    assert ours == expected and len(ours) > 0.9 * len(asked)
