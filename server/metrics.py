"""The metrics for Prometheus. Metrics that vLLM has, too, have vLLM's names, so that vLLM's dashboards work unmodified. The names of the
server's own metrics begin with `relaxserve:`.

The buckets of histograms are vLLM's, since vLLM's dashboards name some of them, plus smaller ones. Those series of a model whose label
values are known in advance exist from the model's first load, at 0: if a counter appeared with its first event, Prometheus would miss that
event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from runtime.device.base import CardUsage
from server.errors import DEADLINE_EXCEEDED, GENERATION_FAILED, INTERNAL, QUEUE_FULL, SHUTTING_DOWN
from server.messages import STEP_SIZES, Stats
from server.models.processes import Usage

TTFT = (
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
    + (20, 40, 80, 160, 640, 2560)
)  # fmt: skip  # two lines of one series
ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CHOICES = (1, 2, 5, 10, 20)
LOAD = (0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
MODEL = ("model_name", "engine")
ENGINE = "0"  # one worker per model
MOST_ENDED = 100  # number of models that are not loaded any more and still keep their series
UNUSED = Usage()
IDLE = Stats(0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)

# Label values whose series exist, at 0, before their first event.
FINISHED = ("stop", "length", "abort", "error")
FAILED = tuple(kind.code for kind in (GENERATION_FAILED, DEADLINE_EXCEEDED, SHUTTING_DOWN, INTERNAL))
OUTCOMES = ("succeeded", "failed", "cancelled")
STAGES = ("prefill", "decode")
ADAPTERS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
CACHE = ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching")  # "gpu" is vLLM's word for the device


@dataclass(frozen=True, slots=True)
class ModelReading:
    """The gauges of one model at the moment of a scrape."""

    name: str
    state: str
    stats: Stats = IDLE
    restarts: int = 0
    resubmitted: int = 0
    bytes_by_part: dict[str, int] = field(default_factory=dict)
    cache: dict[str, str] = field(default_factory=dict)  # configuration of the KV cache, under vLLM's names
    usage: Usage = UNUSED
    card: CardUsage | None = None  # None: the model runs on a CPU, or its worker is down


# Names of the samples that `server/history.py` keeps: those that the live page of the console draws.
WATCHED = frozenset(
    (
        "vllm:generation_tokens_total",
        "relaxserve:prefill_tokens_total",
        "relaxserve:prompt_tokens_left",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "relaxserve:worker_resident_bytes",
        "relaxserve:model_state",
    )
)


class Metrics:
    """All metrics of a server."""

    def __init__(self) -> None:
        self.collectors = CollectorRegistry()
        self._by_model: list[Counter | Histogram] = []
        histogram, counter = self._histogram, self._counter
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Time from arrival to the first token.", TTFT)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Time between two steps of one choice.", ITL)
        self.tpot = histogram("vllm:request_time_per_output_token_seconds", "Mean time per token after the first, for each request.", ITL)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Time from arrival to the last token.", REQUEST)
        self.queue = histogram("vllm:request_queue_time_seconds", "Time from arrival to submission to the worker.", REQUEST)
        self.inference = histogram("vllm:request_inference_time_seconds", "Time from submission to the end of the answer.", REQUEST)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "Time from submission to the first token.", REQUEST)
        self.decode = histogram("vllm:request_decode_time_seconds", "Time from the first token to the last.", REQUEST)
        self.prompt_length = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.output_length = histogram("vllm:request_generation_tokens", "Generated tokens of a request.", TOKENS)
        self.max_length = histogram("vllm:request_max_num_generation_tokens", "Tokens of the longest choice of a request.", TOKENS)
        self.param_n = histogram("vllm:request_params_n", "`n` of requests.", CHOICES)
        self.param_max_tokens = histogram("vllm:request_params_max_tokens", "`max_tokens` of requests.", TOKENS)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self.cached_tokens = counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self.by_source = counter("vllm:prompt_tokens_by_source", "Prompt tokens, computed or found in the prefix cache.", ("source",))
        self.generated_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.success = counter("vllm:request_success", "Choices that ended, for any reason.", ("finished_reason",))

        self.rejected = counter("relaxserve:requests_rejected", "Requests refused.", ("code",))
        self.cancelled = counter("relaxserve:requests_cancelled", "Requests whose client disconnected.", ("stage",))
        self.failed = counter("relaxserve:requests_failed", "Requests that ended in an error.", ("code",))
        self.loads = counter("relaxserve:model_loads", "Loads that ended, by outcome.", ("outcome",))
        self.unloads = counter("relaxserve:model_unloads", "Models unloaded.")
        self.load_s = histogram("relaxserve:model_load_seconds", "Duration of whole loads.", LOAD)
        self.compile_s = histogram("relaxserve:compile_seconds", "Time of compilation within a load.", LOAD)
        self.stage_s = histogram("relaxserve:load_stage_seconds", "Duration of each stage of a load.", LOAD, ("stage",))
        self.cache = counter("relaxserve:compile_cache", "Look-ups of compiled models.", ("signature", "result"))

        self._watched: tuple[Collector, ...] = (self.ttft, self.itl, self.generated_tokens)
        self._read: Callable[[], Iterable[ModelReading]] = tuple

        ProcessCollector(registry=self.collectors)  # measures the front; workers have gauges of their own
        self._of_models: dict[str, ModelSeries] = {}
        self._names: Callable[[], Iterable[str]] = tuple
        self.http = Counter("http_requests", "HTTP requests.", ("handler", "method", "status"), registry=self.collectors)
        self.http_s = Histogram(
            "http_request_duration_seconds", "Time until the response ended.", ("handler", "method"), registry=self.collectors
        )

    def of(self, model: str) -> ModelSeries:
        """Return the series of a model. The first call for a model creates them, and may remove the series of models that have ended."""
        if model not in self._of_models:
            self._forget_ended()
            self._of_models[model] = ModelSeries(self, model)
        return self._of_models[model]

    def _forget_ended(self) -> None:
        """Remove the series of models that are not loaded any more, except those of the MOST_ENDED models that ended last. Otherwise
        scrapes would take longer and longer if each version of a model has a name of its own."""
        loaded = set(self._names())
        for name in [name for name in self._of_models if name not in loaded][:-MOST_ENDED]:
            del self._of_models[name]
            for series in self._by_model:
                series.remove_by_labels({MODEL[0]: name})

    def end(self, model: str) -> None:
        """Note that a model was unloaded. Its series are removed after those of all models that ended before it."""
        if model in self._of_models:
            self._of_models[model] = self._of_models.pop(model)

    def watch(self, read: Callable[[], Iterable[ModelReading]], names: Callable[[], Iterable[str]] = tuple) -> None:
        """Let every scrape, and every sample of the history (`server/history.py`), call `read` to get the gauges. `names` returns the names
        of the models that are loaded or loading."""
        self._read, self._names = read, names

    def readings(self) -> list[ModelReading]:
        """Return the present gauges of all models."""
        return list(self._read())

    def watched(self) -> Iterator[Sample]:
        """Yield the samples that `server/history.py` keeps."""
        for collector in (*self._watched, _Gauges(self.readings())):
            for metric in collector.collect():
                yield from (sample for sample in metric.samples if sample.name in WATCHED)

    def exposition(self, readings: Sequence[ModelReading]) -> bytes:
        """Return all metrics as Prometheus text, with the gauges in `readings`. This takes 4 ms for each model, so call it on another
        thread than the event loop's."""
        return generate_latest(_Everything(self.collectors, _Gauges(readings)))

    def _histogram(self, name: str, text: str, buckets: Sequence[float], labels: tuple[str, ...] = ()) -> Histogram:
        """Register and return a new histogram, with series for each model. `labels` are its labels besides those of MODEL."""
        made = Histogram(name, text, (*MODEL, *labels), buckets=buckets, registry=self.collectors)
        self._by_model.append(made)
        return made

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        """Register and return a new counter, with series for each model. `labels` are its labels besides those of MODEL."""
        made = Counter(name, text, (*MODEL, *labels), registry=self.collectors)
        self._by_model.append(made)
        return made


