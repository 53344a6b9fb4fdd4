"""Send the engine's output: the tokens of a step in one message, and statistics at intervals."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from server.messages import STEP_SIZES, FromWorker, TokenEvent, Tokens

Publish = Callable[[FromWorker], None]
STATS_INTERVAL_S = 0.1


@dataclass(slots=True)
class Timing:
    """Counts and times of steps since the engine started. `step_s` is the sum of the times from the launch of a step until its tokens are
    added to their requests; `kernel_s` is the sum of the durations of the calls of `StepModel.run`. The last two fields are the same times
    of the last step alone."""

    num_steps: int = 0
    num_tokens: int = 0
    num_prefill: int = 0  # tokens of prompts, and tokens computed again after a preemption; num_tokens includes them
    by_size: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))  # steps per bucket of STEP_SIZES; last: larger steps
    step_s: float = 0.0
    kernel_s: float = 0.0
    last_step_s: float = 0.0
    last_kernel_s: float = 0.0

    def add(self, num_tokens: int, num_prefill: int, step_s: float, kernel_s: float) -> None:
        """Count a step."""
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.num_prefill += num_prefill
        self.by_size[bisect_left(STEP_SIZES, num_tokens)] += 1
        self.step_s += step_s
        self.kernel_s += kernel_s
        self.last_step_s, self.last_kernel_s = step_s, kernel_s


class Outbox:
    """Collects the events of a step, and passes messages to `publish`, which sends them to the front."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._events: list[TokenEvent] = []
        # monotonic time when the next statistics are due; 0: `wants_stats` was not called yet, or found no work when it was last called
        self._stats_due = 0.0

    @property
    def has_news(self) -> bool:
        return bool(self._events)

    @property
    def owes_stats(self) -> bool:
        """Whether the last statistics were sent while there was work, so that final ones are due when the work ends."""
        return self._stats_due > 0.0

    def add(self, event: TokenEvent) -> None:
        self._events.append(event)

    def flush(self) -> None:
        """Send the collected events in one message, if there are any."""
        if self._events:
            events, self._events = self._events, []
            self._publish(Tokens(tuple(events)))

    def send(self, message: FromWorker) -> None:
        """Send a message after the events added before it."""
        self.flush()
        self._publish(message)

    def wants_stats(self, *, is_busy: bool) -> bool:
        """Return whether statistics are due: at intervals while there is work, and once more when the work ends. If they are due, set the
        time of the next ones."""
        now = time.monotonic()
        if is_busy and now >= self._stats_due:
            self._stats_due = now + STATS_INTERVAL_S
            return True
        if not is_busy and self.owes_stats:
            self._stats_due = 0.0
            return True
        return False
