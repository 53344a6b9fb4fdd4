"""Generate the Grafana dashboard: `python -m deploy.grafana.make_dashboard > deploy/grafana/dashboards/relaxserve.json`.

A panel has a title, a unit and queries. Its position follows from the order of ROWS.
"""

from __future__ import annotations

import json
from typing import Any

SELECT = '{model_name=~"$model"}'  # selects the series of the models that are chosen in the dashboard
QUANTILES = (0.5, 0.95, 0.99)  # the quantiles that a panel of times shows
Panel = tuple[str, str, list[tuple[str, str]]]  # title, unit, (query, legend)


def rate(metric: str, by: str = "model_name") -> str:
    """Return a query for the increase of a counter per second, summed over all series with the same value of the label `by`."""
    return f"sum by ({by}) (rate({metric}{SELECT}[$__rate_interval]))"


def quantiles(metric: str) -> list[tuple[str, str]]:
    """Return a query with its legend for each quantile of a histogram, over all chosen models."""
    buckets = rate(f"{metric}_bucket", "le")
    return [(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in QUANTILES]


def gauge(metric: str, legend: str = "{{model_name}}") -> tuple[str, str]:
    """Return a query for the values of a metric, with the legend of each series."""
    return f"{metric}{SELECT}", legend


ROWS: dict[str, list[Panel]] = {
    "Traffic": [
        ("Generated tokens", "short", [(rate("vllm:generation_tokens_total"), "{{model_name}}")]),
        (
            "Prompt tokens",
            "short",
            [
                (rate("vllm:prompt_tokens_total"), "{{model_name}}"),
                (rate("vllm:prompt_tokens_cached_total"), "{{model_name}}, from the prefix cache"),
            ],
        ),
        ("Finished requests", "reqps", [(rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}")]),
    ],
    "Latency": [
        ("Time to the first token", "s", quantiles("vllm:time_to_first_token_seconds")),
        ("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
        ("Whole requests", "s", quantiles("vllm:e2e_request_latency_seconds")),
        ("Time in the queue", "s", quantiles("vllm:request_queue_time_seconds")),
        ("Prefill", "s", quantiles("vllm:request_prefill_time_seconds")),
        ("Decode", "s", quantiles("vllm:request_decode_time_seconds")),
    ],
    "Engine": [
        (
            "Sequences",
            "short",
            [gauge(f"vllm:num_requests_{state}", f"{{{{model_name}}}} {state}") for state in ("running", "waiting")],
        ),
        ("KV cache", "percentunit", [gauge("vllm:kv_cache_usage_perc")]),
        (
            "Prefix cache hits",
            "percentunit",
            [(f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}", "{{model_name}}")],
        ),
        ("Preemptions", "short", [(rate("vllm:num_preemptions_total"), "{{model_name}}")]),
        ("Tokens per step", "short", quantiles("vllm:iteration_tokens_total")),
    ],
    "Reliability": [
        ("Worker restarts", "short", [gauge("relaxserve:worker_restarts_total")]),
        ("Requests continued after a restart", "short", [gauge("relaxserve:requests_resubmitted_total")]),
        ("Rejected", "reqps", [(rate("relaxserve:requests_rejected_total", "code"), "{{code}}")]),
        ("Failed", "reqps", [(rate("relaxserve:requests_failed_total", "code"), "{{code}}")]),
        ("Requests whose client disconnected", "reqps", [(rate("relaxserve:requests_cancelled_total", "stage"), "{{stage}}")]),
    ],
    "Models": [
        ("Memory by part", "bytes", [gauge("relaxserve:model_bytes", "{{model_name}} {{part}}")]),
        ("Memory of workers", "bytes", [gauge("relaxserve:worker_resident_bytes", "{{model_name}} {{kind}}")]),
        ("CPU time of workers", "short", [(rate("relaxserve:worker_cpu_seconds_total"), "{{model_name}}")]),
        ("Memory of GPUs", "bytes", [("relaxserve:device_memory_bytes", "{{device}} {{kind}}")]),
        ("Share of time in which the GPU computes", "percentunit", [(rate("relaxserve:device_busy_seconds_total"), "{{model_name}}")]),
        ("Loads", "short", [(f"sum by (outcome) (relaxserve:model_loads_total{SELECT})", "{{outcome}}")]),
        ("Lookups of compiled programs", "short", [(f"sum by (result) (relaxserve:compile_cache_total{SELECT})", "{{result}}")]),
    ],
}
WIDTH, HEIGHT, COLUMNS = 8, 7, 3  # size of a panel in Grafana's units, and panels side by side


def dashboard() -> dict[str, Any]:
    """Return the dashboard: a heading for each row of ROWS, the panels below it, and the choice of models."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}})
        for index, (name, unit, queries) in enumerate(row):
            place = {"x": index % COLUMNS * WIDTH, "y": top + 1 + index // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(len(panels) + 1, name, unit, queries, place))
        top += 1 + -(-len(row) // COLUMNS) * HEIGHT
    model = {
        "name": "model",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "query": "label_values(vllm:num_requests_running, model_name)",
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
    return {
        "uid": "relaxserve",
        "title": "relaxserve",
        "schemaVersion": 41,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [model]},
        "panels": panels,
    }


def _panel(number: int, title: str, unit: str, queries: list[tuple[str, str]], place: dict[str, int]) -> dict[str, Any]:
    """Return a panel. `number` is the panel's id, and `place` the panel's position and size."""
    source = {"type": "prometheus", "uid": "prometheus"}
    targets = [{"refId": chr(65 + i), "expr": e, "legendFormat": legend, "datasource": source} for i, (e, legend) in enumerate(queries)]
    defaults = {"unit": unit, "min": 0}
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
