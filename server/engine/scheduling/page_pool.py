"""The pages of one cache group: which pages sequences hold, which pages can be found by their tokens, and which may be written.

Page 0 is padding. Every other page is in exactly one of three places: free, cached (no sequence holds it, but it can be found), or held by
one or more sequences. A full page is *published* under the digest of all tokens up to its end, so that a later prompt with the same
beginning can share it. A page is written by a step only while one sequence holds it and it is not published; otherwise `make_writable`
copies it. A page of another server is published by `adopt` and written before the next step.

In a group with a window, a sequence gives back the pages that no later token reads. The sequence's list then has 0 in place of the numbers
of these pages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from runtime.cache_groups import PAGE_SIZE
from server.engine.scheduling.cache_log import CacheLog
from server.engine.step_model import GroupLimits


@dataclass(slots=True)
class Chain:
    """The digests of a sequence: one for each PAGE_SIZE tokens, computed when first needed. Each digest covers the digest before it. The
    digests depend on the sequence's tokens, images and audio, not on its pages, so they stay valid when the pages are given back. When
    tokens are removed, `CachePool.rewind` removes the digests that cover them."""

    salt: bytes
    # Position of the first token of each excerpt of an image or of audio, in ascending order, and the digest of the excerpt.
    marks: tuple[tuple[int, bytes], ...] = ()
    digests: list[bytes] = field(default_factory=list[bytes])

    def digest(self, index: int, token_ids: Sequence[int]) -> bytes:
        """Return digest number `index`, that of PAGE_SIZE tokens from position `index * PAGE_SIZE` on. The digest covers these tokens, the
        previous digest and the excerpts that begin among these tokens, and so identifies the whole beginning of the sequence."""
        while index >= len(self.digests):
            parent = self.digests[-1] if self.digests else blake2b(self.salt, digest_size=16).digest()
            first = len(self.digests) * PAGE_SIZE
            tokens = np.asarray(token_ids[first : first + PAGE_SIZE], "<i4")
            begin, end = (bisect_left(self.marks, place, key=lambda mark: mark[0]) for place in (first, first + PAGE_SIZE))
            pixels = b"".join(mark for _, mark in self.marks[begin:end])
            self.digests.append(blake2b(parent + tokens.tobytes() + pixels, digest_size=16).digest())
        return self.digests[index]


@dataclass(slots=True)
class PageList:
    """The pages of one sequence in order of position. The first `num_returned` pages were given back. Each of the first `num_published`
    pages was published, unless another page with the same content already was.

        num_returned <= num_published <= len(pages)
    """

    pages: list[int] = field(default_factory=list[int])
    num_returned: int = 0
    num_published: int = 0
    page_size: int = PAGE_SIZE  # tokens

    @property
    def num_tokens(self) -> int:
        return len(self.pages) * self.page_size

    @property
    def held(self) -> list[int]:
        """The pages that were not given back."""
        return self.pages[self.num_returned :]


class IntegrityError(AssertionError):
    """The page pool's records contradict each other."""


