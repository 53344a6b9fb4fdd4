"""Grammars and parsers of calls read any schema that a client sends, in time and memory that grow with its size."""

from __future__ import annotations

import json

import pytest

from server.text.dialects.calls.schemas import alone, kinds
from server.text.dialects.registry import FORMATS
from server.text.dialects.tool import ToolSchema
from server.text.grammar import GrammarTooLarge
from server.text.parts import CallArguments
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
@pytest.mark.parametrize("kind", ["float", ["float", 3], ["float", "null"], "any"])
def test_a_value_of_an_unknown_type_may_be_any(name, kind):
    parameters = {"properties": {"a": {"type": kind}}, "required": ["a"]}
    forced = FORMATS[name].forced_calls([ToolSchema("f", parameters)], {}, several=False)
    assert accepts(forced, WRITERS[name]([("f", {"a": 1.5})]))
    assert accepts(forced, WRITERS[name]([("f", {"a": "x"})])) and accepts(forced, WRITERS[name]([("f", {"a": None})]))
    assert not accepts(forced, WRITERS[name]([("f", {"a": 123})]).replace("123", ""))


def test_a_value_whose_schema_is_another_part_is_read_as_that_part_says():
    """The reference is percent-encoded, as a pointer in the fragment of a URI is."""
    parameters = {"properties": {"a": {"$ref": "#/$defs/List%3Ca~1b%3E"}}, "$defs": {"List<a/b>": {"type": "string"}}}
    parser = FORMATS["qwen3-coder"].call_syntax.parser([ToolSchema("f", parameters)], None)
    text = "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n</function>\n</tool_call>"
    parts = [*parser.push(text), *parser.finish()]
    assert json.loads("".join(part.text for part in parts if isinstance(part, CallArguments))) == {"a": "12"}


TAGGED = ["qwen3-coder", "glm45", "minimax-m2", "deepseek-v3.2", "seed-oss"]  # formats whose parameters stand between tags
TREE = {"properties": {"label": {"type": "string"}, "inner": {"type": "array", "items": {"$ref": "#"}}}, "required": ["label"]}
PAIR = {"properties": {"a": {"type": "object", "properties": {"n": {"type": "integer"}}}, "b": {"$ref": "#/properties/a"}}}
LISTED = {
    "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/x%20y/anyOf/1"}}},
    "$defs": {"x y": {"anyOf": [{}, {"const": 7}]}},
}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    ("parameters", "arguments", "allowed"),
    [
        (TREE, {"label": "a", "inner": [{"label": "b", "inner": [{"label": "c"}]}]}, True),
        (TREE, {"label": "a", "inner": [{"inner": []}]}, False),
        (TREE, {"label": "a", "inner": [[]]}, False),
        (PAIR, {"b": {"n": 1}}, True),
        (PAIR, {"b": {"n": "x"}}, False),
        (LISTED, {"a": [7, 7]}, True),
        (LISTED, {"a": [8]}, False),
    ],
)
def test_a_parameter_may_refer_to_any_part_of_the_schema(name, parameters, arguments, allowed):
    forced = FORMATS[name].forced_calls([ToolSchema("f", parameters)], {}, several=False)
    assert accepts(forced, WRITERS[name]([("f", arguments)])) is allowed


@pytest.mark.parametrize("name", TAGGED)
def test_a_parameter_has_only_the_definitions_to_which_it_refers(name):
    shared = {"used": {"type": "object", "properties": {"n": {"$ref": "#/$defs/deeper"}}}, "deeper": {"type": "integer"}}
    properties = {"flag": {"type": "boolean"}, "count": {"type": "integer"}, "point": {"$ref": "#/$defs/used"}}
    grammar = grammar_of(name, {"properties": properties, "$defs": {**shared, "unused": {"enum": ["unused"]}}})
    assert "unused" not in grammar and grammar.count('"n"') == 1


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("text", [3, "x", [None]])
def test_a_part_may_allow_any_value(name, text):
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/any"}}, "required": ["x"]}
    tool = ToolSchema("f", {"properties": {"a": schema}, "required": ["a"], "$defs": {"any": True}})
    forced = FORMATS[name].forced_calls([tool], {}, several=False)
    assert accepts(forced, WRITERS[name]([("f", {"a": {"x": text}})])) and not accepts(forced, WRITERS[name]([("f", {"a": {}})]))


