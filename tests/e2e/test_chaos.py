"""On a server with the demo model, clients notice only a pause when workers are killed. This is a short version of `python -m
tests.lab chaos`."""

from __future__ import annotations

import asyncio

import pytest

from deploy import demo
from tests.lab.serving.chaos import Answer, Blows, Outcome, Storm, figures, run


@pytest.mark.parametrize(("num_kills", "within_s"), [(1, 0.4), pytest.param(3, 0.8, marks=pytest.mark.slow)])
def test_streams_outlive_their_workers(num_kills: int, within_s: float):
    """Streams continue after their workers are killed or stopped. tests/server/workers/test_supervisor.py tests this with more signals, on
    a null model."""
    blows = Blows(num_kills, num_stops=1, within_s=within_s, stall_s=2.0)
    outcome = asyncio.run(run(demo.MODEL, "bf16", num_streams=16, num_new=400, blows=blows, seed=1))
    assert [figure for figure in figures(outcome, blows) if figure.reached is False] == []
    assert outcome.num_resubmitted > 4 * (num_kills + 1)
    texts = [answer.text for answer in outcome.expected]
    assert len(set(texts)) == 16 and sum(map(len, texts)) > 16 * 400


def storm(num_kills, lasts_s):
    blows = Storm(num_kills, lasts_s)
    outcome = asyncio.run(run(demo.MODEL, "bf16", num_streams=16 if num_kills > 3 else 8, num_new=400, blows=blows, seed=2))
    assert outcome.damage is not None and outcome.damage.num_loading >= num_kills // 3
    assert outcome.num_restarts >= 1 and len(outcome.rounds) >= 1
    return [figure.name for figure in figures(outcome, blows) if figure.reached is False]


@pytest.mark.parametrize(("num_kills", "lasts_s"), [(3, 1.5), pytest.param(6, 3.0, marks=pytest.mark.slow)])
def test_no_request_is_lost_in_a_storm_of_kills(num_kills: int, lasts_s: float):
    """No request is lost if workers are killed in quick succession, some while they start. `python -m tests.lab chaos --storm SECONDS` does
    the same for longer."""
    missed = set(storm(num_kills, lasts_s))
    assert missed <= {"time from the last kill until the model is ready"}, "only the figure that depends on other load may miss its goal"


@pytest.mark.slow
def test_sixty_kills_within_a_minute_lose_nothing_and_the_model_is_back_in_ten_seconds():
    assert storm(60, 60.0) == []


def test_a_difference_would_be_seen():
    told = Outcome([Answer("ab", "length"), Answer("cd", "stop")], [[Answer("ab", "length"), Answer("c", "stop", error="gone")]])
    assert told.num_different == 1 and told.errors == ["gone"]
