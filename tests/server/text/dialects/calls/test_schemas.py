"""Grammars and parsers of calls read any schema that a client sends, in time and memory that grow with its size."""

from __future__ import annotations

import pytest

from server.text.dialects.calls.schemas import kinds
from server.text.dialects.registry import FORMATS
from server.text.dialects.tool import ToolSchema
from tests.server.text.dialects.written import WRITERS
from tests.server.text.vocabulary import accepts

LITERALS = ["pythonic", "lfm2", "olmo3", "gemma4", "functiongemma"]  # formats whose values are not JSON


def grammar_of(name: str, parameters: dict[str, object]) -> str:
    return FORMATS[name].forced_calls([ToolSchema("f", parameters)], {}, several=False).source


class Counted(dict):
    """A schema that counts how often it is read."""

    num_read = 0

    def get(self, key, default=None):
        self.num_read += key == "type"
        return super().get(key, default)


def test_a_schema_that_refers_many_times_to_itself_is_read_once():
    node = Counted(anyOf=[{"$ref": "#/$defs/node"}] * 4 + [{"type": "integer"}])
    root = {"$defs": {"node": node}}
    assert kinds({"$ref": "#/$defs/node"}, root) == {"integer"}
    assert node.num_read == 1


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"anyOf": [{"oneOf": [{"type": ["string", "null"]}]}, {"enum": [1, 2.5]}]}, {"string", "null", "integer", "number"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({"anyOf": [{"type": "string"}, True]}, set()),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"const": None}, {"null"}),
    ],
)
def test_the_types_of_a_schema(schema, expected):
    assert kinds(schema, {"$defs": {"loop": {"$ref": "#/$defs/loop"}}}) == expected


@pytest.mark.parametrize("name", LITERALS)
def test_a_grammar_grows_with_the_number_of_properties(name):
    sizes = [len(grammar_of(name, {"properties": {f"p{number:03}": {} for number in range(most)}})) for most in (200, 400)]
    assert sizes[1] < 2.1 * sizes[0]


@pytest.mark.parametrize("name", LITERALS)
def test_properties_may_be_left_out_up_to_the_required_ones(name):
    parameters = {"properties": {key: {"type": "integer"} for key in "abcd"}, "required": ["c"]}
    forced = FORMATS[name].forced_calls([ToolSchema("f", parameters)], {}, several=False)
    for keys, allowed in [("c", True), ("abcd", True), ("acd", True), ("cd", True), ("", False), ("abd", False), ("ca", False)]:
        assert accepts(forced, WRITERS[name]([("f", dict.fromkeys(keys, 1))])) is allowed, keys
    free = FORMATS[name].forced_calls([ToolSchema("f", {**parameters, "required": []})], {}, several=False)
    for keys, allowed in [("", True), ("d", True), ("ad", True), ("abcd", True), ("da", False)]:
        assert accepts(free, WRITERS[name]([("f", dict.fromkeys(keys, 1))])) is allowed, keys


@pytest.mark.parametrize("name", LITERALS)
def test_schemas_may_refer_to_one_another_in_a_long_chain(name):
    chain = {f"s{number}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/s{number + 1}"}}} for number in range(1500)}
    assert "s1500" not in grammar_of(name, {"properties": {"a": {"$ref": "#/$defs/s0"}}, "$defs": {**chain, "s1500": {"type": "null"}}})


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("required", [[["a"], {"b": 1}, 3, None, "a"], "a", {"a": 1}])
def test_names_that_are_no_texts_are_not_required(name, required):
    assert "f" in grammar_of(name, {"properties": {"a": {"type": "integer"}}, "required": required})


@pytest.mark.parametrize("name", LITERALS)
@pytest.mark.parametrize("kind", ["float", ["float", 3], "any"])
def test_a_value_of_an_unknown_type_may_be_any(name, kind):
    parameters = {"properties": {"a": {"type": kind}}, "required": ["a"]}
    forced = FORMATS[name].forced_calls([ToolSchema("f", parameters)], {}, several=False)
    assert accepts(forced, WRITERS[name]([("f", {"a": 1.5})]))
    assert accepts(forced, WRITERS[name]([("f", {"a": "x"})]))
    assert not accepts(forced, WRITERS[name]([("f", {"a": 123})]).replace("123", ""))