class ModelSeries:
    """The series of one model. The series that change with every token are looked up once."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.metrics = metrics
        self.labels = (model, ENGINE)
        self.itl = metrics.itl.labels(*self.labels)
        self.ttft = metrics.ttft.labels(*self.labels)
        self.generated = metrics.generated_tokens.labels(*self.labels)
        self._begin_at_0()

    def _begin_at_0(self) -> None:
        """Create those series of the model whose label values are known in advance."""
        m = self.metrics
        plain = (m.tpot, m.e2e, m.queue, m.inference, m.prefill, m.decode, m.prompt_length, m.output_length, m.max_length, m.param_n)
        for series in (*plain, m.param_max_tokens, m.prompt_tokens, m.cached_tokens, m.unloads, m.load_s, m.compile_s):
            series.labels(*self.labels)
        known = (
            (m.by_source, ("local_compute", "local_cache_hit")),
            (m.success, FINISHED),
            (m.rejected, (QUEUE_FULL.code,)),
            (m.cancelled, STAGES),
            (m.failed, FAILED),
            (m.loads, OUTCOMES),
        )
        for series, values in known:
            for value in values:
                series.labels(*self.labels, value)


class _Everything(CollectorRegistry):
    """The metrics of several collectors."""

    def __init__(self, *collectors: Collector) -> None:
        super().__init__()
        self._collectors = collectors

    def collect(self) -> Iterable[Metric]:
        for collector in self._collectors:
            yield from collector.collect()


class _Gauges(Collector):
    """The gauges of all models, and the counters that workers and their supervisors count."""

    def __init__(self, readings: Sequence[ModelReading]) -> None:
        self._readings = readings

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges, and the counters that workers and their supervisors count."""
        readings = self._readings
        gauges: tuple[tuple[str, str, Callable[[ModelReading], float]], ...] = (
            ("vllm:num_requests_running", "Sequences in the batch.", lambda m: m.stats.num_running),
            ("vllm:num_requests_waiting", "Sequences that wait.", lambda m: m.stats.num_waiting),
            (
                "vllm:kv_cache_usage_perc",
                "Used share of the KV pages, 0 to 1.",
                lambda m: m.stats.num_pages_used / max(1, m.stats.num_pages),
            ),
            (
                "relaxserve:prompt_tokens_left",
                "Prompt tokens of unfinished requests, not computed yet.",
                lambda m: m.stats.num_prompt_tokens_left,
            ),
        )
        counters: tuple[tuple[str, str, Callable[[ModelReading], float]], ...] = (
            ("vllm:num_preemptions", "Sequences preempted.", lambda m: m.stats.num_preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda m: m.stats.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda m: m.stats.prefix_hits),
            ("relaxserve:prefill_tokens", "Prompt tokens computed, counted after each step.", lambda m: m.stats.num_prefill_tokens),
            ("relaxserve:stage_wait_seconds", "Time that the worker has waited for other stages.", lambda m: m.stats.stages_s),
            ("relaxserve:peer_pages_given", "Cache pages given to other servers.", lambda m: m.stats.pages.num_given),
            ("relaxserve:peer_pages_taken", "Cache pages taken from other servers.", lambda m: m.stats.pages.num_taken),
            ("relaxserve:peer_takes", "Requests for which another server was asked for pages.", lambda m: m.stats.pages.num_tries),
            ("relaxserve:peer_takes_failed", "Of these, those that did not get all pages.", lambda m: m.stats.pages.num_failed),
            (
                "relaxserve:peer_takes_left_out",
                "Requests that named a server which was not asked: computing is faster, too many wait, or it has failed.",
                lambda m: m.stats.pages.num_left_out,
            ),
            ("relaxserve:peer_wait_seconds", "Time for which requests waited for pages.", lambda m: m.stats.pages.waited_s),
            ("relaxserve:worker_restarts", "Restarts of the worker after a crash.", lambda m: m.restarts),
            ("relaxserve:requests_resubmitted", "Requests resubmitted after a crash.", lambda m: m.resubmitted),
            ("relaxserve:worker_cpu_seconds", "CPU time of the worker and its processes.", lambda m: m.usage.cpu_s),
        )
        yield from _of_cards(readings)
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=MODEL)
            for reading in readings:
                gauge.add_metric((reading.name, ENGINE), value(reading))
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(name, text, labels=MODEL)
            for reading in readings:
                counter.add_metric((reading.name, ENGINE), value(reading))
            yield counter
        state = GaugeMetricFamily("relaxserve:model_state", "1 for the state that a model is in.", labels=(*MODEL, "state"))
        parts = GaugeMetricFamily("relaxserve:model_bytes", "Memory of the model, by part.", labels=(*MODEL, "part"))
        resident = GaugeMetricFamily(
            "relaxserve:worker_resident_bytes", "Memory of the worker and its processes, as the kernel counts it.", labels=(*MODEL, "kind")
        )
        waiting = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", "Sequences that wait.", labels=(*MODEL, "reason"))
        steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=MODEL)
        caches = GaugeMetricFamily("vllm:cache_config_info", "Configuration of the KV cache.", labels=(*MODEL, *CACHE))
        for reading in readings:
            labels, stats = (reading.name, ENGINE), reading.stats
            state.add_metric((*labels, reading.state), 1)
            for part, num_bytes in reading.bytes_by_part.items():
                parts.add_metric((*labels, part), num_bytes)
            resident.add_metric((*labels, "own"), reading.usage.own_bytes)
            resident.add_metric((*labels, "mapped"), reading.usage.mapped_bytes)
            waiting.add_metric((*labels, "capacity"), stats.num_waiting)
            waiting.add_metric((*labels, "deferred"), 0)  # nothing waits for any other reason
            bounds = [*map(float, STEP_SIZES), "+Inf"]
            steps.add_metric(labels, list(zip(map(str, bounds), accumulate(stats.steps_by_size), strict=True)), stats.num_step_tokens)
            if reading.cache:
                caches.add_metric((*labels, *(reading.cache[name] for name in CACHE)), 1)
        yield from (state, parts, resident, waiting, steps, caches, _adapters())


