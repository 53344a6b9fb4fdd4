"""Admission: decide before a stream's headers are sent whether a model accepts a request, and when a refused client should retry."""

from __future__ import annotations

import math
import time

from server.errors import QUEUE_FULL, ApiError

SMOOTHING = 0.2  # weight of the newest completion in the estimated time between completions
FIRST_GUESS_S = 0.5  # seconds between completions to assume until a full model has completed a request


class Admission:
    """Counts the running and waiting sequences of one model, and its prompt tokens that no step has read yet."""

    def __init__(self, model: str, *, max_running: int, max_queued: int, max_queued_tokens: int) -> None:
        self.model = model
        self.max_sequences = max_running + max_queued
        self.max_running = max_running
        # sequences of one request that may be in the worker: a full batch that runs, and a full batch that waits
        self.max_at_once = min(2 * max_running, self.max_sequences)
        self.max_queued_tokens = max_queued_tokens
        self.num_sequences = 0
        self.num_queued_tokens = 0
        self._pace_s = FIRST_GUESS_S  # estimated seconds between completions while the model is full
        self._full_since: float | None = None  # time of the last completion, or time when the model became full; None: not full

    def admit(self, num_sequences: int, num_tokens: int) -> Lease:
        """Admit a request. If the queue has no room, raise QUEUE_FULL with the time after which to retry. A request is always admitted if
        no other request is, because otherwise a retry could never succeed."""
        too_many = self.num_sequences + num_sequences - self.max_sequences
        too_long = self.num_queued_tokens and self.num_queued_tokens + num_tokens > self.max_queued_tokens
        if (self.num_sequences and too_many > 0) or too_long:
            wait_s = max(1, too_many) * self._pace_s
            raise ApiError(
                QUEUE_FULL,
                f"model {self.model!r} has {self.num_sequences} of {self.max_sequences} sequences and "
                f"{self.num_queued_tokens} of {self.max_queued_tokens} queued prompt tokens, and this request adds "
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
            # Only a full model shows how fast it completes sequences; an idle one shows how rarely requests come.
            pace_s = (now - self._full_since) / num_sequences
            self._pace_s += SMOOTHING * (pace_s - self._pace_s)
        self.num_sequences -= num_sequences
        self._full_since = now if self.num_sequences >= self.max_running else None


class Lease:
    """The sequences and prompt tokens of one admitted request. `prefilled` and `release` may be called more than once."""

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
