"""The metrics contain all series that vLLM's dashboards read, and their values match the requests."""

from __future__ import annotations

import asyncio
import os
import threading
import time

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from runtime.device.base import CardUsage
from server.history import History
from server.interfaces import Outage
from server.messages import PageCounts, Stats
from server.metrics import ENGINE, MOST_ENDED, Metrics, ModelReading
from server.models import processes
from server.models.processes import Usage
from server.models.state import ModelSpec
from server.process_state import fields_of

# The series that vLLM's dashboards read, with the label values in their queries. In vLLM's repository the dashboards are below
# examples/observability (November 2026): prometheus_grafana/grafana.json and dashboards/grafana/vllm_overview.json.
LATENCIES = (
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "time_to_first_token_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
)
LENGTHS = ("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens", "iteration_tokens_total")
TTFT, TPOT = "vllm:time_to_first_token_seconds_bucket", "vllm:request_time_per_output_token_seconds_bucket"
DASHBOARD: list[tuple[str, dict[str, str]]] = [
    *((f"vllm:{name}_{part}", {}) for name in (*LATENCIES, *LENGTHS) for part in ("bucket", "sum", "count")),
    *((f"vllm:{name}", {}) for name in ("prompt_tokens_total", "generation_tokens_total", "num_preemptions_total")),
    *((f"vllm:{name}", {}) for name in ("prefix_cache_queries_total", "prefix_cache_hits_total")),
    *((f"vllm:{name}", {}) for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")),
    *(("vllm:num_requests_waiting_by_reason", {"reason": reason}) for reason in ("capacity", "deferred")),
    *(("vllm:prompt_tokens_by_source_total", {"source": source}) for source in ("local_compute", "local_cache_hit")),
    *(("vllm:request_success_total", {"finished_reason": reason}) for reason in ("stop", "length", "abort", "error")),
    # buckets of the thresholds that a user of the dashboard can select
    *((TTFT, {"le": le}) for le in ("0.1", "0.25", "0.5", "1.0", "2.5", "5.0")),
    *((TPOT, {"le": le}) for le in ("0.025", "0.05", "0.1", "0.2")),
    ("http_requests_total", {"handler": "/v1/chat/completions", "status": "2xx"}),
    ("http_request_duration_seconds_sum", {"handler": "/v1/chat/completions"}),
    ("http_request_duration_seconds_count", {"handler": "/v1/chat/completions"}),
]
# The dashboards' other series belong to features that this server lacks: caches shared by instances, inputs other than text, and ending
# repetitive answers (request_success_total{finished_reason="repetition"}, prompt_tokens_by_source_total{source="external_kv_transfer"}).
NOT_HERE = ["external_prefix_cache_queries_total", "external_prefix_cache_hits_total", "mm_cache_queries_total", "mm_cache_hits_total"]


def samples(server) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(server.http().get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value_of(found, name, **labels) -> float:
    (value,) = (value for has, value in found[name] if labels.items() <= has.items())
    return value


# The model server protocol of the Gateway API Inference Extension (November 2026), under vLLM's names: the endpoint picker reads them.
PROTOCOL: list[tuple[str, set[str]]] = [
    ("vllm:num_requests_waiting", set()),
    ("vllm:num_requests_running", set()),
    ("vllm:kv_cache_usage_perc", set()),
    ("vllm:cache_config_info", {"block_size", "num_gpu_blocks"}),
    ("vllm:lora_requests_info", {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}),
]


def test_endpoint_pickers_find_the_metrics_of_their_protocol(serve):
    found = samples(serve())
    for name, labels in PROTOCOL:
        assert [labels <= has.keys() for has, _ in found[name]] == [True], name
    ((adapters, at),) = found["vllm:lora_requests_info"]
    assert adapters == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""} and at > 1e9


def test_the_dashboards_of_vllm_find_their_series(serve):
    server = serve()
    server.chat(n=2)
    found = samples(server)
    for name, labels in DASHBOARD:
        series = [has for has, _ in found.get(name, ()) if labels.items() <= has.items()]
        assert series, f"{name} {labels}"
        assert all(has["model_name"] == "null" for has in series if name.startswith("vllm:")), name
    assert value_of(found, "vllm:request_success_total", finished_reason="stop") == 2
    assert value_of(found, "vllm:generation_tokens_total") == 54
    assert value_of(found, "vllm:request_generation_tokens_sum") == 54
    assert value_of(found, "vllm:request_max_num_generation_tokens_sum") == 27
    assert value_of(found, "vllm:inter_token_latency_seconds_count") == 52
    computed = value_of(found, "vllm:prompt_tokens_by_source_total", source="local_compute")
    assert computed == value_of(found, "vllm:prompt_tokens_total") > 0
    assert not any(f"vllm:{name}" in found for name in NOT_HERE)


def test_everything_that_is_counted_is_there_at_0(serve):
    """Every counter is exported with the value 0 before its first event. If a counter appeared only with value 1, Prometheus would miss the
    first event."""
    server = serve()
    before = samples(server)
    server.chat()
    server.chat(stream=True, max_tokens=3)
    appeared = {name for name in samples(server).keys() - before.keys() if not name.startswith("http_")}
    assert appeared == set()
    counted = {
        "vllm:request_success_total": 4,  # one series per finish reason
        "relaxserve:requests_rejected_total": 1,
        "relaxserve:requests_cancelled_total": 2,
        "relaxserve:requests_failed_total": 4,
        "relaxserve:model_unloads_total": 1,
    }
    assert {name: [value for _, value in before[name]] for name in counted} == {name: [0.0] * n for name, n in counted.items()}
    assert value_of(before, "relaxserve:model_loads_total", outcome="failed") == 0


def test_latencies_are_told_apart_from_5_ms_on(serve):
    found = samples(serve())
    for name in LATENCIES:
        assert {"0.005", "0.01"} <= {labels["le"] for labels, _ in found[f"vllm:{name}_bucket"]}, name


def test_failures_and_cancellations_are_finished_requests_too(serve, answering):
    server = serve(script=answering("abc", fail_after=1))
    server.chat()
    assert value_of(samples(server), "vllm:request_success_total", finished_reason="error") == 1


def test_probes_are_no_requests(serve):
    """Health probes and reads of the metrics do not count as requests. So a probe's status 503 while the server is not ready does not count
    as a failed request."""
    server = serve()
    for path in ("/health", "/health/live", "/metrics"):
        server.http().get(path)
    assert "http_requests_total" not in samples(server)


def test_steps_are_counted_by_their_tokens(serve):
    server = serve()
    server.worker.stats = Stats(0, 0, 0, 40, 0, 0, 0, 3, 0.1, 0.1, 521, (1, 1, *(0,) * 6, 1, *(0,) * 5))
    found = samples(server)
    buckets = {labels["le"]: value for labels, value in found["vllm:iteration_tokens_total_bucket"]}
    assert (
        buckets["1.0"] == 1
        and buckets["8.0"] == buckets["256.0"] == 2
        and buckets["512.0"] == 2
        and buckets["1024.0"] == buckets["+Inf"] == 3
    )
    assert value_of(found, "vllm:iteration_tokens_total_sum") == 521 and value_of(found, "vllm:iteration_tokens_total_count") == 3


def test_the_cache_is_told_as_gateways_read_it(serve):
    ((labels, value),) = samples(serve())["vllm:cache_config_info"]
    assert value == 1 and labels == {
        "model_name": "null",
        "engine": "0",
        "block_size": "16",
        "num_gpu_blocks": str(4096 // 16 + 1),
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
    }


def test_the_worker_s_memory_and_processor_time_are_told(serve):
    """The metrics of a worker's memory and CPU time include its child processes. Here the worker is the test's own process."""
    server = serve()
    server.worker.pid = os.getpid()
    found = samples(server)
    assert value_of(found, "relaxserve:worker_resident_bytes", kind="own") > 10 << 20
    assert value_of(found, "relaxserve:worker_resident_bytes", kind="mapped") > 0
    assert value_of(found, "relaxserve:worker_cpu_seconds_total") > 0
    assert value_of(found, "process_resident_memory_bytes") > 10 << 20


def test_no_request_waits_while_processes_are_measured(serve, monkeypatch):
    """To read the state of a worker with the processes of 100 constraints takes 10 ms, and to write the metrics of 100 models 400 ms."""
    server, threads = serve(), list[int]()
    monkeypatch.setattr("server.metrics.generate_latest", lambda all: threads.append(threading.get_ident()) or generate_latest(all))
    monkeypatch.setattr(processes, "fields_of", lambda pid: threads.append(threading.get_ident()) or fields_of(pid))
    server.worker.pid = os.getpid()
    client = server.http()
    for method, path in [
        ("GET", "/metrics"),
        ("GET", "/admin/models"),
        ("GET", "/admin/models/null"),
        ("GET", "/admin/memory"),
        ("GET", "/api/ps"),
    ]:
        threads.clear()
        assert client.request(method, path).status_code == 200
        assert threads and server.thread.ident not in threads, path
    threads.clear()
    assert asyncio.run_coroutine_threadsafe(memory_in_history(server), server.loop).result(60) > 10 << 20
    assert client.delete("/admin/models/null").json()["resident_before_bytes"] > 10 << 20
    assert threads and server.thread.ident not in threads


async def memory_in_history(server) -> float:
    """Return the worker's memory in the first sample of a history of the server's metrics."""
    history = History(server.registry.metrics.watched, server.registry.measuring.measure)
    running = asyncio.create_task(history.run())
    while not history.samples():
        await asyncio.sleep(0.001)
    running.cancel()
    (sample,) = history.samples()
    return sum(value or 0 for (name, _), value in sample.values.items() if name == "relaxserve:worker_resident_bytes")


def test_the_processor_time_of_a_worker_never_falls(serve, monkeypatch):
    """Prometheus takes a counter that falls for one that has begun anew, and adds all of it to the rate. The time of a child is lost for a
    moment if the child ends after its parent was read, and for good if nobody waits for it. Another worker does begin anew."""
    server, told = serve(), list[float]()
    used_s: dict[int | None, float] = {}
    monkeypatch.setattr("server.models.measuring.usage_of", lambda pid: Usage(1, 1, used_s[pid]))
    for pid, cpu_s in [(7, 1000.0), (7, 999.5), (7, 1001.0), (8, 0.5), (None, 3.0), (9, 0.25)]:
        used_s[pid] = cpu_s
        server.worker.pid = pid
        told.append(value_of(samples(server), "relaxserve:worker_cpu_seconds_total"))
    assert told == [1000.0, 1000.0, 1001.0, 0.5, 0.0, 0.25]


def test_gauges_are_the_worker_s(serve):
    server = serve()
    server.worker.restarts, server.worker.resubmitted = 2, 3
    server.worker.stats = Stats(4, 5, 10, 40, 6, 7, 8, 9, 0.1, 0.1, stages_s=2.5, pages=PageCounts(11, 12, 13, 14, 15, 1.5))
    found = samples(server)
    assert found["relaxserve:stage_wait_seconds_total"][0][1] == 2.5
    pages = ("pages_given", "pages_taken", "takes", "takes_failed", "takes_left_out", "wait_seconds")
    assert [found[f"relaxserve:peer_{name}_total"][0][1] for name in pages] == [11, 12, 13, 14, 15, 1.5]
    assert found["vllm:num_requests_running"][0][1] == 4 and found["vllm:num_requests_waiting"][0][1] == 5
    assert found["vllm:kv_cache_usage_perc"][0][1] == 0.25 and found["vllm:num_preemptions_total"][0][1] == 6
    assert found["relaxserve:worker_restarts_total"][0][1] == 2 and found["relaxserve:requests_resubmitted_total"][0][1] == 3
    parts = {labels["part"]: value for labels, value in found["relaxserve:model_bytes"]}
    assert parts == {"weights": 1 << 20, "arena": 1 << 16, "kv_cache": 1 << 20}
    assert found["relaxserve:model_state"][0] == ({"model_name": "null", "engine": "0", "state": "ready"}, 1)


def test_requests_wait_until_a_worker_has_reported(serve, answering):
    """A worker that restarts reports nothing before its first step has ended, and the front holds its requests. A router must not take the
    server for an idle one."""
    server = serve(script=answering("a long answer", interval_s=0.05))
    names = "vllm:num_requests_running", "vllm:num_requests_waiting"
    assert [value_of(samples(server), name) for name in names] == [0, 0]
    with server.http().stream("POST", "/v1/completions", json={"prompt": "a", "n": 3, "max_tokens": 100, "stream": True}) as response:
        assert response.status_code == 200
        server.worker.outage = Outage(time.monotonic(), patience_s=600.0)
        assert [value_of(samples(server), name) for name in names] == [0, 3]
        server.worker.stats = Stats(2, 1, 10, 40, 6, 7, 8, 9, 0.1, 0.1)
        assert [value_of(samples(server), name) for name in names] == [2, 1]
        server.worker.stats = None
        told = server.http().get("/admin/models/null").json()
        assert (told["running"], told["waiting"]) == (0, 3)
        server.worker.outage = None
        assert [value_of(samples(server), name) for name in names] == [0, 3], "the new worker has reported nothing yet"


def test_the_memory_and_the_work_of_a_gpu_are_told(serve):
    """A model on a CPU has no series of a GPU. The gauges of a GPU are those of the last report."""
    server = serve()
    assert not any(name.startswith("relaxserve:device_") for name in samples(server))
    server.worker.card = CardUsage("cuda:1", "a GPU", 80, 30, num_graphs=5, num_graph_launches=6, uploaded_bytes=7, busy_s=0.5)
    found = samples(server)
    assert value_of(found, "relaxserve:device_memory_bytes", device="cuda:1", kind="total") == 80
    assert value_of(found, "relaxserve:device_memory_bytes", device="cuda:1", kind="free") == 30
    work = ("graphs", "graph_launches_total", "uploaded_bytes_total", "busy_seconds_total")
    assert [value_of(found, f"relaxserve:device_{name}", model_name="null") for name in work] == [5, 6, 7, 0.5]


def test_two_models_on_one_gpu_tell_its_memory_once():
    metrics, usage = Metrics(), CardUsage("cuda:0", "a GPU", 80, 30)
    metrics.watch(lambda: [ModelReading(name, "ready", card=usage) for name in ("a", "b")])
    assert metrics.exposition(metrics.readings()).count(b"relaxserve:device_memory_bytes{") == 2
    assert metrics.exposition(metrics.readings()).count(b"relaxserve:device_graphs{") == 2


def test_loads_are_counted(serve):
    found = samples(serve())
    assert value_of(found, "relaxserve:model_loads_total", outcome="succeeded") == 1
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
    assert value_of(found, "relaxserve:requests_failed_total", code="generation_failed") == 1
    handlers = {(labels["handler"], labels["status"]) for labels, _ in found["http_requests_total"]}
    assert handlers == {("/v1/chat/completions", "5xx"), ("/v1/models/{model:path}", "4xx"), ("none", "4xx")}


def test_choices_that_end_with_a_call_are_counted(serve, answering):
    """The parser ends such an answer, not the worker."""
    said = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call> and more'
    server = serve(script=answering(said), initial=(ModelSpec("null", "null", tool_parser="hermes"),))
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    asked = {"tools": [tool], "parallel_tool_calls": False, "max_tokens": 1000}
    assert server.chat(**asked, n=2).json()["choices"][0]["finish_reason"] == "tool_calls"
    found = [line for line in server.http().get("/metrics").text.splitlines() if line.startswith("vllm:request_success_total{")]
    assert [line.rpartition(" ")[2] for line in found if 'finished_reason="stop"' in line] == ["2.0"]


def test_models_that_were_unloaded_long_ago_lose_their_series():
    """Each version of a model may have a name of its own."""
    metrics, loaded = Metrics(), ["m0", "m1"]
    metrics.watch(lambda: [ModelReading(name, "ready") for name in loaded], lambda: loaded)
    for number in range(5 * MOST_ENDED):
        metrics.of(f"m{number}")
        metrics.stage_s.labels(f"m{number}", ENGINE, "compile").observe(1)
    loaded.remove("m1")
    metrics.end("m1")
    metrics.of("another")
    families = [*text_string_to_metric_families(metrics.exposition(metrics.readings()).decode())]
    names = {sample.labels["model_name"] for family in families for sample in family.samples if "model_name" in sample.labels}
    assert len(names) == MOST_ENDED + 2 and {"m0", "m1", f"m{5 * MOST_ENDED - 1}", "another"} <= names
    metrics.of("m2").ttft.observe(1)
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="m2"} 1.0' in metrics.exposition(metrics.readings()).decode()


def test_scrapes_that_come_together_share_a_text(server, monkeypatch):
    """A scrape of many models takes a thread for long, on which unloads wait, too."""
    registry, begun, may_end = server.registry, threading.Event(), threading.Event()
    exposition = registry.metrics.exposition

    def slow(readings) -> bytes:
        texts.append(exposition(readings))
        begun.set()
        may_end.wait(60)
        return texts[-1]

    texts = []
    monkeypatch.setattr(registry.metrics, "exposition", slow)
    scrapes = [asyncio.run_coroutine_threadsafe(registry.measuring.exposition(), server.loop) for _ in range(5)]
    assert begun.wait(60)
    may_end.set()
    assert {scrape.result(60) for scrape in scrapes} <= set(texts) and len(texts) <= 2
