"""The changes of a prefix cache, for routers that keep an index of what each replica has.

A page is known by a hash: the last eight bytes of its digest as a big-endian integer. The digest covers all tokens, images and audio up to
the end of the page, and the salt of the request. llm-d's indexer takes hashes as opaque names, and computes its own keys from the tokens of
the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.engine.step_model import GroupLimits
from server.messages import CacheChange, PagesRemoved, PagesStored

HASH_BYTES = 8


def hash_of(digest: bytes) -> int:
    """Return the hash by which routers know the page with this digest."""
    return int.from_bytes(digest[-HASH_BYTES:], "big")


@dataclass(slots=True)
class _Run:
    """Pages that were published one after the other, each the parent of the next."""

    group: int
    parent: int | None  # hash of the page before the first one; None: the first page begins a sequence
    hashes: list[int]
    token_ids: list[int]


class CacheLog:
    """The changes since the last `take`, in their order. Page pools record them here."""

    def __init__(self, groups: Sequence[GroupLimits]) -> None:
        self._groups = groups
        self._changes: list[_Run | PagesRemoved] = []

    @property
    def has_news(self) -> bool:
        return bool(self._changes)

    def stored(self, group: int, digest: bytes, parent: bytes | None, token_ids: Sequence[int]) -> None:
        """Record that a page is published. `parent` is the digest of the page before it (None: it is the first), `token_ids` are the page's
        own tokens."""
        page, before = hash_of(digest), None if parent is None else hash_of(parent)
        last = self._changes[-1] if self._changes else None
        if isinstance(last, _Run) and last.group == group and last.hashes[-1] == before:
            last.hashes.append(page)
            last.token_ids += token_ids
        else:
            self._changes.append(_Run(group, before, [page], list(token_ids)))

    def removed(self, group: int, digest: bytes) -> None:
        """Record that the page of a group with this digest was evicted or withdrawn."""
        self._changes.append(PagesRemoved((hash_of(digest),), self._index(group)))

    def take(self) -> tuple[CacheChange, ...]:
        """Return the changes, and clear the log."""
        changes, self._changes = self._changes, []
        return tuple(self._told(change) if isinstance(change, _Run) else change for change in changes)

    def _told(self, run: _Run) -> PagesStored:
        """Return the message about a run of published pages."""
        group = self._groups[run.group]
        return PagesStored(
            tuple(run.hashes),
            run.parent,
            tuple(run.token_ids),
            group.page_size,
            self._index(run.group),
            keeps_states=group.keeps_states,
            window=group.window,
        )

    def _index(self, group: int) -> int | None:
        """Return the number of a group for messages: None if the model has only one group."""
        return group if len(self._groups) > 1 else None