def test_a_part_is_copied_once_however_references_to_it_are_spelt():
    spelt = [f"#/%{ord('$'):x}defs/all", "#/$defs/%61ll", "#/$defs/a%6Cl", "#/$defs/al%6c", "#/$defs/all"]
    made = alone({"anyOf": [{"$ref": one} for one in spelt]}, {"$defs": {"all": {"items": {"$ref": "#/$defs/all"}}}}, most=100)
    assert made == {"anyOf": [{"$ref": "#/$defs/part0"}] * 5, "$defs": {"part0": {"items": {"$ref": "#/$defs/part0"}}}}


def test_copies_of_parts_that_contain_one_another_are_limited():
    """Without a limit, this schema of 22 KB would have a hundred copies of its inmost part."""
    root, paths = {"enum": ["x" * 20_000]}, ["#"]
    for _ in range(100):
        root = {"items": root}
        paths.append(f"{paths[-1]}/items")
    refers = {"anyOf": [{"$ref": path} for path in paths]}
    assert len(json.dumps(alone(refers, root, most=3_000_000))) > 2_000_000
    with pytest.raises(GrammarTooLarge):
        alone(refers, root, most=1_000_000)


@pytest.mark.parametrize("name", TAGGED)
def test_copies_of_a_part_are_limited(name):
    """This schema of 60 KB would have 75 MB of copies, which are made before any limit on the grammar could refuse them."""
    properties = {f"p{number}": {"$ref": "#/$defs/all"} for number in range(1000)}
    shared = {"all": {"type": "object", "properties": {f"q{number}": {} for number in range(5000)}}}
    with pytest.raises(GrammarTooLarge):
        grammar_of(name, {"properties": properties, "$defs": shared})
    assert grammar_of(name, {"properties": dict([*properties.items()][:10]), "$defs": shared})


@pytest.mark.parametrize("name", [*LITERALS, *TAGGED])
@pytest.mark.parametrize("words", [{"enum": [*map(str, range(3000))]}, {"anyOf": [{"const": str(number)} for number in range(3000)]}])
def test_a_list_to_which_many_values_refer_is_not_copied_without_end(name, words):
    properties = {f"p{number}": {"$ref": "#/$defs/all", "title": str(number)} for number in range(300)}
    try:
        assert len(grammar_of(name, {"properties": properties, "$defs": {"all": words}})) < 300_000
    except GrammarTooLarge:
        assert name in TAGGED


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["on", "", None, 1]},
        {"type": ["string", "null", "integer"], "enum": ["on", "", None, 1]},
        {"anyOf": [{"enum": ["on", ""]}, {"type": "null"}, {"$ref": "#/$defs/one"}]},
    ],
)
def test_a_text_that_may_be_null_follows_its_list(name, schema):
    """OpenAI's strict mode writes an optional choice as one that may be null."""
    tool = ToolSchema("f", {"properties": {"a": schema}, "required": ["a"], "$defs": {"one": {"const": 1}}})
    forced = FORMATS[name].forced_calls([tool], {}, several=False)
    for value in ("on", "", None, 1):
        text = WRITERS[name]([("f", {"a": value})])
        assert accepts(forced, text), text
        parts = FORMATS[name].call_syntax.parser([tool], None).push(text)
        assert json.loads("".join(part.text for part in parts if isinstance(part, CallArguments))) == {"a": value}
    for value in ("off", 2):
        assert not accepts(forced, WRITERS[name]([("f", {"a": value})]))


