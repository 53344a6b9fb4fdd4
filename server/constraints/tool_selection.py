"""Which of the tools that are offered a sequence means."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

Offer = tuple[int, ...]  # the tokens that a call of one tool begins with


class ToolSelection:
    """Which of the offers a sequence means. It says freely what it would, as a draft; while an offer goes on with every token, that stands.

    A mask looks one token ahead: a model about to write `get_weather`, to which `weather` and `get_time` are offered, would be left with
    `get_`, and then with `time`. So a draft that leaves all offers is taken back, and offers are compared as wholes: each by how
    probable it was as far as it went with the draft, and one token more.
    """

    def __init__(self, offers: Sequence[Offer]) -> None:
        self._offers = offers
        self._draft: Offer = ()
        self._common: Offer = shared(*offers)
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

    def without_draft(self) -> ToolSelection:
        """Between the offers that begin with the best token at which one left the draft."""
        best = max(self._offers, key=self._scores.__getitem__)
        num_right = len(shared(best, self._draft)) + 1
        return ToolSelection([offer for offer in self._offers if offer[:num_right] == best[:num_right]])

    def _open(self) -> list[Offer]:
        length = len(self._draft)
        return [offer for offer in self._offers if offer[:length] == self._draft and len(offer) > length]


def shared(*offers: Offer) -> Offer:
    """What all begin with."""
    return tuple(column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*offers, strict=False)))
