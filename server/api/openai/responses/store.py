"""Store responses for later requests. The store limits the bytes and the age of responses. Only the API key that created a response can
read it; on a server without keys, every client can. All responses are in memory, so a restart of the server removes them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from server.errors import RESPONSE_NOT_FOUND, ApiError, ErrorKind


class Item(NamedTuple):
    """An item of a conversation: its id, and the whole item as JSON."""

    id: str
    json: bytes


Items = Sequence[Item]


@dataclass(slots=True, eq=False)
class Stored:
    """A response and the items of its conversation."""

    id: str
    owner: str  # digest of the API key; empty on a server without keys
    body: bytes  # JSON of the response
    context: Items  # input items of the request, after all earlier items of the conversation
    output: Items = ()  # output items; empty while the response runs
    in_background: bool = False  # the request set `background`
    task: asyncio.Task[None] | None = None  # generates the response in the background; None: the response does not run
    used_s: float = field(default_factory=time.monotonic)  # time of the monotonic clock at which the response was last used

    @property
    def num_bytes(self) -> int:
        """The bytes of the response and its items. An item that several responses share is counted in each of them, so the store uses less
        memory than the sum of these counts."""
        return len(self.body) + sum(len(item) for _, item in self.items)

    @property
    def items(self) -> Iterator[Item]:
        return chain(self.context, self.output)

    @property
    def item_ids(self) -> set[str]:
        return {item_id for item_id, _ in self.items}

    @property
    def is_running(self) -> bool:
        """Whether the response is still being generated."""
        return self.task is not None


class ResponseStore:
    """The responses that later requests may read or continue."""

    def __init__(self, max_bytes: int, max_age_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._kept: OrderedDict[str, Stored] = OrderedDict()  # least recently used first
        self._running: dict[str, Stored] = {}  # responses in progress; their bytes are not counted, and admission limits their number
        # by owner and item id: the stored responses that have the item, the newest last
        self._items: dict[tuple[str, str], list[Stored]] = {}
        self._bytes_of: Counter[str] = Counter()  # bytes of the stored responses of each owner

    @property
    def num_bytes(self) -> int:
        """The bytes of all stored responses."""
        return self._bytes_of.total()

    def put(self, stored: Stored) -> None:
        """Store a response. To make room, remove responses that are too old, and then the least recently used responses of the owner that
        stores most bytes, so that no owner displaces the responses of owners that store less. A response that alone exceeds the limit is
        not stored. A response replaces an earlier one with the same id: an ingress may send a request again, and the new response then has
        the same id. A response that runs is kept apart, without a limit, until it is stored again at its end."""
        if stored.is_running:
            self._running[stored.id] = stored
            return
        self._running.pop(stored.id, None)
        if (earlier := self._kept.get(stored.id)) is not None:
            self._remove(earlier)
        if stored.num_bytes > self._max_bytes:
            return
        self._kept[stored.id] = stored
        self._count(stored.owner, stored.num_bytes)
        for item_id in stored.item_ids:
            self._items.setdefault((stored.owner, item_id), []).append(stored)
        self._forget_old()

    def get(self, response_id: str, owner: str, *, kind: ErrorKind = RESPONSE_NOT_FOUND, param: str | None = None) -> Stored:
        """Return a response, running or not. A response that does not run then counts as the most recently used. Raise ApiError of this
        `kind` if the owner has no such response."""
        self._forget_old()
        found = self._kept.get(response_id) or self._running.get(response_id)
        if found is None or found.owner != owner:
            message = f"Response with id {response_id!r:.80} not found; responses are kept for {self._max_age_s:g} s after their last use"
            raise ApiError(kind, message, param=param)
        if response_id in self._kept:
            found.used_s = time.monotonic()
            self._kept.move_to_end(response_id)
        return found

    def has_running(self, response_id: str) -> bool:
        """Return whether a response is still being generated."""
        return response_id in self._running

    def item(self, item_id: str, owner: str) -> bytes | None:
        """Return the JSON of an item of the owner's stored responses, from the newest response with the item; or None if no response has
        it."""
        found = self._items.get((owner, item_id))
        return None if found is None else next(item for known, item in found[-1].items if known == item_id)

    def delete(self, response_id: str, owner: str) -> None:
        """Remove a response, and stop it if it is still being generated. Raise ApiError if the owner has no response with this id."""
        found = self.get(response_id, owner)
        if found.task is not None:
            found.task.cancel()
            self._running.pop(response_id, None)
        else:
            self._remove(found)

    def _forget_old(self) -> None:
        """Remove responses that are too old. Then, until the limit is met, remove the least recently used response of the owner with the
        most bytes."""
        oldest_s = time.monotonic() - self._max_age_s
        while self._kept and (first := next(iter(self._kept.values()))).used_s < oldest_s:
            self._remove(first)
        while self.num_bytes > self._max_bytes:
            most = max(self._bytes_of.values())
            self._remove(next(stored for stored in self._kept.values() if self._bytes_of[stored.owner] == most))

    def _count(self, owner: str, num_bytes: int) -> None:
        """Add bytes to the count of an owner, or remove them if `num_bytes` is negative."""
        self._bytes_of[owner] += num_bytes
        if not self._bytes_of[owner]:
            del self._bytes_of[owner]

    def _remove(self, stored: Stored) -> None:
        """Remove a stored response and its items."""
        del self._kept[stored.id]
        self._count(stored.owner, -stored.num_bytes)
        for item_id in stored.item_ids:
            having = self._items[stored.owner, item_id]
            having.remove(stored)
            if not having:
                del self._items[stored.owner, item_id]
