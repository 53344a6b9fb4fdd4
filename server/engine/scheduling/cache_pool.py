"""The pages of all cache groups. A sequence can continue after a token only if every group still has what the next token reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import lcm

from runtime.cache_groups import PAGE_SIZE
from server.engine.scheduling.cache_log import CacheLog
from server.engine.scheduling.page_pool import Chain, PageList, PagePool
from server.engine.step_model import StepLimits

Copy = tuple[int, int, int]  # (group, source page, target page)


@dataclass(slots=True)
class Held:
    """The pages that one sequence holds: a list per cache group."""

    chain: Chain
    lists: tuple[PageList, ...]
    version: int = 0  # changes whenever one of the lists changes
    # With the next two numbers, most tokens need no call of `make_writable` or `publish`. A number is 0 if unknown.
    num_writable: int = 0  # `make_writable` has nothing to do until the sequence needs this position or a later one
    num_unpublished: int = 0  # `publish` has nothing to do while fewer tokens than this are computed

    @staticmethod
    def nothing(limits: StepLimits, salt: str, marks: tuple[tuple[int, bytes], ...] = ()) -> Held:
        """Return the record of a sequence that has no pages yet. `marks` are those of its `Chain`."""
        return Held(Chain(salt.encode(), marks), tuple(PageList(page_size=group.page_size) for group in limits.groups))

    def change(self) -> None:
        """Record that a list of pages has changed."""
        self.version += 1
        self.num_writable = self.num_unpublished = 0


@dataclass(slots=True)
class CachePool:
    """The page pools of all cache groups, which find, share and give back the pages of a sequence together."""

    pools: tuple[PagePool, ...]
    num_queried_tokens: int = 0
    num_found_tokens: int = 0

    @staticmethod
    def of(limits: StepLimits, log: CacheLog | None = None) -> CachePool:
        """Return the pools of a model with these limits. Changes of the prefix cache are written into `log`, if there is one."""
        return CachePool(tuple(PagePool(group, limits.max_tokens, group=i, log=log) for i, group in enumerate(limits.groups)))

    @property
    def num_pages(self) -> int:
        """The number of pages of all groups, without the padding page of each group."""
        return sum(pool.num_pages - 1 for pool in self.pools)

    @property
    def num_used(self) -> int:
        return sum(pool.num_used for pool in self.pools)

    # --- prefix cache --------------------------------------------------------------------------------------------------------

    def reuse(self, held: Held, token_ids: Sequence[int], max_tokens: int) -> int:
        """Give `held`, which has no pages, the published pages of the first tokens of `token_ids`, at most `max_tokens` of them. Return how
        many tokens these pages cover."""
        found, before = max_tokens, -1
        while found != before:  # every group must find its pages for the same number of tokens, so repeat until no group reduces it
            before = found
            for pool in self.pools:
                found = pool.num_found(held.chain, token_ids, found)
            if len(self.pools) == 1:
                break
        for pool, pages in zip(self.pools, held.lists, strict=True):
            pool.hold(pages, held.chain, token_ids, found)
        held.change()
        return found

    def touch(self, chain: Chain, token_ids: Sequence[int], max_tokens: int) -> int:
        """Return how many of the first tokens, at most `max_tokens`, published pages cover. These pages now count as the most recently
        used ones, so they are evicted last. If `chain` has all digests, `token_ids` may be empty."""
        held = Held(chain, tuple(PageList(page_size=pool.page_size) for pool in self.pools))
        found = self.reuse(held, token_ids, max_tokens)
        self.release(held)
        return found

    def count_reuse(self, num_queried: int, num_found: int) -> None:
        """Count the tokens of a prompt that were looked up in the prefix cache, and those found."""
        self.num_queried_tokens += num_queried
        self.num_found_tokens += num_found

    def fork(self, source: Held, target: Held, num_tokens: int) -> int:
        """Let `target` share the pages of the first tokens of `source`, at most `num_tokens` of them, up to where a sequence can continue.
        Return how many tokens are shared: 0 if `source` has given back pages that the next token reads."""
        assert (source.chain.salt, source.chain.marks) == (target.chain.salt, target.chain.marks)
        num_tokens = self._last_stop(num_tokens)
        if not self._can_go_on(source, num_tokens):
            return 0
        for pool, pages, taken in zip(self.pools, source.lists, target.lists, strict=True):
            pool.fork(pages, taken, num_tokens)
        target.chain.digests = source.chain.digests[: num_tokens // PAGE_SIZE]
        target.change()
        source.num_writable = 0  # its last page may be shared now
        return num_tokens

    def _last_stop(self, num_tokens: int) -> int:
        """Round `num_tokens` down to where a sequence can continue: a group with states has them only at the ends of pages."""
        step = lcm(*(pool.page_size for pool in self.pools if pool.keeps_states))
        return num_tokens // step * step

    def _can_go_on(self, held: Held, start: int) -> bool:
        """Return whether all groups still have the pages that a token at position `start` reads."""
        return all(pool.can_go_on(pages, start) for pool, pages in zip(self.pools, held.lists, strict=True))

    # --- pages to write ------------------------------------------------------------------------------------------------------

    def can_admit(self, prompts: Collection[tuple[Held, int, int]], num_spare: int) -> bool:
        """Return whether every group has enough pages for all prompts, and `num_spare` pages more. Each prompt is given as the pages that
        it holds, and the start and stop of the positions to compute."""
        return all(
            sum(pool.num_to_admit(held.lists[group], start, stop) for held, start, stop in prompts) + num_spare <= pool.num_available
            for group, pool in enumerate(self.pools)
        )

    def make_writable(self, held: Held, start: int, stop: int) -> list[Copy] | None:
        """Give `held` private pages for the positions start .. stop - 1, and take back pages that no later token reads. Return the page
        copies to make before the step, or None if there are not enough pages."""
        lists = list(zip(self.pools, held.lists, strict=True))
        for pool, pages in lists:
            if pool.give_back_past(pages, start):
                held.change()
        copies: list[Copy] = []
        if not all(pool.is_writable(pages, start, stop) for pool, pages in lists):
            if any(pool.num_needed(pages, start, stop) > pool.num_available for pool, pages in lists):
                return None
            held.change()
            copies = [(group, *copy) for group, (pool, pages) in enumerate(lists) for copy in pool.make_writable(pages, start, stop)]
        held.num_writable = min(pool.num_writable(pages, stop) for pool, pages in lists)
        return copies

    def publish(self, held: Held, token_ids: Sequence[int], num_computed: int) -> None:
        """Publish the full pages among the first `num_computed` tokens."""
        for pool, pages in zip(self.pools, held.lists, strict=True):
            pool.publish(pages, held.chain, token_ids, num_computed)
        held.num_writable = 0  # a published page is not private, and pages that are published may be given back
        held.num_unpublished = min((pages.num_published + 1) * pages.page_size for pages in held.lists)

    # --- pages to give back --------------------------------------------------------------------------------------------------

    def rewind(self, held: Held, token_ids: Sequence[int], num_computed: int) -> int:
        """Shorten `held` after tokens were removed. `token_ids` are the tokens left, of which the first `num_computed` need not be computed
        again. Return how many remain computed: fewer than `num_computed` if a sequence cannot continue there, because a group has states
        only at the ends of pages, or because pages that the next token reads are gone."""
        del held.chain.digests[len(token_ids) // PAGE_SIZE :]
        num_computed = self._last_stop(num_computed)
        if not self._can_go_on(held, num_computed):
            self.release(held)
            return self.reuse(held, token_ids, num_computed)
        for pool, pages in zip(self.pools, held.lists, strict=True):
            pool.rewind(pages, num_computed)
        held.change()
        return num_computed

    def give_back_after(self, held: Held, num_computed: int) -> None:
        """Give back the pages that hold none of the first `num_computed` tokens, because the later tokens were taken out of the open
        plan."""
        for pool, pages in zip(self.pools, held.lists, strict=True):
            pool.rewind(pages, num_computed)
        held.change()

    def release(self, held: Held) -> None:
        """Give back all pages of a sequence."""
        for pool, pages in zip(self.pools, held.lists, strict=True):
            pool.release(pages)
        held.change()

    def check_integrity(self, holders: Iterable[Held]) -> None:
        """Raise IntegrityError if the records of a group differ from the pages that `holders` hold, or if `num_writable` or
        `num_unpublished` of a holder is too large."""
        holders = list(holders)
        for group, pool in enumerate(self.pools):
            pool.check_integrity(held.lists[group] for held in holders)
            for held in holders:
                pool.check_limits(held.lists[group], held.num_writable, held.num_unpublished)
