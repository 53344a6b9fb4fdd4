"""Test how the cycles of one warp between two instructions are counted."""

from __future__ import annotations

from tests.lab.sass.sample import sample
from tests.lab.sass.warp import L2, cycles_between, cycles_of_trip


def test_cycles_between_two_instructions_go_on_in_the_next_trip() -> None:
    """After the barrier, a warp branches back (13 cycles) and tests the mbarrier (16 cycles)."""
    listing = sample()
    (loop,) = listing.loops
    assert cycles_between(listing, loop, "BAR.SYNC", "SYNCS", L2, ()) == 13 + 16
    trip = cycles_of_trip(listing, loop, L2, lambda _: 1)
    assert cycles_between(listing, loop, "SYNCS", "BAR.SYNC", L2, ()) == trip - 13 - 16
    assert cycles_between(listing, loop, "BAR.SYNC", "SYNCS", L2, range(loop.end - 1, loop.end)) == 16
