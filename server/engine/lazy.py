"""A constraint with a trigger is lazy: it governs what is behind that token until the grammar is met, and nothing else.

It is an offer to the model, not a demand of the client, so it never fails a request: what cannot be compiled or followed is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from server.engine.matcher import ConstraintError, Matcher
from server.messages import Trigger

Offer = tuple[int, ...]  # how what is offered begins


class Choice:
    """Which of the offers a sequence means. It says freely what it would, as a draft; while an offer goes on with every token, that stands.

    A mask looks one token ahead: a model about to write `get_weather`, to which `weather` and `get_time` are offered, would be left with
    `get_`, and then with `time`. So a draft that leaves all offers is taken back, and offers are compared as wholes: each by how
    probable it was as far as it went with the draft, and one token more.
    """

    def __init__(self, offers: Sequence[Offer]) -> None:
        self._offers = offers
        self._draft: Offer = ()
        self._common: Offer = _shared(*offers)
        self._scores = dict.fromkeys(offers, 0.0)

    @property
    def draft(self) -> Offer:
        return self._draft

    @property
    def is_made(self) -> bool:
        return self._draft in self._scores

    def forced(self) -> list[int]:
        return list(self._common[len(self._draft) :])

    def candidates(self) -> list[int]:
        """What the offers that go with the draft go on with."""
        return sorted({offer[len(self._draft)] for offer in self._open()})

    def weigh(self, logprobs: dict[int, float]) -> None:
        for offer in self._open():
            self._scores[offer] += logprobs[offer[len(self._draft)]]

    def say(self, token_id: int) -> None:
        self._draft = (*self._draft, token_id)

    def without_draft(self) -> Choice:
        """Between the offers that begin with the best token at which one left the draft."""
        best = max(self._offers, key=self._scores.__getitem__)
        num_right = len(_shared(best, self._draft)) + 1
        return Choice([offer for offer in self._offers if offer[:num_right] == best[:num_right]])

    def _open(self) -> list[Offer]:
        length = len(self._draft)
        return [offer for offer in self._offers if offer[:length] == self._draft and len(offer) > length]


class LazyMatcher:
    """Watches a sequence that is free but for what its trigger begins: first a choice between the offers, then the grammar."""

    is_complete = False  # more text may always follow

    def __init__(self, grammar: LLMatcher | None, trigger: Trigger, vocab_size: int) -> None:
        self._grammar = grammar  # before its first token; None: nothing is ever restricted
        self._trigger = trigger
        self._vocab_size = vocab_size
        self._offers = tuple(offer for offer in trigger.offers if max(offer) < vocab_size)
        self._thinks = trigger.is_open
        self._at_start = True
        self._choice: Choice | None = None
        self._begun: Matcher | None = None

    def mask(self) -> NDArray[np.int32] | None:
        """None where every token may come next."""
        if self._choice is not None and (forced := self._choice.forced()):
            return _only(forced[0], self._vocab_size)
        try:
            return None if self._begun is None else self._begun.mask()
        except ConstraintError:
            self._begun = None
            return None

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._choice is not None:
                self._say(self._choice, token_id)
            elif self._begun is not None:
                self._begun = _behind(self._begun, [token_id])
            elif self._thinks:
                self._thinks = token_id != self._trigger.close_id
            elif self._at_start and token_id == self._trigger.open_id:
                self._thinks = True  # as the parser has it: thoughts come first, or not at all
            elif token_id == self._trigger.token_id and self._grammar is not None:
                self._begin(self._grammar)
            self._at_start = False

    def forced(self) -> list[int]:
        if self._choice is not None:
            return self._choice.forced()
        return [] if self._begun is None else self._begun.forced()

    def let_go(self) -> bool:
        """Leave what it governs now to the model; False if that is free already."""
        governed = self._choice is not None or self._begun is not None
        self._choice = self._begun = None
        return governed

    # --- while it chooses: nobody is to be told what may be taken back ----------------------------------------------------

    @property
    def is_choosing(self) -> bool:
        return self._choice is not None

    def candidates(self) -> list[int]:
        """Tokens whose log-probabilities `weigh` wants, before the next one is drawn."""
        return [] if self._choice is None or self._choice.forced() else self._choice.candidates()

    def weigh(self, logprobs: dict[int, float]) -> None:
        if self._choice is not None:
            self._choice.weigh(logprobs)

    def refuses(self, token_id: int) -> bool:
        """Whether no offer goes on with this token."""
        return self._choice is not None and token_id not in self._choice.candidates()

    def take_back(self) -> int:
        """Choose anew, without the draft; how many tokens that was."""
        assert self._choice is not None
        num_tokens = len(self._choice.draft)
        self._choice = self._choice.without_draft()
        return num_tokens

    def _begin(self, grammar: LLMatcher) -> None:
        if self._offers:
            self._choice = Choice(self._offers)
        else:
            self._begun = Matcher(grammar.deep_copy(), self._vocab_size)

    def _say(self, choice: Choice, token_id: int) -> None:
        if self.refuses(token_id):
            self._choice = None  # only where a former worker let it go
            return
        choice.say(token_id)
        if choice.is_made:
            assert self._grammar is not None
            self._choice = None
            self._begun = _behind(Matcher(self._grammar.deep_copy(), self._vocab_size), choice.draft)


def _shared(*offers: Offer) -> Offer:
    """What all begin with."""
    return tuple(column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*offers, strict=False)))


def _behind(begun: Matcher, token_ids: Sequence[int]) -> Matcher | None:
    """None once the grammar is met, or left: a former worker may have drawn the tokens without it."""
    try:
        begun.advance(token_ids)
    except ConstraintError:
        return None
    return None if begun.is_complete else begun


def _only(token_id: int, vocab_size: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[token_id] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
