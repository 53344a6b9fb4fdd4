"""The grammars that the server builds for requests accept the right texts. llguidance checks this on a vocabulary of bytes."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from server.constraints.process.sources import grammar_of
from server.constraints.process.wire import Source
from server.messages import Constraint, ConstraintKind
from server.text.grammar import Structure, ToolSchema, behind_thoughts, calls_behind_marker, forced_calls, json_text, structured
from server.text.parts import CallStart
from server.text.tools import FORMATS, ToolParser

THINK, UNTHINK, CALLS, EOS = 256, 257, 258, 259


class ByteVocabulary:
    eos_token_id = EOS
    bos_token_id = None
    # llguidance reads this attribute and `special_token_ids`
    tokens = [bytes([i]) for i in range(256)] + [b"<think>", b"</think>", b"[TOOL_CALLS]", b"<eos>"]
    special_token_ids = [THINK, UNTHINK, CALLS, EOS]  # noqa: RUF012

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(ByteVocabulary()))


def accepts(vocabulary: LLTokenizer, constraint: Constraint, *tokens: str | int) -> bool:
    ids = [i for token in tokens for i in ([token] if isinstance(token, int) else token.encode())]
    matcher = LLMatcher(vocabulary, grammar_of(Source(constraint.kind, constraint.source, constraint.head)))
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


TOOLS = [
    ToolSchema("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}),
    ToolSchema("now", None),
]


def written(form: str, name: str, arguments: str) -> str:
    key = FORMATS[form].arguments_key
    call = f'{{"name": "{name}", "{key}": {arguments}}}'
    match form:
        case "hermes":
            return f"<tool_call>\n{call}\n</tool_call>"
        case "mistral":
            return f"[TOOL_CALLS][{call}]"
        case _:
            return call


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral", "json"])
def test_forced_calls(vocabulary, form):
    one = forced_calls(FORMATS[form], TOOLS, {}, several=False)
    for name, arguments, allowed in [("add", '{"a": 1}', True), ("add", "{}", False), ("now", "{}", True), ("other", "{}", False)]:
        text = written(form, name, arguments)
        assert accepts(vocabulary, one, text) is allowed, text
        if allowed:  # the tool parser must find the call in every text that the grammar allows
            parser = ToolParser(FORMATS[form], frozenset({"add", "now"}))
            parts = [*parser.push(text), *parser.finish()]
            assert [part.name for part in parts if isinstance(part, CallStart)] == [name]
    assert not accepts(vocabulary, one, "hello")


@pytest.mark.parametrize(("form", "between"), [("hermes", "\n"), ("llama3", "; "), ("json", "; ")])
def test_several_calls(vocabulary, form, between):
    text = between.join([written(form, "now", "{}")] * 2)
    assert accepts(vocabulary, forced_calls(FORMATS[form], TOOLS, {}, several=True), text)
    assert not accepts(vocabulary, forced_calls(FORMATS[form], TOOLS, {}, several=False), text)


def test_markers_that_are_tokens(vocabulary):
    forced = forced_calls(FORMATS["mistral"], TOOLS, {"[TOOL_CALLS]": CALLS}, several=False)
    assert accepts(vocabulary, forced, CALLS, '[{"name": "now", "arguments": {}}]')


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
def test_calls_behind_their_marker(vocabulary, form, written, allowed):
    source = calls_behind_marker(FORMATS[form], TOOLS, {}, several=True)
    assert accepts(vocabulary, Constraint(ConstraintKind.GRAMMAR, source), written) is allowed
    if allowed:
        parser = ToolParser(FORMATS[form], frozenset({"add", "now"}))
        parts = [*parser.push(FORMATS[form].opening + written), *parser.finish()]
        assert {part.name for part in parts if isinstance(part, CallStart)} <= {"add", "now"} and not parser.finish()


def test_a_marker_of_arguments_may_be_a_token(vocabulary):
    source = calls_behind_marker(FORMATS["mistral"], TOOLS, {"[ARGS]": CALLS}, several=True)
    assert accepts(vocabulary, Constraint(ConstraintKind.GRAMMAR, source), "now", CALLS, "{}")


def test_names_are_taken_by_the_letter_and_many_of_them_cost_little(vocabulary):
    tools = [ToolSchema("a.b", {}), *(ToolSchema(f"tool_of_some_server-{number}", {}) for number in range(1000))]
    constraint = Constraint(ConstraintKind.GRAMMAR, calls_behind_marker(FORMATS["hermes"], tools, {}, several=True))
    for name, allowed in [("a.b", True), ("axb", False), ("tool_of_some_server-999", True), ("tool_of_some_server-1000", False)]:
        assert accepts(vocabulary, constraint, f'\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>') is allowed


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
def test_arguments_have_no_properties_that_the_schema_does_not_name(vocabulary, parameters, arguments, allowed):
    """If the schema of a tool's arguments has no `additionalProperties`, only the named properties are allowed. With empty `properties`
    only `{}` is allowed."""
    forced = forced_calls(FORMATS["hermes"], [ToolSchema("f", parameters)], {}, several=False)
    assert accepts(vocabulary, forced, written("hermes", "f", arguments)) is allowed


def test_a_schema_may_refer_to_its_own_parts(vocabulary):
    """A tool's schema may refer to its own parts by `#`, as schemas of nested pydantic models do. This works although the server embeds the
    tool's schema in a larger schema."""
    parameters = {
        "type": "object",
        "properties": {"point": {"$ref": "#/$defs/Point"}},
        "required": ["point"],
        "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    }
    forced = forced_calls(FORMATS["hermes"], [*TOOLS, ToolSchema("move", parameters)], {}, several=False)
    assert accepts(vocabulary, forced, written("hermes", "move", '{"point": {"x": 1}}'))
    assert not accepts(vocabulary, forced, written("hermes", "move", '{"point": {}}'))


SCHEMA = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "integer"}))


