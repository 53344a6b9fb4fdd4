"""The autoscaling policy: as many replicas as the queue and the pages of the present ones ask for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

REQUESTS, PAGES = "num_requests", "pages_share"  # the metrics that replicas report
TARGET_REQUESTS = 16.0  # requests of a replica, running or waiting
UPSCALE_DELAY_S, DOWNSCALE_DELAY_S = 10.0, 300.0  # for which more or fewer replicas must have been wanted
TARGET_PAGES = 0.85  # of a replica's pages that running requests may hold


def by_queue_and_pages(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of replicas. Ray keeps it within the bounds of the deployment, and applies the delays of its configuration."""
    metrics = context.aggregated_metrics or {}
    num_requests = sum((metrics.get(REQUESTS) or {}).values()) + (context.total_queued_requests or 0)
    shares = (metrics.get(PAGES) or {}).values()
    return wanted(num_requests, sum(shares), context.current_num_replicas), {}


def wanted(num_requests: float, pages_shares: float, num_replicas: int) -> int:
    """`pages_shares` is the sum over the replicas."""
    if not num_replicas:
        return math.ceil(num_requests / TARGET_REQUESTS)
    return max(1, math.ceil(num_requests / TARGET_REQUESTS), math.ceil(pages_shares / TARGET_PAGES))
