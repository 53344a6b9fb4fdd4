"""Admission: decide before a stream's headers are sent whether a model accepts a request, and when a refused client should retry."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import TypeVar

from server.errors import KEY_QUOTA, QUEUE_FULL, ApiError
from server.messages import Constraint

T = TypeVar("T")

SMOOTHING = 0.2  # weight of the newest completion in the estimated time between completions
KEY_SHARE = 7  # a key may hold this many times the places that are free: 7/8 of all places if it is alone
FIRST_GUESS_S = 0.5  # seconds between completions to assume until a full model has completed a request


class Admission:
    """Counts the running and waiting sequences of one model, and the prompt tokens of requests whose first token has not come yet."""

    def __init__(self, model: str, *, max_running: int, max_queued: int, max_queued_tokens: int, max_constraints: int = 64) -> None:
        """`max_running`: sequences that the worker runs at once. `max_queued`: further sequences that may wait. `max_queued_tokens`: most
        prompt tokens of requests without a first token."""
        self.model = model
        self.max_sequences = max_running + max_queued
        self.max_running = max_running
        # sequences of one request that may be in the worker: a full batch that runs, and a full batch that waits
        self.max_at_once = min(2 * max_running, self.max_sequences)
        self.max_queued_tokens = max_queued_tokens
        self.max_constraints = max_constraints  # most different constraints that the requests of one key may have
        # Requests that are admitted and have not ended. All counts below leave out requests of batches, which `_idle` counts.
        self.num_requests = 0
        self.num_sequences = 0
        self.num_queued_tokens = 0
        self.held: Counter[str] = Counter()  # sequences of each key
        self.constraints: dict[str, Counter[Constraint]] = {}  # by key: number of running and waiting requests with each constraint
        self._idle: Admission | None = None  # counts requests of batches, which take no places of other requests
        self._pace_s = FIRST_GUESS_S  # estimated seconds between completions while the model is full
        self._full_since: float | None = None  # time of the last completion, or time when the model became full; None: not full

    def admit(
        self,
        num_sequences: int,
        num_tokens: int,
        key: str = "",
        constraint: Constraint | None = None,
        *,
        is_idle: bool = False,
        has_begun: bool = False,
    ) -> Lease:
        """Admit a request with `num_sequences` sequences and `num_tokens` prompt tokens, and return its lease. Raise QUEUE_FULL, with the
        time after which to retry, if the queue has no room, or KEY_QUOTA if the API key has too much of the queue or too many constraints.
        If no other request holds a lease at present, the request is always admitted, because otherwise a retry could never succeed. A
        further part of a request whose earlier parts were admitted (`has_begun`) is always admitted, because otherwise those parts would
        have been in vain. `key` identifies the API key, on a server that has keys. Requests of batches (`is_idle`) are counted
        separately."""
        if is_idle:
            return self._of_batches.admit(num_sequences, num_tokens, key, constraint, has_begun=has_begun)
        if not has_begun:
            self._check(num_sequences, num_tokens, key, constraint)
        self.num_requests += 1
        self.num_sequences += num_sequences
        self.num_queued_tokens += num_tokens
        if self._full_since is None and self.num_sequences >= self.max_running:
            self._full_since = time.monotonic()
        return Lease(self, num_sequences, num_tokens, key, constraint)

    def _check(self, num_sequences: int, num_tokens: int, key: str, constraint: Constraint | None) -> None:
        """Raise KEY_QUOTA if the API key of a request has too much of the queue or too many constraints. Raise QUEUE_FULL if the queue has
        no room for the request's sequences or prompt tokens. Any number of sequences is accepted if the model has none, and any number of
        prompt tokens if none is queued."""
        if key and self.num_sequences and self.num_sequences + num_sequences > self.max_running:
            self._check_share(key, num_sequences)
        if key and constraint is not None:
            self._check_constraints(key, constraint)
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

    @property
    def _of_batches(self) -> Admission:
        """The admission that counts the requests of batches."""
        if self._idle is None:
            self._idle = Admission(
                self.model,
                max_running=self.max_running,
                max_queued=0,
                max_queued_tokens=self.max_queued_tokens,
                max_constraints=self.max_constraints,
            )
        return self._idle

    def _check_share(self, key: str, num_sequences: int) -> None:
        """Raise KEY_QUOTA if a key would hold more than KEY_SHARE times the places that would be left free. So a key alone may hold most
        places, several keys share them, and some places stay free for keys that hold none. The caller checks this only if more sequences
        would be admitted than can run at once. A key that holds no place always passes."""
        held, num_free = self.held[key], self.max_sequences - self.num_sequences - num_sequences
        if held and held + num_sequences > KEY_SHARE * max(0, num_free):
            raise self._over_quota(
                f"your key has {held} sequences at model {self.model!r}, and {num_free + num_sequences} of {self.max_sequences} places are "
                f"free; expected at most {KEY_SHARE} times the places left free, and this request adds {num_sequences}"
            )

    def _check_constraints(self, key: str, constraint: Constraint) -> None:
        """Raise KEY_QUOTA if a key would have more than `max_constraints` different constraints."""
        held = self.constraints.get(key, {})
        if constraint not in held and len(held) >= self.max_constraints:
            raise self._over_quota(
                f"your key has requests with {len(held)} different constraints at model {self.model!r}; expected at most "
                f"{self.max_constraints} (max_key_constraints)"
            )

    def _over_quota(self, found: str) -> ApiError:
        """Return the error for a key that has too much. `found` says how much the key has, and how much is allowed."""
        wait_s = max(1, math.ceil(self._pace_s))
        headers = {"retry-after": str(wait_s), **self.headers()}
        return ApiError(KEY_QUOTA, f"{found}; wait for your running requests, or retry in {wait_s} s", headers=headers)

    def headers(self) -> dict[str, str]:
        """Return the headers that tell a client how much room the queue has left."""
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
        """Count the end of a request with `num_sequences` sequences, and correct the estimate of how fast the model completes sequences."""
        now = time.monotonic()
        if self._full_since is not None:
            # Only a full model shows how fast it completes sequences; an idle one shows how rarely requests come.
            pace_s = (now - self._full_since) / num_sequences
            self._pace_s += SMOOTHING * (pace_s - self._pace_s)
        self.num_requests -= 1
        self.num_sequences -= num_sequences
        self._full_since = now if self.num_sequences >= self.max_running else None


class Lease:
    """The sequences and prompt tokens of one admitted request. `prefilled` and `release` may be called more than once."""

    def __init__(self, admission: Admission, num_sequences: int, num_tokens: int, key: str, constraint: Constraint | None) -> None:
        self._key = key
        self._constraint = constraint
        if key:
            admission.held[key] += num_sequences
            if constraint is not None:
                admission.constraints.setdefault(key, Counter())[constraint] += 1
        self._admission = admission
        self._num_sequences = num_sequences
        self._num_tokens = num_tokens

    def prefilled(self) -> None:
        """Note that the first token has come: the prompt tokens are no longer queued."""
        self._admission.num_queued_tokens -= self._num_tokens
        self._num_tokens = 0

    def release(self) -> None:
        """Give back all that the request holds, because it has ended."""
        self.prefilled()
        if self._num_sequences:
            self._admission.ended(self._num_sequences)
            if self._key:
                self._return_quota()
            self._num_sequences = 0

    def _return_quota(self) -> None:
        """Give back what is counted for the API key."""
        admission, key = self._admission, self._key
        _subtract(admission.held, key, self._num_sequences)
        if self._constraint is not None:
            _subtract(admission.constraints[key], self._constraint, 1)
            if not admission.constraints[key]:
                del admission.constraints[key]


def _subtract(counter: Counter[T], name: T, num: int) -> None:
    """Subtract from a count, and remove it if it becomes 0."""
    counter[name] -= num
    if not counter[name]:
        del counter[name]
