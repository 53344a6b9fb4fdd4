"""The grammars that the server builds for requests accept the right texts. llguidance checks this on a vocabulary of bytes."""

from __future__ import annotations

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
