"""Whether a model takes one more request, and if not, when to come back. Decided before a stream's headers are sent."""

from __future__ import annotations

import math
import time

from server.errors import QUEUE_FULL, ApiError

SMOOTHING = 0.2  # weight of the newest completion in the estimate of the pace
FIRST_GUESS_S = 0.5  # between completions, until one of a full model was seen


class Admission:
    """Counts the sequences of one model that run or wait, and the prompt tokens that no step has read yet."""

    def __init__(self, model: str, *, max_running: int, max_queued: int, max_queued_tokens: int) -> None:
        self.model = model
        self.max_sequences = max_running + max_queued
        self.max_running = max_running
        self.max_at_once = min(2 * max_running, self.max_sequences)  # of one request: what the model computes, and what it takes up next
        self.max_queued_tokens = max_queued_tokens
        self.num_sequences = 0
        self.num_queued_tokens = 0
        self._pace_s = FIRST_GUESS_S  # between completions while the model is busy
        self._full_since: float | None = None  # and without a completion

    def admit(self, num_sequences: int, num_tokens: int) -> Lease:
        """Take the request in, or say when a retry makes sense. The only request there is is never kept out: no retry would help it."""
        too_many = self.num_sequences + num_sequences - self.max_sequences
        too_long = self.num_queued_tokens and self.num_queued_tokens + num_tokens > self.max_queued_tokens
        if (self.num_sequences and too_many > 0) or too_long:
            wait_s = max(1, too_many) * self._pace_s
            raise ApiError(
                QUEUE_FULL,
                f"model {self.model!r} has {self.num_sequences} of {self.max_sequences} sequences and "
                f"{self.num_queued_tokens} of {self.max_queued_tokens} queued prompt tokens, and this request brings "
                f"{num_sequences} and {num_tokens}; retry in {wait_s:.1f} s",
                headers={
                    "retry-after": str(max(1, math.ceil(wait_s))),
                    "retry-after-ms": str(math.ceil(wait_s * 1000)),
                    **self.headers(),
                },
            )
        self.num_sequences += num_sequences
        self.num_queued_tokens += num_tokens
        if self._full_since is None and self.num_sequences >= self.max_running:
            self._full_since = time.monotonic()
        return Lease(self, num_sequences, num_tokens)

    def headers(self) -> dict[str, str]:
        remaining = max(0, self.max_sequences - self.num_sequences)
        waiting = max(0 if remaining else 1, self.num_sequences - self.max_running)
        reset = f"{waiting * self._pace_s:.3f}s"
        return {
            "x-ratelimit-limit-requests": str(self.max_sequences),
            "x-ratelimit-remaining-requests": str(remaining),
            "x-ratelimit-reset-requests": reset,
            "x-ratelimit-limit-tokens": str(self.max_queued_tokens),
            "x-ratelimit-remaining-tokens": str(max(0, self.max_queued_tokens - self.num_queued_tokens)),
            "x-ratelimit-reset-tokens": reset,
        }

    def ended(self, num_sequences: int) -> None:
        now = time.monotonic()
        if self._full_since is not None:
            # Only a full model shows how fast it can go; an idle one shows how rarely it is asked.
            pace_s = (now - self._full_since) / num_sequences
            self._pace_s += SMOOTHING * (pace_s - self._pace_s)
        self.num_sequences -= num_sequences
        self._full_since = now if self.num_sequences >= self.max_running else None


class Lease:
    """One request's share; `prefilled` and `release` may be called more than once."""

    def __init__(self, admission: Admission, num_sequences: int, num_tokens: int) -> None:
        self._admission = admission
        self._num_sequences = num_sequences
        self._num_tokens = num_tokens

    def prefilled(self) -> None:
        self._admission.num_queued_tokens -= self._num_tokens
        self._num_tokens = 0

    def release(self) -> None:
        self.prefilled()
        if self._num_sequences:
            self._admission.ended(self._num_sequences)
            self._num_sequences = 0
