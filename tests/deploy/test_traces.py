"""The server reports each request to a trace collector: a span for the request, and a child span for each of its stages, in order."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from deploy.traces import Tracer, stages_of
from server.http.record import RequestRecord
from server.settings import ServerSettings, SettingsError

ROOT = Path(__file__).parents[2]


def chat() -> RequestRecord:
    return RequestRecord(
        "req-1",
        "POST",
        "/v1/chat/completions",
        began_s=10.0,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        handler="/v1/chat/completions",
        status=200,
        model="demo",
        prompt_tokens=12,
        completion_tokens=8,
        received_s=10.1,
        submitted_s=10.2,
        first_s=10.4,
        generated_s=10.8,
        ended_s=10.9,
    )


def test_stages_follow_each_other_from_the_first_byte_to_the_last() -> None:
    stages = stages_of(chat())
    assert [name for name, _, _ in stages] == ["receive", "prepare", "prefill", "decode", "finish"]
    assert stages[0][1] == 10.0 and stages[-1][2] == 10.9
    assert all(before[2] == after[1] for before, after in pairwise(stages))


def test_a_request_that_is_refused_has_the_stages_that_it_reached() -> None:
    refused = RequestRecord("req-2", "POST", "/v1/chat/completions", began_s=1.0, received_s=1.5, ended_s=2.0)
    assert stages_of(refused) == [("receive", 1.0, 1.5), ("prepare", 1.5, 2.0)]


class Collector:
    """A fake trace collector. It stores the bodies of the requests that report spans."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:  # type: ignore[override]
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    made = Collector()
    yield made
    made.close()


def test_a_collector_receives_the_spans_of_a_request(collector: Collector) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    tracer = Tracer(collector.endpoint)
    tracer(chat())
    tracer(RequestRecord("probe", "GET", "/health", is_probe=True, status=200))
    tracer.close()
    spans: list[Any] = []
    for body in collector.bodies:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "relaxserve"
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {"POST /v1/chat/completions", "receive", "prepare", "prefill", "decode", "finish"}
    root = by_name.pop("POST /v1/chat/completions")
    assert root.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c" and root.parent_span_id.hex() == "b7ad6b7169203331"
    assert {span.parent_span_id for span in by_name.values()} == {root.span_id}
    assert (root.end_time_unix_nano - root.start_time_unix_nano) / 1e9 == pytest.approx(0.9, abs=1e-3)
    assert (by_name["decode"].end_time_unix_nano - by_name["decode"].start_time_unix_nano) / 1e9 == pytest.approx(0.4, abs=1e-3)
    told = {a.key: a.value for a in root.attributes}
    assert told["gen_ai.request.model"].string_value == "demo" and told["gen_ai.usage.output_tokens"].int_value == 8


def test_without_the_extra_the_setting_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(SettingsError, match=r"otlp_traces_endpoint is .* install '\.\[otel\]'"):
        Tracer("http://127.0.0.1:4318/v1/traces")


def test_an_address_that_cannot_be_sent_to_is_refused() -> None:
    with pytest.raises(SettingsError, match="otlp_traces_endpoint is 'collector:4318'; expected http://HOST:4318"):
        ServerSettings(otlp_traces_endpoint="collector:4318")


def test_the_server_imports_no_opentelemetry_unasked() -> None:
    """The server imports OpenTelemetry only if traces are on, because it is an optional dependency and slow to import."""
    unasked = "m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter', 'deploy.traces'))"
    program = f"import sys, deploy.cli.serve, deploy.serve, deploy.worker; print(*(m for m in sys.modules if {unasked}))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""
