"""The grammars that the server builds for requests accept the right texts. llguidance checks this on a vocabulary of bytes."""

from __future__ import annotations

import json

import pytest

from server.messages import Constraint, ConstraintKind
from server.text.grammar import Structure, json_text, structured
from tests.server.text.vocabulary import accepts


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
def test_structures_within_free_text(text, allowed):
    schema = {"type": "integer"}
    structures = [Structure("<f", "<f>", schema, "</f>"), Structure("<g>", "<g>", schema, "</g>")]
    assert accepts(structured(structures), text) is allowed


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
def test_json_may_be_indented_and_no_more(text, allowed):
    constraint = Constraint(ConstraintKind.GRAMMAR, "start: %json " + json_text({"type": "object"}))
    assert accepts(constraint, text) is allowed


@pytest.mark.parametrize("word", [{"format": "password"}, {"format": "int32"}, {"format": "uri-reference"}])
@pytest.mark.parametrize(
    ("around", "text"),
    [
        (lambda schema: schema, '"a"'),
        (lambda schema: {"type": "object", "properties": {"format": schema}, "required": ["format"]}, '{"format": "a"}'),
        (lambda schema: {"type": "array", "items": {"anyOf": [schema, {"type": "null"}]}}, '["a", null]'),
        (lambda schema: {"$ref": "#/$defs/a", "$defs": {"a": schema}}, '"a"'),
        (lambda schema: {"type": "object", "additionalProperties": schema}, '{"b": "a"}'),
    ],
)
def test_a_format_that_is_not_known_restricts_nothing(word, around, text):
    """Schemas made from types have such formats: pydantic writes path and password, and Rust's programs write uint32."""
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, json_text(around({"type": "string", **word})))
    assert accepts(constraint, text) and not accepts(constraint, text.replace('"a"', "1"))


@pytest.mark.parametrize(
    ("schema", "text", "allowed"),
    [
        ({"type": "string", "format": "date"}, '"2026-02-28"', True),
        ({"type": "string", "format": "date"}, '"soon"', False),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}, '{"a": 1}', True),
        ({"type": "object", "propertyNames": {}, "additionalProperties": {"type": "integer"}}, '{"a": "x"}', False),
        ({"type": "array", "uniqueItems": False, "items": {"type": "integer"}}, "[1, 1]", True),
        ({"type": "object", "dependentRequired": {}, "properties": {"uniqueItems": {"const": False}}}, '{"uniqueItems": false}', True),
        ({"enum": [{"format": "password", "uniqueItems": False}]}, '{"format": "password", "uniqueItems": false}', True),
        ({"enum": [{"format": "password"}]}, "{}", False),
    ],
)
def test_words_without_effect_do_not_make_a_schema_refused(schema, text, allowed):
    """Zod writes `propertyNames` for every record."""
    assert accepts(Constraint(ConstraintKind.JSON_SCHEMA, json_text(schema)), text) is allowed


@pytest.mark.parametrize("schema", [{"uniqueItems": True}, {"propertyNames": {"pattern": "^a"}}])
def test_a_word_with_an_effect_stays(schema):
    assert json.loads(json_text(schema)).keys() >= schema.keys()
