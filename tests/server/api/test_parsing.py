"""/parse_function_call and /separate_reasoning show what a format reads, in SGLang's shape."""

from __future__ import annotations

import pytest

from server.models.state import ModelSpec

pytestmark = pytest.mark.parametrize(
    "shared_server", [{"initial": (ModelSpec("null", "null", tool_parser="hermes", reasoning=True),)}], indirect=True
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]
HERMES = 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CODER = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
CALL = {"tool_index": 0, "name": "add", "parameters": '{"a": 1}'}


@pytest.mark.parametrize(
    ("fields", "text", "answer"),
    [
        ({}, HERMES, {"normal_text": "I add.", "calls": [CALL]}),
        ({"tool_call_parser": "qwen25"}, HERMES, {"normal_text": "I add.", "calls": [CALL]}),
        ({"tool_call_parser": "qwen3_coder"}, CODER, {"normal_text": "", "calls": [CALL]}),
        ({"tool_call_parser": "llama3_json"}, '{"name": "add", "parameters": {"a": 1}}', {"normal_text": "", "calls": [CALL]}),
        ({}, "plain", {"normal_text": "plain", "calls": []}),
    ],
)
def test_calls_are_shown(server, fields, text, answer):
    assert server.http().post("/parse_function_call", json={"text": text, "tools": TOOLS, **fields}).json() == answer


@pytest.mark.parametrize(
    ("fields", "text", "thought", "rest"),
    [
        ({}, "<think>hm</think>yes", "hm", "yes"),
        ({}, "hm</think>yes", "hm", "yes"),
        ({"reasoning_parser": "deepseek-r1"}, "<think>hm</think>\n\nyes", "hm", "yes"),
        ({"reasoning_parser": "seed_oss"}, "<seed:think>hm</seed:think>yes", "hm", "yes"),
        ({"reasoning_parser": "gpt-oss"}, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|message|>yes", "hm", "yes"),
        ({}, "yes", "", "yes"),
    ],
)
def test_thoughts_are_separated(server, fields, text, thought, rest):
    answer = server.http().post("/separate_reasoning", json={"text": text, **fields}).json()
    assert answer == {"reasoning_text": thought, "text": rest}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/parse_function_call", {"text": "x", "tools": TOOLS, "tool_call_parser": "nobody"}, "tool_call_parser"),
        ("/parse_function_call", {"text": "x"}, "tools"),
        ("/separate_reasoning", {"text": "x", "reasoning_parser": "nobody"}, "reasoning_parser"),
        ("/separate_reasoning", {"text": "x" * 200_000}, "text"),
    ],
)
def test_refusals(server, path, body, param):
    response = server.http().post(path, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
