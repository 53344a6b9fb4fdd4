"""Page pools: sharing, copy on write, attention windows, eviction, and integrity checks."""

from __future__ import annotations

import pytest

from server.engine.scheduling.cache_pool import CachePool, Held
from server.engine.scheduling.page_pool import IntegrityError, PageList
from server.engine.step_model import GroupLimits, StepLimits

TEXT = list(range(400))
WINDOW = 40


def limits_of(*groups: GroupLimits, max_tokens: int = 64) -> StepLimits:
    return StepLimits(vocab_size=400, max_context=400, max_tokens=max_tokens, max_seqs=8, groups=groups)


def pool_of(*groups: GroupLimits | int) -> CachePool:
    return CachePool.of(limits_of(*(GroupLimits(group) if isinstance(group, int) else group for group in groups)))


def nothing(pool: CachePool, salt: str = "") -> Held:
    return Held.nothing(limits_of(*[GroupLimits(2)] * len(pool.pools)), salt)


def pages_of(held: Held, group: int = 0) -> list[int]:
    return held.lists[group].pages


def filled(pool: CachePool, num_tokens: int, salt: str = "", text: list[int] = TEXT, chunk: int = 400) -> Held:
    """Return the pages of a sequence whose first `num_tokens` tokens are computed in chunks."""
    held = nothing(pool, salt)
    start = pool.reuse(held, text, num_tokens)
    while start < num_tokens:
        stop = min(start + chunk, num_tokens)
        assert pool.make_writable(held, start, stop) is not None
        pool.publish(held, text, stop)
        pool.check_integrity([held])
        start = stop
    return held


def test_page_zero_is_never_handed_out() -> None:
    pool = pool_of(5)
    held = filled(pool, 64)
    assert sorted(pages_of(held)) == [1, 2, 3, 4] and pool.num_used == pool.num_pages == 4
    assert pool.make_writable(nothing(pool), 0, 1) is None


def test_images_are_part_of_a_prefix() -> None:
    """Equal tokens with other images share the pages before the first image that differs, and equal images are found again."""
    pool, limits = pool_of(40), limits_of(GroupLimits(2))

    def shared(*marks: tuple[int, bytes]) -> int:
        held = Held.nothing(limits, "", marks)
        found = pool.reuse(held, TEXT, 96)
        if found < 96:
            assert pool.make_writable(held, found, 96) is not None
            pool.publish(held, TEXT, 96)
        pool.release(held)
        pool.check_integrity([])
        return found

    assert shared((20, b"red"), (70, b"blue")) == 0
    assert shared((20, b"red"), (70, b"blue")) == 96
    assert shared((20, b"red"), (70, b"green")) == 64
    assert shared((20, b"grey"), (70, b"blue")) == 16
    assert shared() == 16
    assert shared((20, b"red")) == 64


def test_full_pages_are_found_again_and_partial_ones_are_not() -> None:
    pool = pool_of(10)
    first = filled(pool, 40)
    second = nothing(pool)
    assert pool.reuse(second, TEXT, 99) == 32
    assert pages_of(second) == pages_of(first)[:2]
    third = nothing(pool)
    assert pool.reuse(third, TEXT, 31) == 16, "a hit must not exceed the requested length"
    pool.check_integrity([first, second, third])


def test_salts_and_beginnings_separate() -> None:
    pool = pool_of(20)
    filled(pool, 48)
    assert pool.reuse(nothing(pool, "other"), TEXT, 48) == 0
    assert pool.reuse(nothing(pool), [99, *TEXT[1:]], 48) == 0, "the first page differs, so none matches"


def test_least_recently_used_goes_first_and_the_end_of_a_chain_before_its_beginning() -> None:
    pool = pool_of(7)
    old = filled(pool, 48)
    pool.release(old)
    new = filled(pool, 48, "new")
    pool.release(new)
    assert pool.num_used == 0
    taken = nothing(pool, "third")
    assert pool.make_writable(taken, 0, 32) == []
    assert pool.reuse(old, TEXT, 48) == 16
    assert pool.reuse(new, TEXT, 48) == 48
    pool.check_integrity([taken, old, new])