@pytest.mark.parametrize(
    "constraint",
    [
        SCHEMA,
        Constraint(ConstraintKind.REGEX, "[0-9]/?"),
        Constraint(ConstraintKind.CHOICE, '["7", "8\\n"]'),
        Constraint(ConstraintKind.GRAMMAR, 'start: digit\ndigit: "7"'),
    ],
)
def test_behind_thoughts(vocabulary, constraint):
    free = behind_thoughts(constraint, {}, open_already=False)
    assert accepts(vocabulary, free, "7")
    assert accepts(vocabulary, free, "<think>\nhm </th 8</think>\n\n7")
    assert not accepts(vocabulary, free, "hm</think>7")
    inside = behind_thoughts(constraint, {}, open_already=True)
    assert accepts(vocabulary, inside, "hm</think>\n7")
    assert not accepts(vocabulary, inside, "7")


def test_think_markers_that_are_tokens(vocabulary):
    specials = {"<think>": THINK, "</think>": UNTHINK}
    free = behind_thoughts(SCHEMA, specials, open_already=False)
    assert accepts(vocabulary, free, THINK, "hm", UNTHINK, "\n7")
    assert accepts(vocabulary, free, "7")


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("free text", True),
        ("", True),
        ("so <f>7</f> and <g>8</g>", True),
        ("<f>7</f><f>8</f>", True),
        ("<f>no</f>", False),
        ("<f>7", False),
        ("a < b and <h>", True),
    ],
)
def test_structures_within_free_text(vocabulary, text, allowed):
    schema = {"type": "integer"}
    structures = [Structure("<f", "<f>", schema, "</f>"), Structure("<g>", "<g>", schema, "</g>")]
    assert accepts(vocabulary, structured(structures), text) is allowed


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ('{"a":1,"b":{}}', True),
        ('{"a": 1, "b": {}}', True),
        ('{\n  "a": 1,\n  "b": {\n    "c": [1, 2]\n  }\n}', True),
        ('{\n\n"a": 1}', False),
        ('{"a":  1}', False),
    ],
)
def test_json_may_be_indented_and_no_more(vocabulary, text, allowed):
    constraint = Constraint(ConstraintKind.GRAMMAR, "start: %json " + json_text({"type": "object"}))
    assert accepts(vocabulary, constraint, text) is allowed


def test_json_object_behind_thoughts(vocabulary):
    free = behind_thoughts(Constraint(ConstraintKind.JSON_SCHEMA, json_text({"type": "object"})), {}, open_already=False)
    assert accepts(vocabulary, free, '<think>x</think>{"a": 1}') and not accepts(vocabulary, free, "[1]")
