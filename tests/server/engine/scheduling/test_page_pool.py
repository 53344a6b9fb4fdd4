"""Pages: sharing, copy on write, eviction, and books that notice when they are wrong."""

from __future__ import annotations

import pytest

from server.engine.scheduling.page_pool import IntegrityError, PageList, PagePool

TEXT = list(range(100))


def filled(pool: PagePool, num_tokens: int, salt: bytes = b"", text: list[int] = TEXT) -> PageList:
    held = PageList(salt)
    pool.reuse(held, text, num_tokens)
    assert pool.make_writable(held, len(held.pages) * 16, num_tokens) is not None
    pool.publish(held, text, num_tokens)
    return held


def test_page_zero_is_never_handed_out() -> None:
    pool = PagePool(5)
    held = filled(pool, 64)
    assert sorted(held.pages) == [1, 2, 3, 4] and pool.num_available == 0
    assert pool.make_writable(PageList(b""), 0, 1) is None


def test_full_pages_are_found_again_and_partial_ones_are_not() -> None:
    pool = PagePool(10)
    first = filled(pool, 40)
    second = PageList(b"")
    assert pool.reuse(second, TEXT, 99) == 32
    assert second.pages == first.pages[:2]
    third = PageList(b"")
    assert pool.reuse(third, TEXT, 31) == 16, "no further than asked"
    pool.check_integrity([first, second, third])


def test_salts_and_beginnings_separate() -> None:
    pool = PagePool(20)
    filled(pool, 48)
    assert pool.reuse(PageList(b"other"), TEXT, 48) == 0
    assert pool.reuse(PageList(b""), [99, *TEXT[1:]], 48) == 0, "the first page differs, so none matches"


def test_least_recently_used_goes_first_and_the_end_of_a_chain_before_its_beginning() -> None:
    pool = PagePool(7)
    old, new = filled(pool, 48), filled(pool, 48, b"new")
    pool.release(old)
    pool.release(new)
    assert pool.num_available == 6 and pool.num_used == 0
    taken = PageList(b"third")
    assert pool.make_writable(taken, 0, 32) == []
    assert pool.reuse(old, TEXT, 48) == 16
    assert pool.reuse(new, TEXT, 48) == 48
    pool.check_integrity([taken, old, new])


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    pool = PagePool(10)
    leader, follower = filled(pool, 20), PageList(b"")
    pool.fork(leader, follower, 20)
    assert follower.pages == leader.pages
    copies = pool.make_writable(follower, 20, 21)
    assert copies == [(leader.pages[1], follower.pages[1])] and follower.pages[0] == leader.pages[0]
    assert pool.make_writable(leader, 20, 21) == [], "the other holder is gone, so the page is its own"
    pool.check_integrity([leader, follower])


def test_a_published_page_is_copied_even_if_nobody_else_holds_it() -> None:
    pool = PagePool(10)
    held = filled(pool, 32)
    source = held.pages[1]
    assert pool.make_writable(held, 31, 33) == [(source, held.pages[1])]
    assert pool.reuse(PageList(b""), TEXT, 32) == 32


def test_what_is_short_is_refused_without_a_trace() -> None:
    pool = PagePool(4)
    leader, follower = filled(pool, 40), PageList(b"")
    pool.fork(leader, follower, 40)
    before = list(follower.pages)
    assert pool.make_writable(follower, 40, 41) is None
    assert follower.pages == before
    pool.check_integrity([leader, follower])


def test_the_books_notice() -> None:
    pool = PagePool(6)
    held = filled(pool, 20)
    with pytest.raises(IntegrityError, match="holders"):
        pool.check_integrity([])
    with pytest.raises(IntegrityError, match="holders"):
        pool.check_integrity([held, held])
    doubled = PageList(b"", pages=[held.pages[0], held.pages[0]])
    with pytest.raises(IntegrityError, match="twice"):
        pool.check_integrity([doubled])
    pool._free.append(held.pages[0])
    with pytest.raises(IntegrityError, match="idle"):
        pool.check_integrity([held])