@pytest.mark.parametrize("groups", [(10,), (10, GroupLimits(10, WINDOW))])
def test_a_shared_page_is_copied_before_it_is_written(groups: tuple[int, ...]) -> None:
    pool = pool_of(*groups)
    leader, follower = filled(pool, 20), nothing(pool)
    assert pool.fork(leader, follower, 20)
    assert [pages_of(follower, g) for g in range(len(groups))] == [pages_of(leader, g) for g in range(len(groups))]
    copies = pool.make_writable(follower, 20, 21)
    assert copies == [(g, pages_of(leader, g)[1], pages_of(follower, g)[1]) for g in range(len(groups))]
    assert pages_of(follower)[0] == pages_of(leader)[0]
    assert pool.make_writable(leader, 20, 21) == [], "the other holder is gone, so the page is its own"
    pool.check_integrity([leader, follower])


@pytest.mark.parametrize("change", ["fork", "rewind", "release"])
def test_pages_are_checked_again_after_they_change(change: str) -> None:
    """Between two changes of its pages, a sequence asks the pool only when it reaches a new page."""
    pool = pool_of(10)
    held = filled(pool, 40)
    assert pool.make_writable(held, 40, 41) == [] and held.num_writable == 48
    others = list[Held]()
    if change == "fork":
        others.append(nothing(pool))
        pool.fork(held, others[0], 40)
    elif change == "rewind":
        assert pool.rewind(held, TEXT[:20], 19) == 19
    else:
        pool.release(held)
    pool.check_integrity([held, *others])
    assert held.num_writable == 0


def test_a_published_page_is_copied_even_if_nobody_else_holds_it() -> None:
    pool = pool_of(10)
    held = filled(pool, 32)
    source = pages_of(held)[1]
    assert pool.make_writable(held, 31, 33) == [(0, source, pages_of(held)[1])]
    assert pool.reuse(nothing(pool), TEXT, 32) == 32


@pytest.mark.parametrize("groups", [(4,), (9, 4), (9, GroupLimits(4, 100))])
def test_what_is_short_is_refused_without_a_trace(groups: tuple[int, ...]) -> None:
    """If any group lacks free pages, `make_writable` returns None and changes nothing."""
    pool = pool_of(*groups)
    leader, follower = filled(pool, 40), nothing(pool)
    assert pool.fork(leader, follower, 40)
    before = [list(pages_of(follower, g)) for g in range(len(groups))]
    assert pool.make_writable(follower, 40, 41) is None
    assert [pages_of(follower, g) for g in range(len(groups))] == before
    pool.check_integrity([leader, follower])


