"""The parser of calls that are JSON finds them with all markers that formats have, however the text is split."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.dialects.calls import json_parser
from server.text.dialects.calls.json_calls import JsonCalls
from server.text.dialects.registry import WRITTEN
from server.text.dialects.tool import ToolSchema
from server.text.parts import CallArguments, CallStart, Content

NAMES = frozenset({"add", "now"})
TOOLS = [ToolSchema(name) for name in sorted(NAMES)]
JSON_CALLS = {form.name: form.call_syntax for form in WRITTEN if isinstance(form.call_syntax, JsonCalls)}
HERMES, LLAMA3, MISTRAL, GENERIC = (JSON_CALLS[name] for name in ("hermes", "llama3", "mistral", "json"))


def parse(form: JsonCalls, text: str, cuts: list[int], max_calls: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    parser, parts, at = form.parser(TOOLS, max_calls), [], 0
    sizes = iter(cuts)
    while at < len(text):
        size = next(sizes, 1)
        parts += parser.push(text[at : at + size])
        at += size
    parts += parser.finish()
    starts = [part for part in parts if isinstance(part, CallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    assert len({start.id for start in starts}) == len(starts)
    arguments = ["" for _ in starts]
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index] += part.text  # raises an error if the parser did not report the start of the call
    content = "".join(part.text for part in parts if isinstance(part, Content))
    return content, [(start.name, argument) for start, argument in zip(starts, arguments, strict=True)]


ADD = '{"name": "add", "arguments": {"a": 1, "b": "}\\"{"}}'
DEFINITION = '{"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}'
ARGUMENTS = '{"a": 1, "b": "}\\"{"}'


CASES = [
    (HERMES, f"<tool_call>\n{ADD}\n</tool_call>", "", [("add", ARGUMENTS)]),
    (HERMES, f"Let me see.\n<tool_call>{ADD}</tool_call>\n", "Let me see.", [("add", ARGUMENTS)]),
    (HERMES, f"<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>", "", [("add", ARGUMENTS)] * 2),
    (HERMES, '<tool_call>{"arguments": {"x": []}, "name": "now"}</tool_call>', "", [("now", '{"x": []}')]),
    (HERMES, '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    (HERMES, '<tool_call>{"thought": "x", "name": "now"}</tool_call>', "", [("now", "{}")]),
    (LLAMA3, '{"type": "function", "name": "now", "parameters": {}}', "", [("now", "{}")]),
    (LLAMA3, '<|python_tag|>{"thought": "x", "name": "now", "parameters": {}}', "", [("now", "{}")]),
    (HERMES, '<tool_call>{"name": "other", "arguments": {}}</tool_call>', "", [("other", "{}")]),
    (HERMES, '<tool_call>{"name": "now", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("now", '{"x": 1}')]),
    (HERMES, '<tool_call>{"name": "now", "arguments": "{\\"x\\": \\"a\\nb\n\\"}"}</tool_call>', "", [("now", '{"x": "a\\nb\\n"}')]),
    (HERMES, '<tool_call>{"name": "now", "arguments": "a \\"b\\nc\\""}</tool_call>', "", [("now", 'a "b\nc"')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}", "id": "x', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
    (HERMES, '<tool_call>{"arguments": null, "name": "now"}</tool_call>', "", [("now", "{}")]),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}, "parameters": {}}</tool_call>', "", [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"parameters": {"a": 1}, "name": "add", "arguments": "x"}</tool_call>', "", [("add", '{"a": 1}')]),
    (LLAMA3, '{"name": "now", "parameters": null}; {"name": "now", "parameters": nu', "", [("now", "{}"), ("now", "")]),
    (HERMES, "<tool_call>\nnot json</tool_call> after", "<tool_call>\nnot json</tool_call> after", []),
    (HERMES, "<tool_call>{broken}</tool_call>", "<tool_call>{broken}</tool_call>", []),
    (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    (HERMES, "a < b and <tool> ", "a < b and <tool> ", []),
    (HERMES, '{"name": "add", "arguments": {}}', '{"name": "add", "arguments": {}}', []),
    (LLAMA3, '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (LLAMA3, DEFINITION, DEFINITION, []),
    (LLAMA3, '{"name": "now", "parameters": {}, "why": "so"}', "", [("now", "{}")]),
    (LLAMA3, '<|python_tag|>{"name": "now", "why": "so", "parameters": {}}', "", [("now", "{}")]),
    (LLAMA3, '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "now", "parameters": {}}', "", [("add", "{}"), ("now", "{}")]),
    (LLAMA3, '{"temperature": 20}', '{"temperature": 20}', []),
    (LLAMA3, '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
    (LLAMA3, '{"parameters": {}, "name": "Ann"}', '{"parameters": {}, "name": "Ann"}', []),
    (LLAMA3, '{"parameters": {}, "why": "so", "name": "now"}', '{"parameters": {}, "why": "so", "name": "now"}', []),
    (LLAMA3, '{"parameters": {"a": 1}, "name": "now", "why', "", [("now", '{"a": 1}')]),
    (LLAMA3, '{"name": 7, "parameters": {}}', '{"name": 7, "parameters": {}}', []),
    (LLAMA3, '{"name": ["now"], "name": "now"}', '{"name": ["now"], "name": "now"}', []),
    (MISTRAL, f"[TOOL_CALLS][{ADD}, {ADD}]", "", [("add", ARGUMENTS)] * 2),
    (MISTRAL, f"[TOOL_CALLS] [{ADD}]", "", [("add", ARGUMENTS)]),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": {"b": 2}}[TOOL_CALLS]now{}', "", [("add", '{"a": {"b": 2}}'), ("now", "{}")]),
    (GENERIC, f"[{ADD}]", "", [("add", ARGUMENTS)]),
    (GENERIC, f" {ADD} thanks", "thanks", [("add", ARGUMENTS)]),
    (GENERIC, '{"name": "now"}', "", [("now", "{}")]),
    (GENERIC, "[1, 2]", "[1, 2]", []),
    (GENERIC, f"Sure: {ADD}", f"Sure: {ADD}", []),
    (GENERIC, "  ", "  ", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_formats(form, text, content, calls):
    assert parse(form, text, [len(text)]) == (content, calls)
    assert parse(form, text, []) == (content, calls)


FRAGMENTS = (
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "add", "{", "}", "[", "]", ",", ";", '"', ":", "\\"]
    + ['{"name": "add", ', '"arguments": {"a": [1]}}', '"parameters": {}}', ADD, " ", "\n", "x", "<", "</tool", "[TOOL"]
)  # fmt: skip


@pytest.mark.parametrize("name", JSON_CALLS)
def test_the_same_for_every_cut(name):
    @given(st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join), st.lists(st.integers(1, 9), max_size=30))
    def check(text, cuts):
        assert parse(JSON_CALLS[name], text, cuts) == parse(JSON_CALLS[name], text, [len(text) or 1])

    check()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=4), json_values, max_size=3), st.lists(st.integers(1, 9), max_size=30), st.booleans())
def test_any_arguments_come_through(arguments, cuts, ascii_only):
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    text = f'<tool_call>\n{{"name": "add", "arguments": {written}}}\n</tool_call>'
    assert parse(HERMES, text, cuts) == ("", [("add", written)])


@pytest.mark.parametrize("form", [LLAMA3, GENERIC], ids=["llama3", "json"])
def test_an_answer_in_json_is_not_held_back_longer_than_its_first_key(form):
    """Without a marker, an object is a call only if its keys are those of one."""
    parser = form.parser(TOOLS, None)
    assert parser.push('{"temperature": ') == [Content('{"temperature":')]
    assert parser.push("20, ") == [Content(" 20,")]


@pytest.mark.parametrize("form", [LLAMA3, GENERIC], ids=["llama3", "json"])
def test_an_answer_in_json_is_not_held_back_longer_than_a_name_that_no_tool_has(form):
    parser = form.parser(TOOLS, None)
    assert parser.push('{"name": "Paris"') == []
    assert parser.push(', "population": ') == [Content('{"name": "Paris",'), Content(' "population":')]
    assert parser.push("1}") == [Content(" 1}")]


def test_no_more_calls_than_allowed():
    text = f"<tool_call>{ADD}</tool_call><tool_call>{ADD}</tool_call> and more"
    assert parse(HERMES, text, [], max_calls=1) == ("", [("add", ARGUMENTS)])


def test_mistral_ids_have_nine_letters():
    (start, *_) = MISTRAL.parser(TOOLS, None).push(f"[TOOL_CALLS][{ADD}]")
    assert isinstance(start, CallStart) and len(start.id) == 9 and start.id.isalnum()


def test_arguments_written_as_a_string_are_unpacked_once(monkeypatch):
    """Reading the string again with each token would take a time that grows with the square of its length."""
    read = []

    def loads(text):
        read.append(text)
        return json.loads(text)

    monkeypatch.setattr(json_parser, "json", SimpleNamespace(loads=loads))
    long = json.dumps(json.dumps({"a": "x" * 500}))
    assert parse(HERMES, f'<tool_call>{{"name": "add", "arguments": {long}}}</tool_call>', []) == ("", [("add", json.loads(long))])
    assert [len(text) > 100 for text in read].count(True) == 1
