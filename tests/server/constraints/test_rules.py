"""The restrictions that sampling parameters state (banned tokens, minimum number of tokens, thinking budget), alone and together with a
grammar."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.constraints.matcher import LATE, Matcher
from server.constraints.rules import Bans, RuledMatcher, Rules, matcher_of
from server.messages import SamplingParams, Thinking
from tests.server.constraints.processes import allowed_by

VOCAB = 512
ALL = set(range(VOCAB))
OPEN, CLOSE = 3, 4


def bans_of(ender_ids=(), **params) -> Bans:
    return Bans(SamplingParams(max_tokens=9, **params), frozenset(ender_ids), VOCAB)


def allowed_behind(bans: Bans, *drawn: int) -> set[int]:
    mask = Rules(bans, drawn).mask()
    return ALL if mask is None else set(allowed_by(mask))


class Drafting(Matcher):
    """A fake grammar. It allows even tokens, always forces tokens 2 and 8 next, and treats all tokens so far as a draft that can be
    discarded."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.late = False

    def mask(self):
        return LATE if self.late else Rules(bans_of(allowed_token_ids=tuple(range(0, VOCAB, 2)))).mask()

    def advance(self, token_ids) -> None:
        self.token_ids += token_ids

    def forced(self) -> list[int]:
        return [2, 8]

    def take_back(self) -> int:
        num_tokens = len(self.token_ids)
        self.token_ids = []
        return num_tokens


def test_a_request_without_rules_has_no_matcher() -> None:
    assert matcher_of(bans_of(ender_ids=(5,)), None) is None
    grammar = Drafting()
    assert matcher_of(bans_of(), grammar) is grammar


def test_tokens_are_allowed_and_banned() -> None:
    assert allowed_behind(bans_of(banned_token_ids=(0, 63))) == ALL - {0, 63}
    assert allowed_behind(bans_of(allowed_token_ids=(1, 40, 41), banned_token_ids=(40,))) == {1, 41}


def test_a_sequence_is_banned_at_its_last_token_only() -> None:
    bans = bans_of(banned_sequences=((5, 6), (5, 6, 7)))
    assert allowed_behind(bans) == ALL
    assert allowed_behind(bans, 6, 5) == ALL - {6}
    assert allowed_behind(bans, 5, 6) == ALL - {7}
    assert allowed_behind(bans, 5, 8) == ALL


tokens = st.sampled_from((1, 256, 511))  # their bytes have another order if the lowest comes first
few_tokens = st.lists(tokens, min_size=2, max_size=5).map(tuple)


@given(st.lists(few_tokens, max_size=12).map(tuple), st.lists(tokens, max_size=9))
def test_banned_sequences_that_end_alike_are_told_apart(sequences: tuple[tuple[int, ...], ...], drawn: list[int]) -> None:
    wanted = {last for *before, last in sequences if drawn[len(drawn) - len(before) :] == before and len(drawn) >= len(before)}
    assert allowed_behind(bans_of(banned_sequences=sequences), *drawn) == ALL - wanted


