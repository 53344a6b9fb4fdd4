"""The interface to the constraints of one sequence. A matcher follows the sequence's tokens and says which token may come next.

A matcher may follow a grammar in a separate process (`isolated`, `lazy`), Whisper's rules for time stamps (`stamps`), the rules of the
request (`rules.Rules`), or these and one of the others (`rules.RuledMatcher`). `advance` receives every token of the sequence. If only one
token may come next, the mask has one bit set. So appending such tokens without a step of the model (`forced`) gives the same tokens as
sampling them one by one.

A matcher is late while it waits for an answer of another process. If it is new, or if `mask`, `advance` or `forced` leaves it late, only
`poll` may be called until `poll` returns True. `mask` may follow `prefetch_mask` at once, and `advance` may follow `prefetch`. So timing
decides in which step a token is sampled, but never which token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]  # one bit per token, set if the token may come next


class Late(Enum):
    """The value that stands for a mask which is not known yet."""

    LATE = "late"


LATE: Final = Late.LATE


class ConstraintError(Exception):
    """Raised if a constraint cannot be compiled or followed. The message is for the client."""


class ConstraintTooHeavy(ConstraintError):
    """Raised if a constraint uses more CPU time or memory than is allowed, or crashes the process that evaluates it."""


class ConstraintLost(ConstraintError):
    """Raised if a constraint has no process, although the client is not at fault: the process was lost or could not be started several
    times in a row, or the model is being unloaded."""


class Matcher(ABC):
    """Follows the constraints of one sequence. `poll`, `mask`, `advance` and `forced` may raise ConstraintError."""

    @abstractmethod
    def mask(self) -> Mask | Literal[Late.LATE] | None:
        """Return the mask of the next token, LATE if it is not known yet, or None if every token may come next. The mask is read-only and
        valid until the next method call."""

    @abstractmethod
    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow further tokens of the sequence."""
        ...

    @property
    def is_complete(self) -> bool:
        """True if no token may follow."""
        return False

    def forced(self) -> list[int]:
        """Return the next tokens, up to the first position at which several tokens are allowed. Return none while the matcher is late."""
        return []

    # --- a matcher may restrict the next token by the model's logits --------------------------------------------------------

    reads_logits: bool = False  # whether `restrict` must be called with each mask

    def restrict(self, mask: Mask, logits: NDArray[np.float32]) -> Mask:
        """Return `mask`, the result of the method `mask`, or a mask with fewer tokens, chosen by the raw logits of the next token."""
        return mask

    # --- a matcher that asks another process may be late -------------------------------------------------------------------

    @property
    def is_late(self) -> bool:
        """True while the matcher waits for an answer of another process."""
        return False

    @property
    def has_mask(self) -> bool:
        """True if the next mask has been computed already."""
        return False

    def poll(self) -> bool:
        """Receive what other processes have answered since the last call. Return whether the matcher is compiled and not late."""
        return True

    def prefetch_mask(self) -> None:  # noqa: B027 - most matchers have nothing to begin
        """Begin to compute the next mask, so that the masks of all sequences of a step are computed in parallel."""

    def prefetch(self, token_id: int) -> None:  # noqa: B027 - most matchers have nothing to begin
        """Begin to process a token before `advance` is called. Unless the sequence ends, the next call must be `advance` with the same
        token."""

    # --- a matcher may draft tokens and take them back; most never do ------------------------------------------------------

    @property
    def is_choosing(self) -> bool:
        """True while a tool is being selected. The last tokens are then a draft: they may be taken back, so they are not sent to the client
        yet."""
        return False

    def candidates(self) -> list[int]:
        """Return the tokens whose log-probabilities `weigh` needs before the next token is drawn."""
        return []

    def weigh(self, logprobs: dict[int, float]) -> None:
        """Receive the model's log-probabilities of the candidates. Only matchers that return candidates define this."""
        raise AssertionError("this matcher has no candidates")

    def refuses(self, token_id: int) -> bool:
        """Return whether `token_id` cannot continue the draft."""
        return False

    def take_back(self) -> int:
        """Drop the drafted tokens, and continue the tool selection without them. Return the number of dropped tokens. Only matchers that
        draft tokens define this."""
        raise AssertionError("this matcher drafts no tokens")

    def let_go(self) -> bool:
        """Drop the constraint of an optional tool call, so that the model is unconstrained. Return False if no such constraint applies
        now."""
        return False
