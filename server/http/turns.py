"""Let work on requests take turns: each iteration of the event loop begins at most one fresh request, and does at most one piece of
other work. A request is fresh if its client had no answer outstanding.

Many connections can each have work at the same moment. If all this work were done in one iteration, streams and probes would wait for all
of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

Work = Callable[[], None]


class Turns:
    """The work that waits on one event loop."""

    def __init__(self) -> None:
        self._fresh: deque[Work] = deque()  # requests of clients that had no answer outstanding
        self._further: deque[Work] = deque()  # pipelined requests and pieces of chunked bodies, which must not delay fresh requests

    def add(self, work: Work, *, is_fresh: bool) -> None:
        """Let `work` wait for its turn. `is_fresh`: the client had no answer outstanding."""
        if not (self._fresh or self._further):
            asyncio.get_running_loop().call_soon(self._take)
        (self._fresh if is_fresh else self._further).append(work)

    def _take(self) -> None:
        """Do one piece of work of each queue that is not empty."""
        with ExitStack() as chosen:  # if one piece fails, the other one is done all the same
            for queue in (self._further, self._fresh):  # the stack calls the callback that was added last first
                if queue:
                    chosen.callback(queue.popleft())
            if self._fresh or self._further:
                asyncio.get_running_loop().call_soon(self._take)
