"""The grammars of calls accept the right texts: calls of offered tools, with arguments that match the schema. llguidance checks this on a
vocabulary of bytes."""

from __future__ import annotations

import pytest

from server.text.dialects.tool import ToolSchema
from server.text.parts import CallStart
from tests.server.text.dialects.calls.test_json_calls import JSON_CALLS
from tests.server.text.vocabulary import CALLS, accepts, behind_marker

TOOLS = [
    ToolSchema("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}),
    ToolSchema("now", None),
]


def written(form: str, name: str, arguments: str) -> str:
    key = JSON_CALLS[form].arguments_key
    call = f'{{"name": "{name}", "{key}": {arguments}}}'
    match form:
        case "hermes":
            return f"<tool_call>\n{call}\n</tool_call>"
        case "mistral":
            return f"[TOOL_CALLS][{call}]"
        case _:
            return call


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral", "json"])
def test_forced_calls(form):
    one = JSON_CALLS[form].forced(TOOLS, {}, several=False)
    for name, arguments, allowed in [("add", '{"a": 1}', True), ("add", "{}", False), ("now", "{}", True), ("other", "{}", False)]:
        text = written(form, name, arguments)
        assert accepts(one, text) is allowed, text
        if allowed:  # the tool parser must find the call in every text that the grammar allows
            parser = JSON_CALLS[form].parser(TOOLS, None)
            parts = [*parser.push(text), *parser.finish()]
            assert [part.name for part in parts if isinstance(part, CallStart)] == [name]
    assert not accepts(one, "hello")


@pytest.mark.parametrize(("form", "between"), [("hermes", "\n"), ("llama3", "; "), ("json", "; ")])
def test_several_calls(form, between):
    text = between.join([written(form, "now", "{}")] * 2)
    assert accepts(JSON_CALLS[form].forced(TOOLS, {}, several=True), text)
    assert not accepts(JSON_CALLS[form].forced(TOOLS, {}, several=False), text)


@pytest.mark.parametrize("form", ["hermes", "llama3", "json"])
def test_text_after_calls_begins_soon(form):
    """If a mask left a model only white space and text after a call, a small model might write line ends up to `max_tokens`."""
    call, several = written(form, "now", "{}"), JSON_CALLS[form].forced(TOOLS, {}, several=True)
    assert accepts(several, f"{call}\n\nDone.")
    assert not accepts(several, call + "\n" * 20 + "Done.")


def test_markers_that_are_tokens():
    forced = JSON_CALLS["mistral"].forced(TOOLS, {"[TOOL_CALLS]": CALLS}, several=False)
    assert accepts(forced, CALLS, '[{"name": "now", "arguments": {}}]')


@pytest.mark.parametrize(
    ("form", "written", "allowed"),
    [
        ("hermes", '\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', True),
        ("hermes", '\n{\n  "name": "now",\n  "arguments": {}\n}\n</tool_call>', True),
        ("hermes", '\n{"name": "added", "arguments": {"a": 1}}\n</tool_call>', False),
        ("hermes", '\n{"name": "add", "arguments": {"a": 1}}', False),
        ("hermes", '\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n', False),
        ("mistral", '[{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]', True),
        ("mistral", ' [{"name": "now", "arguments": {"b": [1]}}]', True),
        ("mistral", '[{"name": "other", "arguments": {}}]', False),
        ("mistral", 'add[ARGS]{"a": 1}', True),
        ("mistral", 'now{"b": 1}', True),
        ("mistral", "add{}", False),
        ("mistral", "other[ARGS]{}", False),
    ],
)
def test_calls_behind_their_marker(form, written, allowed):
    assert accepts(behind_marker(JSON_CALLS[form], TOOLS), written) is allowed
    if allowed:
        parser = JSON_CALLS[form].parser(TOOLS, None)
        parts = [*parser.push(JSON_CALLS[form].opening + written), *parser.finish()]
        assert {part.name for part in parts if isinstance(part, CallStart)} <= {"add", "now"} and not parser.finish()


def test_a_marker_of_arguments_may_be_a_token():
    assert accepts(behind_marker(JSON_CALLS["mistral"], TOOLS, {"[ARGS]": CALLS}), "now", CALLS, "{}")


def test_names_are_taken_by_the_letter_and_many_of_them_cost_little():
    tools = [ToolSchema("a.b", {}), *(ToolSchema(f"tool_of_some_server-{number}", {}) for number in range(1000))]
    constraint = behind_marker(JSON_CALLS["hermes"], tools)
    for name, allowed in [("a.b", True), ("axb", False), ("tool_of_some_server-999", True), ("tool_of_some_server-1000", False)]:
        assert accepts(constraint, f'\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>') is allowed


INNER = {"type": "object", "properties": {"x": {"type": "integer"}}}
FREE = {"type": "object"}


@pytest.mark.parametrize(
    ("parameters", "arguments", "allowed"),
    [
        ({}, "{}", True),
        ({}, '{"a": 1}', False),
        ({"type": "object", "properties": {}}, '{"a": 1}', False),
        ({"properties": {"p": INNER}}, '{"p": {"x": 1}}', True),
        ({"properties": {"p": INNER}}, '{"p": {"x": 1, "y": 2}}', False),
        ({"properties": {"p": {"type": "array", "items": INNER}}}, '{"p": [{"y": 2}]}', False),
        ({"properties": {"p": FREE}}, '{"p": {"y": 2}}', True),
        ({"properties": {}, "additionalProperties": True}, '{"a": 1}', True),
        ({"properties": {}, "additionalProperties": {"type": "integer"}}, '{"a": 1}', True),
        ({"anyOf": [INNER]}, '{"y": 2}', True),
        ({"required": ["a"]}, '{"a": 1}', True),
        (None, '{"a": 1}', True),
    ],
)
def test_arguments_have_no_properties_that_the_schema_does_not_name(parameters, arguments, allowed):
    """If the schema of a tool's arguments has no `additionalProperties`, only the named properties are allowed. With empty `properties`
    only `{}` is allowed."""
    forced = JSON_CALLS["hermes"].forced([ToolSchema("f", parameters)], {}, several=False)
    assert accepts(forced, written("hermes", "f", arguments)) is allowed


def test_a_schema_may_refer_to_its_own_parts():
    """A tool's schema may refer to its own parts by `#`, as schemas of nested pydantic models do. This works although the server embeds the
    tool's schema in a larger schema."""
    parameters = {
        "type": "object",
        "properties": {"point": {"$ref": "#/$defs/Point"}},
        "required": ["point"],
        "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    }
    forced = JSON_CALLS["hermes"].forced([*TOOLS, ToolSchema("move", parameters)], {}, several=False)
    assert accepts(forced, written("hermes", "move", '{"point": {"x": 1}}'))
    assert not accepts(forced, written("hermes", "move", '{"point": {}}'))