def _adapters() -> Metric:
    """Return vLLM's gauge of LoRA adapters, of which this server has none. Without the series, an endpoint picker (the part of a Kubernetes
    gateway that chooses a server) logs an error per scrape. The gauge's value is the present time, by which a picker finds the newest
    sample."""
    gauge = GaugeMetricFamily("vllm:lora_requests_info", "LoRA adapters that requests use.", labels=ADAPTERS)
    gauge.add_metric(("0", "", ""), time.time())
    return gauge


def _of_cards(readings: Iterable[ModelReading]) -> Iterable[Metric]:
    """Yield the memory of each GPU that a model uses, and what each model has done on its GPU since its worker started."""
    cards = {(m.name, ENGINE): m.card for m in readings if m.card is not None}
    memory = GaugeMetricFamily(
        "relaxserve:device_memory_bytes", "Memory of a GPU, as its driver reports it.", labels=("device", "name", "kind")
    )
    for card in {card.device: card for card in cards.values()}.values():  # workers on one GPU report the same memory
        memory.add_metric((card.device, card.name, "total"), card.total_bytes)
        memory.add_metric((card.device, card.name, "free"), card.free_bytes)
    graphs = GaugeMetricFamily("relaxserve:device_graphs", "Graphs that the GPU holds.", labels=MODEL)
    launches = CounterMetricFamily("relaxserve:device_graph_launches", "Launches of graphs.", labels=MODEL)
    uploaded = CounterMetricFamily("relaxserve:device_uploaded_bytes", "Bytes copied from the host to the GPU.", labels=MODEL)
    busy = CounterMetricFamily("relaxserve:device_busy_seconds", "Time that the GPU spent in graphs.", labels=MODEL)
    for labels, card in cards.items():
        graphs.add_metric(labels, card.num_graphs)
        launches.add_metric(labels, card.num_graph_launches)
        uploaded.add_metric(labels, card.uploaded_bytes)
        busy.add_metric(labels, card.busy_s)
    yield from (memory, graphs, launches, uploaded, busy)
