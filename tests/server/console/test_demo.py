"""The console with the real demo model, in the state in which a user finds it on a new server."""

from __future__ import annotations

import json

import pytest

from tests.server.console.conftest import TOOLS, send

pytestmark = pytest.mark.xdist_group("demo server")


def test_an_example_question_is_answered(page, demo_server):
    """The console offers the demo's example questions. Below the answer it shows the token counts and how much of the context they use."""
    page.open(demo_server.url)
    page.click("button", "What is the capital of France?")
    page.see("The capital of France is Paris.", "article.assistant .prose")
    page.see("tokens", "article.assistant .figures")
    page.see("of 1,024 tokens", ".context")
    assert {request.partition("/")[0] for request in page.requests} == {"http:"}
    assert all(request.startswith(demo_server.url) for request in page.requests)


def test_an_answer_obeys_a_schema(page, demo_server):
    page.open(demo_server.url)
    page.see("Ask the demo model")
    page.click("#chat [data-action=options]")
    schema = {"type": "object", "properties": {"capital": {"type": "string"}}, "required": ["capital"], "additionalProperties": False}
    page.fill("#options [name=schema]", json.dumps(schema))
    page.fill("#options [name=temperature]", "0")
    send(page, "What is the capital of France?")
    assert json.loads(page.text("article.assistant .prose")) == {"capital": "Paris"}


def test_the_demo_calls_a_tool_and_tells_its_result(page, demo_server):
    page.open(demo_server.url)
    page.see("Ask the demo model")
    page.click("#chat [data-action=options]")
    page.fill("#options [name=tools]", TOOLS)
    page.fill("#options [name=temperature]", "0")
    send(page, "What is the weather in Paris?")
    assert '"city": "Paris"' in page.text(".call pre")
    page.fill(".answers textarea", '{"temperature": 21, "sky": "sunny"}')
    page.click(".answers button", "Send result")
    page.see("21", "article:last-of-type .prose")
