"""The autoscaling policy: as many replicas as the requests and the used pages of the present replicas call for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

REQUESTS, PAGES = "num_requests", "pages_share"  # the metrics that replicas report
TARGET_REQUESTS = 16.0  # requests of a replica, running or waiting, unless the pool says another number
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 10.0, 300.0  # seconds for which more, or fewer, replicas must be wanted before their number changes
TARGET_PAGES = 0.85  # share of a replica's pages that running requests should hold at most


class ByQueueAndPages:
    """The policy. It is a class, because Ray passes options to classes only."""

    def __init__(self, target_requests: float = TARGET_REQUESTS) -> None:
        self._target_requests = target_requests

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas. Ray keeps the number within the bounds of the deployment, and applies the delays of its
        configuration."""
        metrics = context.aggregated_metrics or {}
        num_requests = sum((metrics.get(REQUESTS) or {}).values()) + (context.total_queued_requests or 0)
        shares = (metrics.get(PAGES) or {}).values()
        return wanted(num_requests, sum(shares), context.current_num_replicas, self._target_requests), {}


def wanted(num_requests: float, pages_shares: float, num_replicas: int, target_requests: float = TARGET_REQUESTS) -> int:
    """Return the number of replicas for so many running and waiting requests. `pages_shares`: the share of its pages that running requests
    hold, from 0 to 1, summed over the replicas. Without a present replica, only the requests count, and the number may be 0."""
    if not num_replicas:
        return math.ceil(num_requests / target_requests)
    return max(1, math.ceil(num_requests / target_requests), math.ceil(pages_shares / TARGET_PAGES))
