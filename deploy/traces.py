"""Trace requests with OpenTelemetry, from the extra `otel`: a span per request, and a child span for each of its stages.

    receive   until the body has arrived
    prepare   until the prompt is sent to the model's worker: limits, template, tokens
    prefill   until the first token; includes the wait in the model's queue
    decode    until the last token
    finish    until the answer is sent

Only a server with the setting otlp_traces_endpoint imports this module. Spans are created after a request has ended, from the times in its
record.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from runtime.extras import installing
from server.http.record import RequestRecord
from server.settings import SettingsError

EXPORT_S = 5.0  # longest time for sending a batch of spans, in seconds
FLUSH_S = 2.0  # longest time for sending the remaining spans at shutdown, in seconds

Stage = tuple[str, float, float]  # name, begin and end of a stage; times in seconds


class Tracer:
    """Turns the record of each finished request, except probes, into spans. A thread of OpenTelemetry's SDK sends them in batches."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: the address to which spans are sent, as OTLP over HTTP. Raise SettingsError if OpenTelemetry is not installed. The
        environment may name the service by OTEL_SERVICE_NAME."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # pyright: ignore[reportMissingImports]  # from the extra
                OTLPSpanExporter,
            )
            from opentelemetry.sdk.resources import Resource  # pyright: ignore[reportMissingImports]
            from opentelemetry.sdk.trace import TracerProvider  # pyright: ignore[reportMissingImports]
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # pyright: ignore[reportMissingImports]
            from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context  # pyright: ignore[reportMissingImports]
            from opentelemetry.trace.propagation.tracecontext import (  # pyright: ignore[reportMissingImports]
                TraceContextTextMapPropagator,
            )
        except ImportError as error:
            text = f"otlp_traces_endpoint is {endpoint!r}, and {error.name} is not installed; {installing('otel')}"
            raise SettingsError(text) from error
        name = os.environ.get("OTEL_SERVICE_NAME", "relaxserve")
        resource = Resource.create({"service.name": name, "service.version": version("relaxserve")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)))
        self._tracer: Any = self._provider.get_tracer("relaxserve")
        self._server_kind: Any = SpanKind.SERVER
        self._failed: Any = Status(StatusCode.ERROR)
        self._within: Callable[[Any], Any] = set_span_in_context
        self._parent_of: Callable[[dict[str, str]], Any] = TraceContextTextMapPropagator().extract

    def __call__(self, record: RequestRecord) -> None:
        """Create the spans of a request that has ended. If the client sent a trace context, the spans belong to the client's trace."""
        if record.is_probe:
            return
        offset_ns = time.time_ns() - time.monotonic_ns()

        def epoch_ns(seconds: float) -> int:
            return int(seconds * 1e9) + offset_ns

        parent = self._parent_of({"traceparent": record.traceparent} if record.traceparent else {})
        root = self._tracer.start_span(
            f"{record.method} {record.handler}",
            context=parent,
            kind=self._server_kind,
            attributes=_attributes(record),
            start_time=epoch_ns(record.began_s),
        )
        if record.status >= 500:
            root.set_status(self._failed)
        for name, began_s, ended_s in stages_of(record):
            stage = self._tracer.start_span(name, context=self._within(root), start_time=epoch_ns(began_s))
            stage.end(epoch_ns(ended_s))
        root.end(epoch_ns(record.ended_s))

    def close(self) -> None:
        """Send the remaining spans. If the collector does not answer, stop after FLUSH_S seconds."""
        self._provider.force_flush(int(FLUSH_S * 1000))


def stages_of(record: RequestRecord) -> list[Stage]:
    """Return the stages that a request has reached. Each stage lasts until the next stage that was reached begins, and the last one until
    the request has ended."""
    begins = (
        ("receive", record.began_s),
        ("prepare", record.received_s),
        ("prefill", record.submitted_s),
        ("decode", record.first_s),
        ("finish", record.generated_s),
    )
    reached = [(name, began_s) for name, began_s in begins if began_s is not None]
    ends = [began_s for _, began_s in reached[1:]] + [record.ended_s]
    return [(name, began_s, ended_s) for (name, began_s), ended_s in zip(reached, ends, strict=True)]


def _attributes(record: RequestRecord) -> dict[str, str | int]:
    """Return the facts of a request as attributes, named by OpenTelemetry's semantic conventions for HTTP and generative AI, and the id of
    the request. A request that no model answers has none for generative AI."""
    attributes: dict[str, str | int] = {
        "http.request.method": record.method,
        "http.route": record.handler,
        "http.response.status_code": record.status,
        "relaxserve.request_id": record.request_id,
    }
    if record.model:
        attributes |= {
            "gen_ai.request.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
        }
    return attributes
