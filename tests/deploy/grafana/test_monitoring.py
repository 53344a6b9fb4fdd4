"""The example compose file, alerts and dashboard use only metrics and settings that the server has."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from deploy.grafana.make_dashboard import SELECT, dashboard
from tests.debian import program

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "relaxserve.json"
METRIC = re.compile(r"(?:vllm|relaxserve):\w+")

pytestmark = pytest.mark.xdist_group("demo server")


@pytest.fixture(scope="module")
def published(demo_server: Any) -> set[str]:
    """Return the names of all metric series of a server. A histogram has three series, whose names end in `_bucket`, `_sum` and
    `_count`."""
    demo_server.run("relaxserve", "chat", "What is the capital of France?")
    with urllib.request.urlopen(f"{demo_server.url}/metrics") as response:
        text = response.read().decode()
    names: set[str] = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        names |= {f"{name}{suffix}" for suffix in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    return names


def expressions() -> list[str]:
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    return [*panels, *(rule["expr"] for group in alerts["groups"] for rule in group["rules"])]


def test_every_metric_that_is_asked_for_is_published(published: set[str]) -> None:
    asked = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(asked) > 20
    assert asked - published == set()


def test_a_series_per_model_is_named_after_the_model() -> None:
    """The dashboard shows all models unless some are chosen."""
    targets = [target for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    of_models = [one for one in targets if "by (model_name)" in one["expr"] or one["expr"].endswith(SELECT)]
    assert len(of_models) > 10
    assert [one["expr"] for one in of_models if "{{model_name}}" not in one["legendFormat"]] == []


# Queries like those of vLLM's dashboards. tests/server/test_metrics.py lists the series that these dashboards read.
OF_A_MODEL = 'job=~".+", model_name=~"demo"'
MEAN = "sum(rate(vllm:{0}_sum{{{1}}}[1m])) / (sum(rate(vllm:{0}_count{{{1}}}[1m])) > 0)"
QUANTILE = "histogram_quantile(0.95, sum by (le) (rate(vllm:{0}_bucket{{{1}}}[1m])))"
TIMES = ("time_to_first_token", "inter_token_latency", "request_time_per_output_token", "e2e_request_latency", "request_queue_time")
FORMS = [
    *(form.format(f"{name}_seconds", OF_A_MODEL) for form in (MEAN, QUANTILE) for name in TIMES),
    *(MEAN.format(f"request_{phase}_time_seconds", OF_A_MODEL) for phase in ("prefill", "decode")),
    *(form.format(name, OF_A_MODEL) for form in (MEAN, QUANTILE) for name in ("request_prompt_tokens", "iteration_tokens_total")),
    f"sum by (finished_reason) (rate(vllm:request_success_total{{{OF_A_MODEL}}}[1m]))",
    f'sum(rate(vllm:time_to_first_token_seconds_bucket{{{OF_A_MODEL}, le="0.5"}}[1m]))',
    f"sum(rate(vllm:prefix_cache_hits_total{{{OF_A_MODEL}}}[1m])) / (sum(rate(vllm:prefix_cache_queries_total{{{OF_A_MODEL}}}[1m])) > 0)",
    f'sum(vllm:num_requests_waiting_by_reason{{{OF_A_MODEL}, reason="capacity"}})',
    f"max(vllm:kv_cache_usage_perc{{{OF_A_MODEL}}})",
    "sum by (status) (rate(http_requests_total[1m]))",
    "sum by (handler) (rate(http_request_duration_seconds_sum[1m])) / sum by (handler) (rate(http_request_duration_seconds_count[1m]))",
]


@pytest.fixture(scope="module")
def prometheus(demo_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[Any]]]:
    """Start Prometheus, and ask the server questions. Wait until Prometheus has scraped the server before and after the answers. Yield a
    function that runs a query."""
    server = program("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    targets = [{"targets": [demo_server.url.removeprefix("http://")]}]
    scrape = {"job_name": "relaxserve", "scrape_interval": "1s", "static_configs": targets}
    config = {"rule_files": [str(DEPLOY / "prometheus" / "alerts.yaml")], "scrape_configs": [scrape]}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [server, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]

    def ask(query: str) -> list[Any]:
        url = f"http://{address}/api/v1/query?{urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=60) as response:
            return json.load(response)["data"]["result"]

    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:

        def wait_for(query: str) -> None:
            end_s = time.monotonic() + 120
            while True:
                try:
                    if ask(query):
                        return
                except OSError:  # Prometheus is not listening yet
                    pass
                assert process.poll() is None and time.monotonic() < end_s, f"{query}\n{(folder / 'log').read_text()}"
                time.sleep(0.2)

        try:
            # series with a path as label exist only after the first request
            demo_server.run("relaxserve", "chat", "What is the capital of France?")
            wait_for('count_over_time(up{job="relaxserve"}[5m]) >= 2')
            demo_server.run("relaxserve", "chat", "What is the capital of France?")
            wait_for("sum(increase(vllm:request_success_total[1m])) > 0 and sum(increase(vllm:prefix_cache_queries_total[1m])) > 0")
            yield ask
        finally:
            process.terminate()


def test_promtool_takes_the_rules_and_the_configuration() -> None:
    """The configuration names the rules by their place in the container, so the test checks a copy beside them."""
    promtool, folder = program("promtool"), DEPLOY / "prometheus"
    checked = subprocess.run([promtool, "check", "rules", folder / "alerts.yaml"], capture_output=True, text=True, check=True)
    (alerts,) = yaml.safe_load((folder / "alerts.yaml").read_text())["groups"]
    assert f"{len(alerts['rules'])} rules found" in checked.stdout
    subprocess.run([promtool, "check", "config", "--syntax-only", folder / "prometheus.yaml"], capture_output=True, check=True)


def test_prometheus_has_an_answer_to_every_query(prometheus: Callable[[str], list[Any]]) -> None:
    """Prometheus has data for every query of our dashboard and of vLLM's dashboards."""
    ours = [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    ours = [expression.replace("$model", "demo").replace("$__rate_interval", "1m") for expression in ours]
    ours = [expression for expression in ours if "relaxserve:device_" not in expression]  # the demo model runs on a CPU
    assert [expression for expression in ours if not prometheus(expression)] == []
    answers = {expression: [result["value"][1] for result in prometheus(expression)] for expression in FORMS}
    # a mean of requests of which there were none lately is no number
    assert [expression for expression, values in answers.items() if not set(values) - {"NaN"}] == []


def test_no_alert_fires_over_a_server_that_works(prometheus: Callable[[str], list[Any]]) -> None:
    assert prometheus('ALERTS{alertstate="firing"}') == []


def test_the_committed_dashboard_is_the_one_that_is_written() -> None:
    assert json.loads(DASHBOARD.read_text()) == dashboard()


def test_panels_have_places_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells


def test_brackets_of_expressions_close() -> None:
    for expression in expressions():
        assert [expression.count(c) for c in "({["] == [expression.count(c) for c in ")}]"], expression


def test_alerts_say_what_happened() -> None:
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    for rule in alerts["groups"][0]["rules"]:
        assert {"alert", "expr", "labels", "annotations"} <= rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]


