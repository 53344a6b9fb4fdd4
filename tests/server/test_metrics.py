"""The scrape: vLLM's dashboard finds what it asks for, and the numbers are those of the requests."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from server.messages import Stats

DASHBOARD = [
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count",
    "prompt_tokens_total",
    "generation_tokens_total",
    "inter_token_latency_seconds_bucket",
    "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_sum",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_success_total",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_max_num_generation_tokens_sum",
]


def samples(server) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(server.http().get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_the_dashboard_of_vllm_finds_its_series(serve):
    server = serve()
    server.chat(n=2)
    found = samples(server)
    for name in DASHBOARD:
        series = found[f"vllm:{name}"]
        assert all(labels["model_name"] == "null" for labels, _ in series), name
    assert {labels["finished_reason"] for labels, _ in found["vllm:request_success_total"]} == {"stop"}
    assert found["vllm:request_success_total"][0][1] == 2
    assert found["vllm:generation_tokens_total"][0][1] == 54
    assert found["vllm:request_generation_tokens_sum"][0][1] == 54
    assert found["vllm:request_max_num_generation_tokens_sum"][0][1] == 27
    assert found["vllm:inter_token_latency_seconds_count"][0][1] == 52
    buckets = [float(labels["le"]) for labels, _ in found["vllm:time_to_first_token_seconds_bucket"]]
    assert buckets[:3] == [0.001, 0.005, 0.01] and 2560.0 in buckets


def test_gauges_are_the_worker_s(serve):
    server = serve()
    server.worker.restarts, server.worker.resubmitted = 2, 3
    server.worker.stats = Stats(4, 5, 10, 40, 6, 7, 8, 9, 0.1, 0.1)
    found = samples(server)
    assert found["vllm:num_requests_running"][0][1] == 4 and found["vllm:num_requests_waiting"][0][1] == 5
    assert found["vllm:kv_cache_usage_perc"][0][1] == 0.25 and found["vllm:num_preemptions_total"][0][1] == 6
    assert found["relaxserve:worker_restarts_total"][0][1] == 2 and found["relaxserve:requests_resubmitted_total"][0][1] == 3
    parts = {labels["part"]: value for labels, value in found["relaxserve:model_bytes"]}
    assert parts == {"weights": 1 << 20, "arena": 1 << 16, "kv_cache": 1 << 20}
    assert found["relaxserve:model_state"][0] == ({"model_name": "null", "engine": "0", "state": "ready"}, 1)


def test_loads_are_counted(serve):
    found = samples(serve())
    assert found["relaxserve:model_loads_total"] == [({"model_name": "null", "engine": "0", "outcome": "succeeded"}, 1)]
    stages = {labels["stage"] for labels, _ in found["relaxserve:load_stage_seconds_count"]}
    assert {"fetch", "verify", "compile", "pack", "warm-up"} <= stages
    ((labels, _),) = found["relaxserve:compile_cache_total"]
    assert labels["signature"] == "null" and labels["result"] == "miss"


def test_failures_and_http_are_counted_by_pattern(serve, answering):
    server = serve(script=answering("abc", fail_after=1))
    server.chat()
    server.http().get("/v1/models/some-name")
    server.http().get("/a/path/nobody/knows")
    found = samples(server)
    assert found["relaxserve:requests_failed_total"][0][0]["code"] == "generation_failed"
    handlers = {(labels["handler"], labels["status"]) for labels, _ in found["http_requests_total"]}
    assert handlers == {("/v1/chat/completions", "5xx"), ("/v1/models/{model:path}", "4xx"), ("none", "4xx")}