class PagePool:
    """The pages of one cache group."""

    def __init__(self, limits: GroupLimits, max_tokens: int, *, group: int = 0, log: CacheLog | None = None) -> None:
        """A step runs at most `max_tokens` tokens of one sequence. Changes of the prefix cache are written into `log`, if there is one.
        `group` is the number of the cache group, for the log."""
        self.num_pages = limits.num_pages  # page 0 is padding and never allocated
        self._window = limits.window
        self.keeps_states = limits.keeps_states
        self.page_size = limits.page_size
        self._digests_each = limits.page_size // PAGE_SIZE  # digests per page; a page is published under its last digest
        self._most_each = limits.most_pages(max_tokens)  # largest number of pages of a sequence; None: it grows with the sequence
        self._group = group
        self._log = log
        self._free = list(range(self.num_pages - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._holders = [0] * self.num_pages
        self._digest_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """The number of pages that can be taken: the free and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """The number of pages that sequences hold."""
        return self.num_pages - 1 - self.num_available

    # --- prefix cache --------------------------------------------------------------------------------------------------------

    def num_found(self, chain: Chain, token_ids: Sequence[int], max_tokens: int) -> int:
        """Return the largest number of tokens in full pages, at most `max_tokens`, after which a sequence can continue with published
        pages."""
        most = max_tokens // self.page_size
        if self._window is None:
            return next((i for i in range(most) if self.name(chain, i, token_ids) not in self._page_of), most) * self.page_size
        while most > 0:
            needed = range(most - 1, self.first_needed(most * self.page_size) - 1, -1)
            missing = next((i for i in needed if self.name(chain, i, token_ids) not in self._page_of), None)
            if missing is None:
                break
            most = missing
        return most * self.page_size

    def hold(self, held: PageList, chain: Chain, token_ids: Sequence[int], num_tokens: int) -> None:
        """Give `held`, which has no pages, the published pages needed to continue after `num_tokens` tokens, a multiple of the page
        size."""
        assert not held.pages and num_tokens % self.page_size == 0
        count = num_tokens // self.page_size
        held.num_returned = self.first_needed(num_tokens)
        held.pages = [0] * held.num_returned
        for i in range(held.num_returned, count):
            held.pages.append(self._page_of[self.name(chain, i, token_ids)])
            self._hold(held.pages[i])
        held.num_published = count

    def page_of(self, digest: bytes) -> int | None:
        """Return the page that is published under a digest, or None if there is none."""
        return self._page_of.get(digest)

    def adopt(self, chain: Chain, index: int, token_ids: Sequence[int]) -> int | None:
        """Take a page that no sequence holds, publish it as full page `index` of a chain, and return it; the caller writes it before the
        next step. Return None if such a page is published already, or all pages are held."""
        if self.name(chain, index, token_ids) in self._page_of or not self.num_available:
            return None
        page = self._take()
        self._publish(page, chain, index, token_ids)
        self._drop(page)
        return page

    def withdraw(self, page: int) -> None:
        """Take back a page that `adopt` has just published, because it could not be written."""
        del self._cached[page]
        digest = self._digest_of.pop(page)
        del self._page_of[digest]
        if self._log is not None:
            self._log.removed(self._group, digest)
        self._free.append(page)

    def can_go_on(self, held: PageList, start: int) -> bool:
        """Return whether `held` still has all pages that a token at position `start` reads."""
        return held.num_returned <= self.first_needed(start)

    def fork(self, source: PageList, target: PageList, num_tokens: int) -> None:
        """Share the pages of the first `num_tokens` tokens of `source` with `target`, including a partly filled last page."""
        assert not target.pages
        target.pages = source.pages[: -(-num_tokens // self.page_size)]
        target.num_returned = source.num_returned
        target.num_published = min(source.num_published, num_tokens // self.page_size)
        for page in target.held:
            self._hold(page)

    # --- pages to write ------------------------------------------------------------------------------------------------------

    def num_needed(self, held: PageList, start: int, stop: int) -> int:
        """Return how many pages `make_writable` would allocate."""
        fresh = max(0, -(-stop // self.page_size) - len(held.pages))
        first = start // self.page_size
        return fresh + sum(not self._is_private(page) for page in held.pages[first : -(-stop // self.page_size)])

    def num_to_admit(self, held: PageList, start: int, stop: int) -> int:
        """Return how many pages must be allocated to compute the positions start .. stop - 1 in any number of steps."""
        needed = self.num_needed(held, start, stop)
        return needed if self._most_each is None else min(needed, self._most_each - len(held.held))

    def is_writable(self, held: PageList, start: int, stop: int) -> bool:
        """Return whether the positions start .. stop - 1 lie in one private page: `make_writable` then has nothing to do."""
        pages, last = held.pages, -(-stop // self.page_size) - 1
        return last < len(pages) and start // self.page_size == last and self._is_private(pages[last])

    def make_writable(self, held: PageList, start: int, stop: int) -> list[tuple[int, int]]:
        """Give `held` private pages for the positions start .. stop - 1. Return the copies (source page, target page) to make first. The
        caller has checked that there are enough pages."""
        pages, num_pages = held.pages, -(-stop // self.page_size)
        copies: list[tuple[int, int]] = []
        for i in range(start // self.page_size, min(num_pages, len(pages))):
            if not self._is_private(pages[i]):
                copies.append((pages[i], self._take()))
                self._drop(pages[i])
                pages[i] = copies[-1][1]
                held.num_published = min(held.num_published, i)
        while len(pages) < num_pages:
            pages.append(self._take())
        return copies

    def num_writable(self, held: PageList, stop: int) -> int:
        """Return the position before which `CachePool.make_writable` need not be called again for this group, once it has prepared the
        positions before `stop`: the end of the last page or, if that comes first, the position from which `give_back_past` can give back a
        page."""
        end = -(-stop // self.page_size) * self.page_size
        return end if self._window is None else min(end, (held.num_returned + 1) * self.page_size + self._window - 1)

    def publish(self, held: PageList, chain: Chain, token_ids: Sequence[int], num_computed: int) -> None:
        """Publish the full pages among the first `num_computed` tokens. A page stays private if another page with the same content is
        published: two pages under one digest would make eviction ambiguous."""
        for i in range(held.num_published, num_computed // self.page_size):
            if self.name(chain, i, token_ids) not in self._page_of:
                self._publish(held.pages[i], chain, i, token_ids)
            held.num_published = i + 1

    # --- pages to give back --------------------------------------------------------------------------------------------------

    def give_back_past(self, held: PageList, start: int) -> bool:
        """Give back the pages that no token from position `start` on reads, except those that `publish` has not processed yet. Return
        whether there were such pages."""
        if self._window is None or (first := min(self.first_needed(start), held.num_published)) <= held.num_returned:
            return False
        for i in range(held.num_returned, first):
            self._drop(held.pages[i])
            held.pages[i] = 0
        held.num_returned = first
        return True

    def rewind(self, held: PageList, num_computed: int) -> None:
        """Drop the pages after the one that holds the last of the first `num_computed` tokens; later tokens will be written again. If the
        last remaining page is published, it stays published, and is copied before it is written."""
        while len(held.pages) * self.page_size >= num_computed + self.page_size:
            self._drop(held.pages.pop())
        held.num_published = min(held.num_published, num_computed // self.page_size)

    def release(self, held: PageList) -> None:
        """Give all pages back, the last one first, so that the cache evicts the end of a sequence before its beginning."""
        for page in reversed(held.held):
            self._drop(page)
        held.pages.clear()
        held.num_returned = held.num_published = 0

    # --- integrity -----------------------------------------------------------------------------------------------------------

    def check_integrity(self, holders: Iterable[PageList]) -> None:
        """Raise IntegrityError if the records differ from the page lists of all living sequences, given as `holders`."""
        counted = [0] * self.num_pages
        for held in holders:
            if any(held.pages[: held.num_returned]) or 0 in held.held or held.num_published > len(held.pages):
                raise IntegrityError(
                    f"the page list {held.pages} must begin with {held.num_returned} zeros (pages given back), have no other zero, "
                    f"and have at least {held.num_published} entries (published pages)"
                )
            if len(set(held.held)) != len(held.held):
                raise IntegrityError(f"a sequence holds a page twice: {held.pages}")
            for page in held.held:
                counted[page] += 1
        if counted != self._holders:
            wrong = [(p, self._holders[p], n) for p, n in enumerate(counted) if n != self._holders[p]]
            raise IntegrityError(f"pages with a wrong number of holders (page, recorded, found): {wrong}")
        idle = sorted([*self._free, *self._cached])
        if idle != [page for page in range(1, self.num_pages) if not counted[page]]:
            raise IntegrityError(f"the free and cached pages are {idle}; expected the pages that no sequence holds")
        if {page: digest for digest, page in self._page_of.items()} != self._digest_of:
            raise IntegrityError("the tables of published pages and of their digests contradict each other")
        if any(page in self._digest_of for page in self._free) or any(p not in self._digest_of for p in self._cached):
            raise IntegrityError("a free page is published, or a cached page is not")

    def check_limits(self, held: PageList, num_writable: int, num_unpublished: int) -> None:
        """Raise IntegrityError if one of the two numbers, which `cache_pool.Held` describes, is too large for this group of layers. The
        scheduler would then leave out a call of `make_writable` or `publish` that has something to do."""
        last = num_writable - 1
        if num_writable and not (self.is_writable(held, last, num_writable) and num_writable <= self.num_writable(held, num_writable)):
            raise IntegrityError(f"position {last} cannot be written, or pages before it must be given back first: {held}")
        if num_unpublished > (held.num_published + 1) * self.page_size:
            raise IntegrityError(f"pages are to be published only after {num_unpublished} tokens, which is too late: {held}")

    def name(self, chain: Chain, index: int, token_ids: Sequence[int]) -> bytes:
        """Return the digest under which full page `index` is published."""
        return chain.digest((index + 1) * self._digests_each - 1, token_ids)

    def _publish(self, page: int, chain: Chain, index: int, token_ids: Sequence[int]) -> None:
        """Let a page be found under the digest of full page `index` of a chain."""
        digest = self.name(chain, index, token_ids)
        self._page_of[digest] = page
        self._digest_of[page] = digest
        if self._log is not None:
            parent = self.name(chain, index - 1, token_ids) if index else None
            self._log.stored(self._group, digest, parent, token_ids[index * self.page_size : (index + 1) * self.page_size])

    def first_needed(self, start: int) -> int:
        """Return the index of the first page that a token at position `start` reads."""
        return 0 if self._window is None else max(0, start - self._window + 1) // self.page_size

    def _is_private(self, page: int) -> bool:
        """Return whether only one sequence holds a page, and it is not published."""
        return self._holders[page] == 1 and page not in self._digest_of

    def _hold(self, page: int) -> None:
        """Count one more sequence as holder of a page."""
        if self._holders[page] == 0:
            del self._cached[page]
        self._holders[page] += 1

    def _take(self) -> int:
        """Return a page for one sequence: a free one, or else the cached page that was used least recently, which is evicted."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            digest = self._digest_of.pop(page)
            del self._page_of[digest]
            if self._log is not None:
                self._log.removed(self._group, digest)
        self._holders[page] = 1
        return page

    def _drop(self, page: int) -> None:
        """Count one sequence less as holder of a page. A page without holders is cached if it is published, otherwise free."""
        self._holders[page] -= 1
        if self._holders[page] > 0:
            return
        if page in self._digest_of:
            self._cached[page] = None
        else:
            self._free.append(page)
