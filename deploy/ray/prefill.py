"""Choose a prefill replica for a long prompt. Prefill replicas only compute prompts; the replica that answers takes the pages from them.

So a long prompt does not delay the streams of the replica that answers. The ingress names a prefill replica to this replica, whose server
asks it to compute the prompt. If that fails, the server computes the prompt itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from deploy.ray.directory import Directory
from deploy.ray.lease import Lease
from deploy.ray.wish import BLOCK, Wish


class Prefill:
    def __init__(self, directory: Directory, lease: Callable[[Wish], Awaitable[Lease | None]], least_characters: int) -> None:
        """`lease` asks Ray for a replica. Ray fills the directory only after it was asked once."""
        self._directory = directory
        self._lease = lease
        self._least_blocks = max(1, least_characters // BLOCK)
        self._asking: asyncio.Future[Lease | None] | None = None

    def added(self, lease: Lease, wish: Wish) -> Lease:
        """Add a prefill replica to a lease, if at least `least_characters` of the prompt are new and such a replica is known."""
        if lease.num_new < self._least_blocks:
            return lease
        found = self._directory.choose(Wish(wish.keys[: wish.num_blocks]))
        if found is None:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.ensure_future(self._lease(Wish()))
            return lease
        return replace(lease, giver=found.url, computes=True)