# --- groups with windows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_the_pages_behind_a_window_go_back_while_the_sequence_goes_on(chunk: int) -> None:
    group = GroupLimits(40, WINDOW)
    pool = pool_of(40, group)
    held = nothing(pool)
    for start in range(0, 320, chunk):
        stop = min(start + chunk, 320)
        assert pool.make_writable(held, start, stop) == []
        pool.publish(held, TEXT, stop)
        pool.check_integrity([held])
        needed = range(max(0, start - WINDOW + 1) // 16, -(-stop // 16))
        assert [i for i, page in enumerate(pages_of(held, 1)) if page] == list(needed)
        assert len(needed) <= (group.most_pages(chunk) or 0)
        assert 0 not in pages_of(held, 0)


def test_a_sequence_of_any_length_runs_in_the_pages_that_a_window_needs() -> None:
    group = GroupLimits(1 + (GroupLimits(0, WINDOW).most_pages(64) or 0), WINDOW)
    assert limits_of(group).capacity == 400 and limits_of(GroupLimits(group.num_pages - 1, WINDOW)).capacity == 16 * (group.num_pages - 2)
    pool = pool_of(group)
    assert pool.can_admit([(nothing(pool), 0, 400)], num_spare=0) and not pool.can_admit([(nothing(pool), 0, 400)], num_spare=1)
    held = filled(pool, 400, chunk=64)
    assert pool.pools[0].num_used <= group.num_pages - 1
    pool.release(held)
    found = nothing(pool)
    start = pool.reuse(found, TEXT, 399)
    assert start > 0 and pool.can_admit([(found, start, 400)], num_spare=0), "pages that the sequence already holds count"


def test_a_hit_needs_of_a_window_its_last_pages_only() -> None:
    pool = pool_of(40, GroupLimits(40, WINDOW))
    first = filled(pool, 160, chunk=16)
    second = nothing(pool)
    assert pool.reuse(second, TEXT, 160) == 160
    # these pages contain the window before position 160, which is positions 121 to 159
    assert [i for i, page in enumerate(pages_of(second, 1)) if page] == [7, 8, 9]
    pool.check_integrity([first, second])


def test_a_hit_ends_where_every_group_can_go_on() -> None:
    """A prefix hit ends at the last position at which every group can continue. Here the group without a window has all pages up to
    position 160, but the group with a window has lost its pages before 160, so the hit ends at 96."""
    pool = pool_of(60, GroupLimits(13, WINDOW))
    pool.release(filled(pool, 160, chunk=16))
    recent = nothing(pool)
    assert pool.reuse(recent, TEXT, 96) == 96 and [i for i, page in enumerate(pages_of(recent, 1)) if page] == [3, 4, 5]
    pool.release(recent)
    other = nothing(pool, "other")
    assert pool.make_writable(other, 0, 144) == []  # uses up two free pages and all cached pages except the three that `recent` used last
    third = nothing(pool)
    assert pool.reuse(third, TEXT, 160) == 96 and len(pages_of(third, 0)) == 6
    pool.check_integrity([other, third])
    pool.release(third)
    assert pool.make_writable(other, 144, 160) == []
    assert pool.reuse(third, TEXT, 160) == 0
    pool.check_integrity([other, third])


def test_a_fork_behind_the_window_of_its_source_is_refused() -> None:
    pool = pool_of(40, GroupLimits(40, WINDOW))
    leader, follower = filled(pool, 200, chunk=16), nothing(pool)
    assert not pool.fork(leader, follower, 100) and not pages_of(follower)
    assert pool.fork(leader, follower, 190)
    pool.check_integrity([leader, follower])


def test_a_rewind_behind_the_window_goes_on_from_published_pages() -> None:
    pool = pool_of(40, GroupLimits(40, WINDOW))
    held = filled(pool, 200, chunk=16)
    assert pool.rewind(held, TEXT[:196], 195) == 195, "the window is still there"
    pool.check_integrity([held])
    assert pool.rewind(held, TEXT[:100], 99) == 96, "it is not, but its full pages are cached"
    pool.check_integrity([held])
    assert pool.make_writable(held, 96, 101) == []
    pool.check_integrity([held])


# --- groups with states --------------------------------------------------------------------------------------------------


def test_a_hit_a_fork_and_a_rewind_end_with_a_page_of_states() -> None:
    """Prefix hits, forks and rewinds end at the end of a page of states. Here a page of states covers 64 tokens; a page of keys and values
    covers 16."""
    pool = pool_of(40, GroupLimits(9, 65, keeps_states=True, page_size=64))
    held, other = filled(pool, 200, chunk=16), nothing(pool)
    assert [len(pages_of(held, group)) for group in (0, 1)] == [13, 4]
    assert pool.reuse(other, TEXT, 199) == 192 and [len(pages_of(other, group)) for group in (0, 1)] == [12, 3]
    pool.release(other)
    assert pool.reuse(other, TEXT, 191) == 128
    pool.release(other)
    assert pool.fork(held, other, 198) == 192
    pool.check_integrity([held, other])
    pool.release(other)
    assert pool.rewind(held, TEXT[:200], 195) == 192
    assert [len(pages_of(held, group)) for group in (0, 1)] == [12, 3]
    pool.check_integrity([held])


# --- integrity checks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
def test_the_books_notice(number: int) -> None:
    """The integrity check finds wrong page counts and lists in every group."""
    pool = pool_of(6, GroupLimits(6, WINDOW))
    held = filled(pool, 20)
    with pytest.raises(IntegrityError, match="holders"):
        pool.check_integrity([])
    with pytest.raises(IntegrityError, match="holders"):
        pool.check_integrity([held, held])
    pages = held.lists[number].pages
    with pytest.raises(IntegrityError, match="twice"):
        pool.check_integrity([with_pages(held, number, [pages[0], pages[0]])])
    with pytest.raises(IntegrityError, match="must begin with 0 zeros"):
        pool.check_integrity([with_pages(held, number, [0, pages[1]])])
    pool.pools[number]._free.append(pages[0])
    with pytest.raises(IntegrityError, match="free and cached pages"):
        pool.check_integrity([held])


def with_pages(held: Held, number: int, pages: list[int]) -> Held:
    """Return a copy of `held` whose group `number` has the given pages."""
    return Held(held.chain, tuple(PageList(pages) if i == number else known for i, known in enumerate(held.lists)))
