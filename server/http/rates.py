"""Hold each key to its rates: requests and tokens per minute, and requests at once.

The rate per minute of requests or tokens is a bucket, which holds as many as the key may use in a minute, and fills steadily. A request
takes 1 from the bucket of requests when it begins, and its tokens from the bucket of tokens when its answer ends, because they are not
known before. A bucket may go below zero. While a bucket holds less than 1, requests are refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container
from dataclasses import dataclass

from server.errors import RATE_LIMITED, ApiError
from server.http.keys import KeyLimits

MINUTE_S = 60.0
BUSY_S = 1  # seconds after which to retry if too many requests run at once


@dataclass(slots=True)
class Bucket:
    """A bucket with `level` units at the time `at_s`. The bucket holds at most `per_minute` units, and gets as many in a minute."""

    per_minute: int
    level: float
    at_s: float

    def fill(self, now_s: float) -> None:
        """Add what the bucket has got since it was filled last."""
        self.level = min(self.per_minute, self.level + (now_s - self.at_s) * self.per_minute / MINUTE_S)
        self.at_s = now_s

    def seconds_to(self, level: float) -> float:
        """Return the seconds until the bucket holds `level`."""
        return max(0.0, level - self.level) * MINUTE_S / self.per_minute


class KeyUse:
    """Counts the requests and tokens of a key."""

    def __init__(self, limits: KeyLimits, now_s: Callable[[], float]) -> None:
        self.limits = limits
        self.num_running = 0
        self._now_s = now_s
        rates = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        self._buckets = {name: Bucket(rate, float(rate), now_s()) for name, rate in rates.items() if rate is not None}

    def begin(self) -> None:
        """Count a request that begins, or raise ApiError if it exceeds a rate, or the number of requests that may run at once."""
        most = self.limits.concurrent_requests
        if most is not None and self.num_running >= most:
            raise _refusal(f"the key has {self.num_running} running requests, as many as it may have", BUSY_S)
        self.take()
        self.num_running += 1

    def take(self) -> None:
        """Count one request: one that begins, or a part of a running request that counts as a request of its own. Raise ApiError if it
        exceeds a rate."""
        self._fill()
        for name, bucket in self._buckets.items():
            if bucket.level < 1:
                wait_s = max(1, math.ceil(bucket.seconds_to(1)))
                raise _refusal(f"the key has used its {bucket.per_minute} {name} per minute", wait_s)
        if "requests" in self._buckets:
            self._buckets["requests"].level -= 1

    def end(self) -> None:
        """Count the end of a request that had begun."""
        self.num_running -= 1

    def charge(self, num_tokens: int) -> None:
        """Count the tokens of a prompt and of its answers."""
        if "tokens" in self._buckets:
            self._fill()
            self._buckets["tokens"].level -= num_tokens

    def headers(self) -> dict[str, str]:
        """Return the headers by which clients of OpenAI's and Anthropic's APIs learn how much of their rates is left."""
        self._fill()
        found: dict[str, str] = {}
        for name, bucket in self._buckets.items():
            left, reset_s = str(max(0, math.floor(bucket.level))), bucket.seconds_to(bucket.per_minute)
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + math.ceil(reset_s)))
            found |= {
                f"x-ratelimit-limit-{name}": str(bucket.per_minute),
                f"x-ratelimit-remaining-{name}": left,
                f"x-ratelimit-reset-{name}": f"{reset_s:.3f}s",
                f"anthropic-ratelimit-{name}-limit": str(bucket.per_minute),
                f"anthropic-ratelimit-{name}-remaining": left,
                f"anthropic-ratelimit-{name}-reset": at,
            }
        return found

    def _fill(self) -> None:
        """Fill all buckets."""
        now_s = self._now_s()
        for bucket in self._buckets.values():
            bucket.fill(now_s)


class Rates:
    """The use of each key that has rates. When a key gets an entry, the entries of keys that no longer exist are removed."""

    def __init__(self, known: Callable[[], Container[str]], now_s: Callable[[], float] = time.monotonic) -> None:
        """`known` returns the digests of all keys that exist now."""
        self._known = known
        self._now_s = now_s
        self._uses: dict[str, KeyUse] = {}

    def of(self, key: str, limits: KeyLimits) -> KeyUse | None:
        """Return the use of the key with the digest `key`, or None if the key has no rates. If the limits of the key have changed, its use
        begins at zero."""
        if not limits.has_rates:
            return None
        use = self._uses.get(key)
        if use is None or use.limits != limits:
            known = self._known()
            self._uses = {other: used for other, used in self._uses.items() if other in known}
            use = self._uses[key] = KeyUse(limits, self._now_s)
        return use


def _refusal(found: str, wait_s: int) -> ApiError:
    """Return the error for a request beyond a rate."""
    return ApiError(RATE_LIMITED, f"{found}; retry in {wait_s} s", headers={"retry-after": str(wait_s)})
