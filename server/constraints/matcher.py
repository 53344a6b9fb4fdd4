"""What the engine knows of the constraints of one sequence: how far it has come in them, and what may come next. A matcher may follow
a grammar in a process of its own (`isolated`, `lazy`), the rules of the request (`rules.Rules`), or both (`rules.RuledMatcher`).

A matcher takes in every token of its sequence. Where one token alone may come next, the mask has one bit: appending such tokens without a
step of the model (`forced`) therefore gives the tokens that drawing one by one would have given.

A matcher may be late: it was asked something that another process has not answered yet. Until `poll` says that it has, nothing else may be
asked. A clock thus decides in which step a token is drawn, and never which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]  # one bit per token, set where it may come next


class Late(Enum):
    LATE = "late"


LATE: Final = Late.LATE


class ConstraintError(Exception):
    """A constraint that cannot be compiled or followed; the message is for the client."""


class ConstraintTooHeavy(ConstraintError):
    """Following it takes more of the processor, or of memory, than one request may ask for."""


class ConstraintLost(ConstraintError):
    """The process that followed it ended again and again, for a reason that is not the client's."""


class Matcher(ABC):
    """`poll`, `mask`, `advance` and `forced` may raise ConstraintError."""

    @abstractmethod
    def mask(self) -> Mask | Literal[Late.LATE] | None:
        """None where every token may come next. To be read only, and valid until the next call."""

    @abstractmethod
    def advance(self, token_ids: Sequence[int]) -> None: ...

    @property
    def is_complete(self) -> bool:
        """Nothing may follow."""
        return False

    def forced(self) -> list[int]:
        """The tokens that must come next, where there is no choice; none while it is late."""
        return []

    # --- a matcher that asks a process may be late -------------------------------------------------------------------------

    @property
    def is_late(self) -> bool:
        return False

    @property
    def has_mask(self) -> bool:
        """The next mask has been computed already."""
        return False

    def poll(self) -> bool:
        """Whether it is compiled and not late."""
        return True

    def prefetch_mask(self) -> None:  # noqa: B027 - most matchers have nothing to begin
        """Begin to compute the next mask, so that the masks of a step are computed side by side."""

    def prefetch(self, token_id: int) -> None:  # noqa: B027 - likewise
        """Begin to take in this token. `advance` by the same token follows, or nothing does."""

    # --- a matcher may draft tokens that it takes back; most never do ------------------------------------------------------

    @property
    def is_choosing(self) -> bool:
        """The last tokens are a draft: they may be taken back, so nobody is told of them."""
        return False

    def candidates(self) -> list[int]:
        """Tokens whose log-probabilities `weigh` wants, before the next one is drawn."""
        return []

    def weigh(self, logprobs: dict[int, float]) -> None:
        """How probable the model finds each candidate."""
        raise AssertionError("nothing is a candidate")

    def refuses(self, token_id: int) -> bool:
        """Whether the draft cannot go on with this token."""
        return False

    def take_back(self) -> int:
        """Choose anew, without the draft; returns the number of tokens in it."""
        raise AssertionError("nothing was drafted")

    def let_go(self) -> bool:
        """Leave to the model what the constraint only offers; False if it demands, or governs nothing now."""
        return False