@pytest.mark.parametrize("name", ["deepseek-v3.2", "deepseek-v4"])
@pytest.mark.parametrize(
    ("says_text", "written", "value"),
    [
        ("false", '"on"', "on"),
        ("false", "'on'", "on"),
        ("false", "on", "on"),
        ("false", " null\n", None),
        ("false", "None", None),
        ("false", '["a", 1]', ["a", 1]),
        ("true", '"on"', '"on"'),
        ("true", "null", "null"),
    ],
)
def test_a_tag_says_whether_a_value_is_text(name, says_text, written, value):
    """A text in quotation marks is JSON behind `string="false"`, which the grammar allows for a value that may be text."""
    tool = ToolSchema("f", {"properties": {"a": {"type": ["string", "null"]}}})
    text = WRITERS[name]([("f", {"a": "VALUE"})]).replace('"true">VALUE', f'"{says_text}">{written}')
    parts = FORMATS[name].call_syntax.parser([tool], None).push(text)
    assert json.loads("".join(part.text for part in parts if isinstance(part, CallArguments))) == {"a": value}


@pytest.mark.parametrize("name", [*LITERALS, "qwen3-coder", "hermes"])
@pytest.mark.parametrize("most", [2**32 - 1, 1e300])
def test_a_limit_beyond_any_answer_restricts_nothing(name, most):
    listed, text = {"type": "array", "items": {"type": "integer"}, "maxItems": most}, {"type": ["string", "null"], "maxLength": most}
    tool = ToolSchema("f", {"properties": {"l": listed, "t": text}, "required": ["l", "t"]})
    forced = FORMATS[name].forced_calls([tool], {}, several=False)
    assert accepts(forced, WRITERS[name]([("f", {"l": [1, 2, 3], "t": "abc"})]))
    assert not accepts(forced, WRITERS[name]([("f", {"l": ["x"], "t": "abc"})]))


@pytest.mark.parametrize("name", LITERALS)
@pytest.mark.parametrize(
    ("schema", "value", "allowed"),
    [
        ({"type": "integer", "minimum": 3, "maximum": 12}, 12, True),
        ({"type": "integer", "minimum": 3, "maximum": 12}, 13, False),
        ({"type": "number", "exclusiveMinimum": 0}, 0.5, True),
        ({"type": "number", "exclusiveMinimum": 0}, 0, False),
        ({"type": ["integer", "null"], "multipleOf": 5}, 7, False),
        ({"type": ["integer", "null"], "multipleOf": 5}, None, True),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, [1], False),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, [1, 2, 3], True),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2.0, "maxItems": 3}, [1, 2, 3, 4], False),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, [], True),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, [1], True),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, [1, 2], False),
        ({"type": "array", "minItems": 1, "maxItems": 1}, [1], True),
        ({"type": "array", "minItems": 1, "maxItems": 1}, [], False),
        ({"type": "array", "minItems": 1, "maxItems": 1}, [1, 2], False),
        ({"type": "array", "minItems": 2, "maxItems": 2}, [1, 2], True),
        ({"type": "array", "minItems": 2, "maxItems": 2}, [1, 2, 3], False),
        ({"type": "array", "maxItems": 0}, [], True),
        ({"type": "array", "maxItems": 0}, [1], False),
        ({"type": "array", "minItems": 1}, [], False),
        ({"type": "array", "minItems": "x"}, [], True),
    ],
)
def test_literals_keep_the_limits_of_their_schema(name, schema, value, allowed):
    forced = FORMATS[name].forced_calls([ToolSchema("f", {"properties": {"a": schema}, "required": ["a"]})], {}, several=False)
    assert accepts(forced, WRITERS[name]([("f", {"a": value})])) is allowed


@pytest.mark.parametrize("name", ["pythonic", "lfm2", "olmo3"])
@pytest.mark.parametrize(("text", "allowed"), [("abc", True), ("abcd", False), ("x", False)])
def test_python_texts_keep_the_limits_of_their_schema(name, text, allowed):
    schema = {"type": "string", "maxLength": 3, "pattern": "^a"}
    forced = FORMATS[name].forced_calls([ToolSchema("f", {"properties": {"a": schema}, "required": ["a"]})], {}, several=False)
    assert accepts(forced, WRITERS[name]([("f", {"a": text})])) is allowed
