"""Promise 2 on the served demo model: the short form of `relaxserve bench chaos`."""

from __future__ import annotations

import asyncio

from deploy import demo
from deploy.bench.chaos import Answer, Blows, Outcome, figures, run


def test_streams_outlive_their_workers():
    blows = Blows(num_kills=3, num_stops=1, within_s=0.8, stall_s=2.0)
    outcome = asyncio.run(run(demo.MODEL, "bf16", num_streams=16, num_new=400, blows=blows, seed=1))
    assert [figure for figure in figures(outcome, blows) if figure.reached is False] == []
    assert outcome.num_resubmitted > 16
    texts = [answer.text for answer in outcome.expected]
    assert len(set(texts)) == 16 and sum(map(len, texts)) > 16 * 400


def test_a_difference_would_be_seen():
    told = Outcome([Answer("ab", "length"), Answer("cd", "stop")], [[Answer("ab", "length"), Answer("c", "stop", error="gone")]])
    assert told.num_different == 1 and told.errors == ["gone"]
