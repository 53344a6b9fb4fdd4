"""Constraints behind a block of thoughts accept the right texts. llguidance checks this on a vocabulary of bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from llguidance import LLMatcher

from server.constraints.matcher import Mask, Matcher
from server.constraints.process.sources import grammar_of
from server.constraints.process.wire import Source
from server.constraints.rules import Bans, RuledMatcher, Rules
from server.messages import Constraint, ConstraintKind, SamplingParams, Thinking
from server.text.dialects.thoughts import THINK as MARKERS
from server.text.dialects.thoughts import Thoughts
from server.text.grammar import json_text
from tests.server.constraints.processes import allowed_by
from tests.server.text.vocabulary import EOS, THINK, UNTHINK, accepts, vocabulary

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


class Followed(Matcher):
    """Follows a grammar in this process."""

    def __init__(self, constraint: Constraint) -> None:
        self._matcher = LLMatcher(vocabulary(), grammar_of(Source(constraint.kind, constraint.source, constraint.head)))

    def mask(self) -> Mask:
        return np.frombuffer(self._matcher.compute_bitmask(), np.int32)

    def advance(self, token_ids: Sequence[int]) -> None:
        assert self._matcher.try_consume_tokens(list(token_ids)) == len(token_ids)


@pytest.mark.parametrize(("label", "budget", "thought"), [("", 1, "é"), ("", 2, "é"), ("", 3, "éa"), ("label\n", 2, "label\n")])
def test_a_spent_budget_ends_thoughts_where_their_grammar_can(label: str, budget: int, thought: str) -> None:
    """The token that spends the budget may end within a character or before the label of the block."""
    constraint = Thoughts("<think>", "</think>", label).before(SCHEMA, {"<think>": THINK, "</think>": UNTHINK}, open_already=False)
    thinking = Thinking(budget, (THINK,), UNTHINK, is_open=False)
    rules = Rules(Bans(SamplingParams(max_tokens=99, thinking=thinking), frozenset(), EOS + 1))
    matcher, drawn = RuledMatcher(rules, Followed(constraint)), list[int]()
    for wanted in [THINK, *label.encode(), *"éa".encode() * 2]:
        allowed = [*allowed_by(matcher.mask())]
        assert allowed, drawn
        drawn.append(wanted if wanted in allowed else allowed[0])
        matcher.advance(drawn[-1:])
        if drawn[-1] == UNTHINK:
            break
    assert drawn == [THINK, *thought.encode(), UNTHINK]