class Counted(int):
    """A token that counts with how many others it was compared."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.num_compared += 1
        return int(self) == other

    def __lt__(self, other: int) -> bool:
        Counted.num_compared += 1
        return int(self) < other

    def __gt__(self, other: int) -> bool:
        Counted.num_compared += 1
        return int(self) > other

    __hash__ = int.__hash__


def test_many_long_banned_sequences_are_compared_together() -> None:
    """A client bans 2,048 sequences with the same middle, and has the model draw it. The rows of others wait for each comparison."""
    sequences = tuple((5, second, *[5] * 300, 9) for second in (5, *range(10, 2057)))
    rules = Rules(bans_of(banned_sequences=sequences), [Counted(5)] * 400)
    Counted.num_compared = 0
    assert set(allowed_by(rules.mask())) == ALL - {9}
    assert Counted.num_compared <= 1000


def test_banned_sequences_that_end_alike_are_sorted_as_bytes() -> None:
    """Requests wait while 2,048 sequences of 1,000 tokens are sorted. To compare them token by token takes 0.3 s."""
    sequences = tuple((5, second, *map(Counted, [5] * 300), 9) for second in range(10, 42))
    Counted.num_compared = 0
    rules = Rules(bans_of(banned_sequences=sequences), [5, 12, *[5] * 300])
    assert Counted.num_compared == 0
    assert set(allowed_by(rules.mask())) == ALL - {9}


def test_the_end_is_banned_until_enough_is_drawn() -> None:
    bans = bans_of(ender_ids=(0, 9), min_tokens=2)
    assert allowed_behind(bans) == allowed_behind(bans, 7) == ALL - {0, 9}
    assert allowed_behind(bans, 7, 7) == ALL


@pytest.mark.parametrize("is_open", [True, False])
def test_thoughts_are_closed_when_their_budget_is_spent(is_open) -> None:
    bans = bans_of(thinking=Thinking(2, (OPEN,), CLOSE, is_open))
    before = () if is_open else (OPEN,)
    assert allowed_behind(bans, *before, 50) == ALL
    assert allowed_behind(bans, *before, 50, 50) == {CLOSE}
    assert allowed_behind(bans, *before, 50, 50, CLOSE, 50, 50) == ALL - {OPEN}
    assert allowed_behind(bans, *before, 50, CLOSE, 50, OPEN, 50) == {CLOSE}, "all blocks share the budget"
    assert allowed_behind(bans, 50, 50, 50) == ({CLOSE} if is_open else ALL)


def test_without_a_budget_no_thought_begins() -> None:
    bans = bans_of(thinking=Thinking(0, (OPEN,), CLOSE, is_open=False))
    assert allowed_behind(bans) == allowed_behind(bans, 50) == ALL - {OPEN}
    assert allowed_behind(bans_of(thinking=Thinking(0, (OPEN,), CLOSE, is_open=True))) == {CLOSE}


def test_several_tokens_may_open_a_thought() -> None:
    """In harmony, the header of a thought has several tokens, and headers of answers and calls begin with the same tokens."""
    header = (OPEN, 20, 21)
    bans = bans_of(thinking=Thinking(2, header, CLOSE, is_open=False))
    assert allowed_behind(bans, *header, 50) == ALL
    assert allowed_behind(bans, *header, 50, 50) == {CLOSE}
    assert allowed_behind(bans, *header, 50, 50, CLOSE) == ALL
    assert allowed_behind(bans, *header, 50, 50, CLOSE, OPEN) == ALL - {20}
    assert allowed_behind(bans, OPEN, 22, 21, 50, 50, 50) == ALL


def test_a_token_under_rules_must_be_allowed_by_both() -> None:
    grammar = Drafting()
    matcher = RuledMatcher(Rules(bans_of(banned_token_ids=(2, 3))), grammar)
    assert set(allowed_by(matcher.mask())) == set(range(0, VOCAB, 2)) - {2}
    grammar.late = True
    assert matcher.mask() is LATE


class Allowing(Matcher):
    """A fake grammar. It allows the tokens in `allowed`, which a test may change."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = allowed

    def mask(self):
        return Rules(bans_of(allowed_token_ids=self.allowed)).mask()

    def advance(self, token_ids) -> None:
        pass


@pytest.mark.parametrize("others", [(50, 60), (CLOSE + 32,)])
def test_thoughts_are_closed_as_soon_as_the_grammar_allows_it(others) -> None:
    """A grammar lets no block end within a character, and the token that spends the budget may end within one."""
    bans = bans_of(thinking=Thinking(2, (OPEN,), CLOSE, is_open=True), banned_token_ids=(60,))
    grammar = Allowing(*others)
    matcher = RuledMatcher(Rules(bans, (50, 50)), grammar)
    assert set(allowed_by(matcher.mask())) == {*others} - {60}
    matcher.advance(others[:1])
    grammar.allowed = (*others, CLOSE)
    assert set(allowed_by(matcher.mask())) == {CLOSE}


def test_thoughts_that_may_not_be_closed_leave_no_token() -> None:
    """A request that bans the token which closes thoughts contradicts its own budget."""
    bans = bans_of(thinking=Thinking(2, (OPEN,), CLOSE, is_open=True), banned_token_ids=(CLOSE,))
    assert set(allowed_by(RuledMatcher(Rules(bans, (50, 50)), Allowing(50, CLOSE)).mask())) == set()


def test_forced_tokens_are_drawn_where_rules_restrict_the_text() -> None:
    assert RuledMatcher(Rules(bans_of(banned_token_ids=(8,))), Drafting()).forced() == []
    assert RuledMatcher(Rules(bans_of(ender_ids=(0,), min_tokens=9)), Drafting()).forced() == [2, 8]


def test_a_draft_that_is_taken_back_leaves_no_trace_in_the_rules() -> None:
    """Discarding a draft restores what the rules knew before the draft: the matched part of a banned sequence, the token count, and whether
    a thought is open."""
    thinking = Thinking(3, (OPEN,), CLOSE, is_open=False)
    bans = bans_of(ender_ids=(0,), min_tokens=2, banned_sequences=((6, 7),), thinking=thinking)
    rules = Rules(bans, (6,))
    matcher = RuledMatcher(rules, Drafting())
    matcher.advance([OPEN, 10, 10, 10])
    assert set(allowed_by(rules.mask())) == {CLOSE}
    assert matcher.take_back() == 4
    assert set(allowed_by(rules.mask())) == ALL - {0, 7}
