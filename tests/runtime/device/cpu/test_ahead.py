from __future__ import annotations

import numpy as np

from runtime.device.cpu.ahead import MOST_BYTES, SLICE, Ahead

SMALL, LARGE = 4096, 64 * MOST_BYTES


def test_records_prefetch_for_the_next_product() -> None:
    """Records with small weights, such as norms, are no products."""
    ahead = Ahead([[], [(0, SMALL)], [(1, LARGE)], [(0, SMALL)], [(2, LARGE), (0, SMALL)], []], readers=2)
    first, second, none = ahead.following[0], ahead.following[2], ahead.following[4]
    assert ahead.following == [first, first, second, second, none, none]
    assert first == range(first.stop) and second == range(first.stop, ahead.ranges.shape[1]) and not none


def test_each_thread_prefetches_the_beginning_of_its_own_part() -> None:
    ahead = Ahead([[], [(7, LARGE)]], readers=4)
    ahead.place(7, address := 1 << 30)
    assert ahead.ranges.shape == (4, MOST_BYTES // SLICE, 2)
    for reader, ranges in enumerate(ahead.ranges):
        offsets, sizes = ranges[:, 0] - address - reader * LARGE // 4, ranges[:, 1]
        assert offsets.tolist() == [*range(0, MOST_BYTES, SLICE)] and (sizes == SLICE).all()


def test_the_weights_of_a_product_are_prefetched_in_proportion() -> None:
    weights = {1: 3 * LARGE, 2: LARGE, 3: LARGE // 16}
    ahead = Ahead([[], [*weights.items()]], readers=2)
    for base in weights:
        ahead.place(base, base << 40)
    for reader, ranges in enumerate(ahead.ranges):
        assert abs(int(ranges[:, 1].sum()) - MOST_BYTES) < 64
        assert (ranges[:2, 0] >> 40).tolist() == [1, 2], "weights take turns"
        for base, num_bytes in weights.items():
            own = ranges[ranges[:, 0] >> 40 == base]
            share = num_bytes // 2
            assert np.array_equal(own[:, 0] - (base << 40) - reader * share, np.cumsum([0, *own[:-1, 1]]))
            assert abs(int(own[:, 1].sum()) - MOST_BYTES * num_bytes // sum(weights.values())) <= 1


def test_threads_that_share_parts_prefetch_nothing() -> None:
    ahead = Ahead([[], [(1, LARGE)]], readers=0)
    ahead.place(1, 1 << 30)
    assert ahead.ranges.size == 0 and ahead.following == [range(0), range(0)]
