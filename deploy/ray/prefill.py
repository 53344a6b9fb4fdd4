"""Choose a prefill replica for a long prompt. Prefill replicas only compute prompts; the replica that answers takes the pages from them.

So a long prompt does not delay the streams of the replica that answers. The ingress names a prefill replica to the replica that answers,
whose server asks the prefill replica to compute the prompt. If this fails, the server computes the prompt itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from deploy.ray.directory import Directory
from deploy.ray.wish import BLOCK, Lease, Wish

MOST_REPEATED = 2  # a prefill replica, which may lack the beginning of a prompt, computes at most so many times the number of new blocks


def pays(num_computed: int, num_new: int) -> bool:
    """Return whether it pays that a prefill replica computes `num_computed` blocks of a prompt. `num_new` of them are in the prefix cache
    of no replica that answers."""
    return num_computed <= MOST_REPEATED * num_new


class Prefill:
    """The prefill replicas of one pool."""

    def __init__(self, directory: Directory, lease: Callable[[Wish], Awaitable[Lease | None]], least_characters: int) -> None:
        """`lease` asks Ray for a prefill replica. Ray fills the directory only after the first such call."""
        self._directory = directory
        self._lease = lease
        self._least_blocks = max(1, least_characters // BLOCK)
        self._asking: asyncio.Future[Lease | None] | None = None

    def added(self, lease: Lease, wish: Wish) -> Lease:
        """Return the lease with a prefill replica, if at least `least_characters` of the prompt are new, a prefill replica is known, and
        `pays` returns True for it. Otherwise return the lease unchanged. If no prefill replica is known, also ask Ray for one, for later
        prompts."""
        if lease.num_new < self._least_blocks:
            return lease
        prompt = Wish(wish.keys[: wish.num_blocks], num_blocks=wish.num_blocks)
        found = self._directory.choose(prompt, learns=False)
        if found is None:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.ensure_future(self._lease(Wish()))
            return lease
        if not pays(wish.num_blocks - self._directory.num_kept(prompt, found.replica), lease.num_new):
            return lease
        self._directory.learn(prompt, found.replica)
        return replace(lease, giver=found.url, computes=True)
