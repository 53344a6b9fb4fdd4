"""Time stamps follow Whisper's rules."""

from __future__ import annotations

import numpy as np
import pytest

from server.constraints.rules import Bans, matcher_of
from server.constraints.stamps import StampMatcher
from server.messages import SamplingParams, Stamps
from tests.server.constraints.processes import allowed_by

VOCAB, END, FIRST = 64, 40, 50
TEXT, STAMPS = set(range(FIRST)), set(range(FIRST, VOCAB))
RULES = Stamps(FIRST, END, 3)


def allowed_behind(*drawn: int) -> set[int]:
    return set(allowed_by(StampMatcher(RULES, VOCAB, drawn).mask()))


@pytest.mark.parametrize(
    ("drawn", "allowed"),
    [
        ((), {50, 51, 52, 53}),  # a transcript begins with one of the first stamps
        ((51,), TEXT),  # one stamp begins a segment
        ((51, 7), TEXT | set(range(52, VOCAB))),  # a segment does not end where it began
        ((51, 7, 55), set(range(END, FIRST)) | set(range(55, VOCAB))),  # another stamp or the end follows the end of a segment
        ((51, 7, 55, 55), TEXT),
        ((51, 7, 55, 55, 9), TEXT | set(range(56, VOCAB))),
    ],
)
def test_stamps_come_in_pairs_and_never_go_back(drawn: tuple[int, ...], allowed: set[int]) -> None:
    assert allowed_behind(*drawn) == allowed


def test_a_stamp_is_drawn_if_all_together_are_the_most_probable() -> None:
    matcher, logits = StampMatcher(RULES, VOCAB, (51, 7)), np.full(VOCAB, -20.0, np.float32)
    logits[7], logits[55], logits[60] = 1.0, 0.5, 0.5
    assert set(allowed_by(matcher.restrict(matcher.mask(), logits))) == set(range(52, VOCAB))
    logits[60] = -3.0
    assert set(allowed_by(matcher.restrict(matcher.mask(), logits))) == allowed_behind(51, 7)
    logits[51] = 9.0  # a stamp that may not come does not count
    assert set(allowed_by(matcher.restrict(matcher.mask(), logits))) == allowed_behind(51, 7)


def test_bans_apply_too() -> None:
    bans = Bans(SamplingParams(max_tokens=9, banned_token_ids=(3, 52)), frozenset(), VOCAB)
    matcher = matcher_of(bans, StampMatcher(RULES, VOCAB))
    assert matcher is not None and matcher.reads_logits
    assert set(allowed_by(matcher.mask())) == {50, 51, 53}
    matcher.advance([50])
    assert set(allowed_by(matcher.mask())) == TEXT - {3}
