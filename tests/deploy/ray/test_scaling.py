"""The number of replicas of a fleet follows the number of its requests and the use of its KV pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from deploy.ray.scaling import PAGES, REQUESTS, ByQueueAndPages, wanted


@pytest.mark.parametrize(
    ("num_requests", "pages_shares", "num_replicas", "expected"),
    [
        (0, 0.0, 3, 1),
        (16, 0.5, 1, 1),
        (17, 0.5, 1, 2),  # the queue grows
        (4, 1.9, 2, 3),  # few requests with long contexts fill the pages
        (100, 0.1, 2, 7),
        (0, 0.0, 0, 0),  # a fleet without replicas stays so until a request waits
        (1, 0.0, 0, 1),
    ],
)
def test_replicas_follow_the_queue_and_the_pages(num_requests: float, pages_shares: float, num_replicas: int, expected: int) -> None:
    assert wanted(num_requests, pages_shares, num_replicas) == expected


@pytest.mark.parametrize(("options", "expected"), [({}, 3), ({"target_requests": 4.0}, 10)])
def test_the_policy_reads_what_replicas_report(options: dict[str, float], expected: int) -> None:
    reported = {REQUESTS: {"a": 20.0, "b": 18.0}, PAGES: {"a": 0.5, "b": 0.25}}
    context = SimpleNamespace(aggregated_metrics=reported, total_queued_requests=2.0, current_num_replicas=2)
    assert ByQueueAndPages(**options)(cast("Any", context)) == (expected, {})
