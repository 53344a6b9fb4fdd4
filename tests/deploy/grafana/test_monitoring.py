"""Compose file, alerts and dashboard against a running server: what they name is there."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.make_dashboard import dashboard

DEPLOY = Path(__file__).parents[3] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "relaxserve.json"
METRIC = re.compile(r"(?:vllm|relaxserve):\w+")

pytestmark = pytest.mark.xdist_group("demo server")


@pytest.fixture(scope="module")
def published(demo_server: Any) -> set[str]:
    """Names of the families that a scrape shows, with what their kind adds to them."""
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
    "stop_grace_period",
    "restart",
    "depends_on",
}


def test_the_compose_file_is_whole() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert compose.keys() == {"name", "services", "volumes"}
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
    build = compose["services"]["relaxserve"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())["scrape_configs"][0]["static_configs"][0]["targets"]
    assert scraped == ["relaxserve:8000"]
    assert compose["services"]["relaxserve"]["environment"]["RELAXSERVE_OPEN_METRICS"] == "true"
