"""Constraints behind a block of thoughts accept the right texts. llguidance checks this on a vocabulary of bytes."""

from __future__ import annotations

import json

import pytest

from server.messages import Constraint, ConstraintKind
from server.text.dialects.thoughts import THINK as MARKERS
from server.text.grammar import json_text
from tests.server.text.vocabulary import THINK, UNTHINK, accepts

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
def test_behind_thoughts(constraint):
    free = MARKERS.before(constraint, {}, open_already=False)
    assert accepts(free, "7")
    assert accepts(free, "<think>\nhm </th 8</think>\n\n7")
    assert not accepts(free, "hm</think>7")
    assert not accepts(free, "<think>hm</think>\n\n\n7"), "small models would write line ends for ever"
    inside = MARKERS.before(constraint, {}, open_already=True)
    assert accepts(inside, "hm</think>\n7")
    assert not accepts(inside, "7")


def test_think_markers_that_are_tokens():
    specials = {"<think>": THINK, "</think>": UNTHINK}
    free = MARKERS.before(SCHEMA, specials, open_already=False)
    assert accepts(free, THINK, "hm", UNTHINK, "\n7")
    assert accepts(free, "7")


def test_json_object_behind_thoughts():
    free = MARKERS.before(Constraint(ConstraintKind.JSON_SCHEMA, json_text({"type": "object"})), {}, open_already=False)
    assert accepts(free, '<think>x</think>{"a": 1}') and not accepts(free, "[1]")
