"""Decide which of the offered tools a sequence calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

Offer = tuple[int, ...]  # first tokens of a call of one tool


class ToolSelection:
    """The selection of an offer by a sequence. The model drafts tokens without a constraint. When the draft equals an offer, that
    offer is selected.

    A mask looks only one token ahead. Under a mask, a model that is about to write `get_weather`, while `weather` and `get_time` are
    offered, would write `get_` and then have only `time` left. So a draft that leaves all offers is taken back, and the offers are compared
    as wholes: by the log-probability of their tokens up to and including the first one that differs from the draft.
    """

    def __init__(self, offers: Sequence[Offer]) -> None:
        self._offers = offers
        self._draft: Offer = ()
        self._common: Offer = shared(*offers)
        self._scores = dict.fromkeys(offers, 0.0)  # by offer: the sum of the log-probabilities that were weighed

    @property
    def draft(self) -> Offer:
        """The tokens drawn since the selection began."""
        return self._draft

    @property
    def is_made(self) -> bool:
        """Whether the draft equals an offer."""
        return self._draft in self._scores

    def forced(self) -> list[int]:
        """Return the tokens after the draft that all offers have in common."""
        return list(self._common[len(self._draft) :])

    def candidates(self) -> list[int]:
        """Return the tokens that continue the draft in some offer."""
        return sorted({offer[len(self._draft)] for offer in self._open()})

    def weigh(self, logprobs: dict[int, float]) -> None:
        """Add the log-probabilities of the candidates to the scores of their offers."""
        for offer in self._open():
            self._scores[offer] += logprobs[offer[len(self._draft)]]

    def say(self, token_id: int) -> None:
        """Add a drawn token to the draft."""
        self._draft = (*self._draft, token_id)

    def without_draft(self) -> ToolSelection:
        """Return a selection without the draft. Its offers are those that agree with the most probable offer up to and including the
        first token that differs from the draft."""
        best = max(self._offers, key=self._scores.__getitem__)
        num_right = len(shared(best, self._draft)) + 1
        return ToolSelection([offer for offer in self._offers if offer[:num_right] == best[:num_right]])

    def _open(self) -> list[Offer]:
        """Return the offers that begin with the draft and have more tokens."""
        length = len(self._draft)
        return [offer for offer in self._offers if offer[:length] == self._draft and len(offer) > length]


def shared(*offers: Offer) -> Offer:
    """Return the longest common prefix of the offers."""
    return tuple(column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*offers, strict=False)))
