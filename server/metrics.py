"""What Prometheus reads: vLLM's names and buckets, so that its dashboard works unmodified, and our own beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

TTFT = (
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
    + (20, 40, 80, 160, 640, 2560)
)  # fmt: skip  # two lines of one series
ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CHOICES = (1, 2, 5, 10, 20)
LOAD = (0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
MODEL = ("model_name", "engine")
ENGINE = "0"  # one worker per model


@dataclass(frozen=True, slots=True)
class ModelReading:
    """What the gauges show of one model at the moment of a scrape."""

    name: str
    state: str
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    restarts: int = 0
    resubmitted: int = 0
    bytes_by_part: dict[str, int] = field(default_factory=dict)


class Metrics:
    def __init__(self) -> None:
        self.collectors = CollectorRegistry()
        histogram, counter = self._histogram, self._counter
        self.ttft = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", TTFT)
        self.itl = histogram("vllm:inter_token_latency_seconds", "Between two steps of one choice.", ITL)
        self.tpot = histogram("vllm:request_time_per_output_token_seconds", "Mean over a request's decode.", ITL)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", REQUEST)
        self.queue = histogram("vllm:request_queue_time_seconds", "From arrival to submission.", REQUEST)
        self.inference = histogram("vllm:request_inference_time_seconds", "From submission to the end.", REQUEST)
        self.prefill = histogram("vllm:request_prefill_time_seconds", "From submission to the first token.", REQUEST)
        self.decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last.", REQUEST)
        self.prompt_length = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self.output_length = histogram("vllm:request_generation_tokens", "Generated tokens of a request.", TOKENS)
        self.max_length = histogram("vllm:request_max_num_generation_tokens", "Longest choice of a request.", TOKENS)
        self.param_n = histogram("vllm:request_params_n", "`n` of requests.", CHOICES)
        self.param_max_tokens = histogram("vllm:request_params_max_tokens", "`max_tokens` of requests.", TOKENS)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self.cached_tokens = counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self.generated_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.success = counter("vllm:request_success", "Requests that ended well.", ("finished_reason",))

        self.rejected = counter("relaxserve:requests_rejected", "Requests not taken.", ("code",))
        self.cancelled = counter("relaxserve:requests_cancelled", "Requests whose client left.", ("stage",))
        self.failed = counter("relaxserve:requests_failed", "Requests that ended in an error.", ("code",))
        self.loads = counter("relaxserve:model_loads", "Loads by outcome.", ("outcome",))
        self.unloads = counter("relaxserve:model_unloads", "Unloads.")
        self.load_s = histogram("relaxserve:model_load_seconds", "Whole loads.", LOAD)
        self.compile_s = histogram("relaxserve:compile_seconds", "Compilation within a load.", LOAD)
        self.stage_s = histogram("relaxserve:load_stage_seconds", "Stages of loads.", LOAD, ("stage",))
        self.cache = counter("relaxserve:compile_cache", "Look-ups of compiled models.", ("signature", "result"))

        self.http = Counter("http_requests", "HTTP requests.", ("handler", "method", "status"), registry=self.collectors)
        self.http_s = Histogram(
            "http_request_duration_seconds", "Until the response ended.", ("handler", "method"), registry=self.collectors
        )

    def watch(self, read: Callable[[], Iterable[ModelReading]]) -> None:
        """Have every scrape ask `read` for the gauges."""
        self.collectors.register(_Gauges(read))

    def exposition(self) -> bytes:
        return generate_latest(self.collectors)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(name, text, (*MODEL, *labels), buckets=buckets, registry=self.collectors)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, text, (*MODEL, *labels), registry=self.collectors)


class RequestMetrics:
    """The series of one model that every token touches, looked up once."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.metrics = metrics
        self.labels = (model, ENGINE)
        self.itl = metrics.itl.labels(*self.labels)
        self.ttft = metrics.ttft.labels(*self.labels)
        self.generated = metrics.generated_tokens.labels(*self.labels)


class _Gauges(Collector):
    def __init__(self, read: Callable[[], Iterable[ModelReading]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        readings = list(self._read())
        gauges: tuple[tuple[str, str, Callable[[ModelReading], float]], ...] = (
            ("vllm:num_requests_running", "Sequences in the batch.", lambda m: m.num_running),
            ("vllm:num_requests_waiting", "Sequences that wait.", lambda m: m.num_waiting),
            ("vllm:kv_cache_usage_perc", "Used share of the KV pages, 0 to 1.", lambda m: m.kv_usage),
        )
        counters: tuple[tuple[str, str, Callable[[ModelReading], float]], ...] = (
            ("vllm:num_preemptions", "Sequences pushed out of the batch.", lambda m: m.num_preemptions),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", lambda m: m.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", lambda m: m.prefix_hits),
            ("relaxserve:worker_restarts", "Workers started again after a crash.", lambda m: m.restarts),
            ("relaxserve:requests_resubmitted", "Requests carried over a crash.", lambda m: m.resubmitted),
        )
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
        state = GaugeMetricFamily("relaxserve:model_state", "1 for the state a model is in.", labels=(*MODEL, "state"))
        parts = GaugeMetricFamily("relaxserve:model_bytes", "Memory by part.", labels=(*MODEL, "part"))
        for reading in readings:
            state.add_metric((reading.name, ENGINE, reading.state), 1)
            for part, num_bytes in reading.bytes_by_part.items():
                parts.add_metric((reading.name, ENGINE, part), num_bytes)
        yield state
        yield parts
