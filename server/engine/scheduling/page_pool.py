"""Pages of the KV cache: who holds them, which can be found again, which may be written.

A page is in exactly one of three places: free, cached (nobody holds it, but its content can be found), or held by one or more
sequences. A full page is *published* under the digest of everything before and in it, so that a later prompt with the same beginning
shares it. A page is written only while one sequence holds it and it is not published; `make_writable` copies otherwise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from runtime.kv_pool import PAGE_SIZE


@dataclass(slots=True)
class PageList:
    """The pages of one sequence in order of position, of which the first `num_published` are done with: found by others, or known
    to have a twin that is. `chain` holds the digests of its first full pages as far as they were ever computed; tokens are only
    appended, or taken back with `rewind`, so it outlives the pages.   num_published <= len(pages), num_published <= len(chain)
    """

    salt: bytes
    pages: list[int] = field(default_factory=list[int])
    num_published: int = 0
    chain: list[bytes] = field(default_factory=list[bytes])
    version: int = 0  # changes whenever `pages` does

    def digest(self, index: int, token_ids: Sequence[int]) -> bytes:
        """Of full page `index`. Each digest covers the one before, so it stands for the whole beginning of the sequence."""
        if index == len(self.chain):
            parent = self.chain[-1] if self.chain else blake2b(self.salt, digest_size=16).digest()
            tokens = np.asarray(token_ids[index * PAGE_SIZE : (index + 1) * PAGE_SIZE], "<i4")
            self.chain.append(blake2b(parent + tokens.tobytes(), digest_size=16).digest())
        return self.chain[index]


class IntegrityError(AssertionError):
    """The books of the page pool do not balance."""


class PagePool:
    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages  # page 0 is padding and never handed out
        self._free = list(range(num_pages - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._holders = [0] * num_pages
        self._digest_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self.num_queried_tokens = 0
        self.num_found_tokens = 0

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self.num_available

    def reuse(self, held: PageList, token_ids: Sequence[int], max_tokens: int) -> int:
        """Hold the published pages that begin `token_ids`, at most `max_tokens` tokens of them; say how many tokens that is."""
        assert not held.pages
        for i in range(max_tokens // PAGE_SIZE):
            page = self._page_of.get(held.digest(i, token_ids))
            if page is None:
                break
            self._hold(page)
            held.pages.append(page)
        held.num_published = len(held.pages)
        held.version += 1
        return len(held.pages) * PAGE_SIZE

    def count_reuse(self, num_queried: int, num_found: int) -> None:
        self.num_queried_tokens += num_queried
        self.num_found_tokens += num_found

    def fork(self, source: PageList, target: PageList, num_tokens: int) -> None:
        """Let `target` hold the pages of the first `num_tokens` tokens of `source`, a partly filled last one included."""
        assert not target.pages and source.salt == target.salt
        target.pages = source.pages[: -(-num_tokens // PAGE_SIZE)]
        target.chain = source.chain[: num_tokens // PAGE_SIZE]
        target.num_published = min(source.num_published, num_tokens // PAGE_SIZE)
        target.version += 1
        for page in target.pages:
            self._hold(page)

    def num_needed(self, held: PageList, start: int, stop: int) -> int:
        """How many pages `make_writable` would take."""
        fresh = max(0, -(-stop // PAGE_SIZE) - len(held.pages))
        first = start // PAGE_SIZE
        return fresh + sum(not self._is_private(page) for page in held.pages[first : -(-stop // PAGE_SIZE)])

    def make_writable(self, held: PageList, start: int, stop: int) -> list[tuple[int, int]] | None:
        """Give `held` private pages for the positions start .. stop; the copies to make first, or None if pages are short."""
        pages = held.pages
        num_pages = -(-stop // PAGE_SIZE)
        first = start // PAGE_SIZE
        if num_pages <= len(pages) and first == num_pages - 1 and self._is_private(pages[first]):
            return []  # the common case: one more token in a page of one's own
        if self.num_needed(held, start, stop) > self.num_available:
            return None
        copies: list[tuple[int, int]] = []
        for i in range(first, min(num_pages, len(pages))):
            if not self._is_private(pages[i]):
                copies.append((pages[i], self._take()))
                self._drop(pages[i])
                pages[i] = copies[-1][1]
                held.num_published = min(held.num_published, i)
        while len(pages) < num_pages:
            pages.append(self._take())
        held.version += 1
        return copies

    def publish(self, held: PageList, token_ids: Sequence[int], num_computed: int) -> None:
        """Let others find the full pages among the first `num_computed` tokens. If a page with that content is known already, this
        one stays private: two pages under one digest would make eviction ambiguous."""
        for i in range(held.num_published, num_computed // PAGE_SIZE):
            digest = held.digest(i, token_ids)
            if digest not in self._page_of:
                self._page_of[digest] = held.pages[i]
                self._digest_of[held.pages[i]] = digest
            held.num_published = i + 1

    def rewind(self, held: PageList, num_known: int, num_computed: int) -> None:
        """The tokens behind `num_known` were others, and those behind `num_computed` will be written again. A page that was published
        with them stays so, and is copied before it is written."""
        while len(held.pages) * PAGE_SIZE >= num_computed + PAGE_SIZE:
            self._drop(held.pages.pop())
        del held.chain[num_known // PAGE_SIZE :]
        held.num_published = min(held.num_published, num_computed // PAGE_SIZE)
        held.version += 1

    def release(self, held: PageList) -> None:
        """Give all pages back. The last goes first, so that the beginning of a chain outlives its end in the cache."""
        for page in reversed(held.pages):
            self._drop(page)
        held.pages.clear()
        held.num_published = 0
        held.version += 1

    def check_integrity(self, holders: Iterable[PageList]) -> None:
        """Compare the books with the page lists of all living sequences."""
        counted = [0] * self.num_pages
        for held in holders:
            if len(set(held.pages)) != len(held.pages):
                raise IntegrityError(f"a sequence holds a page twice: {held.pages}")
            for page in held.pages:
                counted[page] += 1
        if counted != self._holders:
            wrong = [(p, self._holders[p], n) for p, n in enumerate(counted) if n != self._holders[p]]
            raise IntegrityError(f"(page, holders on the books, holders found): {wrong}")
        idle = sorted([*self._free, *self._cached])
        if idle != [page for page in range(1, self.num_pages) if not counted[page]]:
            raise IntegrityError(f"pages nobody holds and idle pages differ: {idle}")
        if {page: digest for digest, page in self._page_of.items()} != self._digest_of:
            raise IntegrityError("published pages and their digests do not pair up")
        if any(page in self._digest_of for page in self._free) or any(p not in self._digest_of for p in self._cached):
            raise IntegrityError("a free page is published, or a cached page is not")

    def _is_private(self, page: int) -> bool:
        return self._holders[page] == 1 and page not in self._digest_of

    def _hold(self, page: int) -> None:
        if self._holders[page] == 0:
            del self._cached[page]
        self._holders[page] += 1

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._digest_of.pop(page)]
        self._holders[page] = 1
        return page

    def _drop(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] > 0:
            return
        if page in self._digest_of:
            self._cached[page] = None
        else:
            self._free.append(page)
