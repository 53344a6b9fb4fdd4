"""The traces of simulated fleets."""

from __future__ import annotations

from collections import Counter
from statistics import mean

import pytest

from deploy.bench.fleet.traces import BLOCK_TOKENS, TRACES, Arrival, Shape, bursts, day, extended, sessions

SHAPE = Shape(rate=8.0, duration_s=1200.0, num_prompt=256, num_new=64)


@pytest.mark.parametrize("trace", TRACES)
def test_traces_have_the_rate_and_the_lengths_that_were_asked_for(trace: str) -> None:
    found = TRACES[trace](SHAPE)
    assert [one.at_s for one in found] == sorted(one.at_s for one in found)
    assert found[0].at_s >= 0 and found[-1].at_s < SHAPE.duration_s
    assert mean(one.num_new for one in found) == pytest.approx(SHAPE.num_new, rel=0.05)
    assert all(len(one.keys) == one.num_prompt // BLOCK_TOKENS for one in found)
    least = 0.8 if trace == "sessions" else 0.95  # the trace ends within sessions
    assert least * SHAPE.num_requests <= len(found) <= 1.05 * SHAPE.num_requests
    assert TRACES[trace](SHAPE) == found, "the seed decides"


def num_within(found: list[Arrival], first_s: float, last_s: float, period_s: float) -> int:
    return sum(first_s <= one.at_s % period_s < last_s for one in found)


def test_bursts_are_five_times_as_dense() -> None:
    found = bursts(SHAPE)
    dense, sparse = num_within(found, 0, 10, 60) / 10, num_within(found, 10, 60, 60) / 50
    assert dense / sparse == pytest.approx(5, rel=0.1)


def test_a_day_has_four_times_as_much_at_noon_as_at_night() -> None:
    found = day(SHAPE)
    night = num_within(found, 0, 60, 1200) + num_within(found, 1140, 1200, 1200)
    assert num_within(found, 540, 660, 1200) / night == pytest.approx(4, rel=0.15)


def test_requests_of_a_session_begin_with_the_one_before_and_its_answer() -> None:
    last: dict[int, Arrival] = {}
    num_following = 0
    for one in sessions(SHAPE):
        if before := last.get(one.session):
            num_following += 1
            assert one.keys[: len(before.keys_after)] == before.keys_after
            assert before.keys_after[: len(before.keys)] == before.keys
            assert one.num_prompt > before.num_prompt + before.num_new
        last[one.session] = one
    assert num_following > 5 * len(last)
    instructions = Counter(one.keys[: 4 * SHAPE.num_prompt // BLOCK_TOKENS] for one in last.values())
    assert len(instructions) == 4, "four kinds of agents"


def test_prompts_that_go_on_differently_share_the_beginning() -> None:
    start = extended((), "start", 640)
    left, right = extended(start, "left", 1280), extended(start, "right", 1280)
    assert left[:10] == right[:10] == start
    assert not {*left[10:]} & {*right[10:]}