SERVICE = {"build", "image", "command", "environment", "ports", "volumes", "read_only", "tmpfs", "cap_drop", "security_opt"} | {
    "mem_limit",
    "pids_limit",
    "stop_grace_period",
    "restart",
    "depends_on",
    "profiles",
    "deploy",
}


def test_the_compose_file_is_whole() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert compose.keys() == {"name", "x-server", "services", "volumes"}
    for name, service in compose["services"].items():
        assert service.keys() <= SERVICE, name
        assert ("image" in service) != ("build" in service), name
        assert set(service.get("depends_on", ())) <= compose["services"].keys()
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "published beyond this machine"
        for volume in service["volumes"]:
            source = volume.rsplit(":/", 1)[0]
            if source.startswith("."):
                assert (DEPLOY / source).is_dir(), volume
            elif not source.startswith("$"):
                assert source in compose["volumes"], volume
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"] == [{"targets": ["relaxserve:8000"]}]
    assert scraped["dns_sd_configs"] == [{"names": ["relaxserve-cuda"], "type": "A", "port": 8000}]
    for name in ("relaxserve", "relaxserve-cuda"):
        build = compose["services"][name]["build"]
        assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
        assert compose["services"][name]["environment"]["RELAXSERVE_OPEN_METRICS"] == "true"
    assert compose["services"]["relaxserve-cuda"]["profiles"] == ["cuda"], "a plain start needs no GPU"
