"""The benchmark of serving, on the demo model: that it measures what it says, not how fast this machine is."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from deploy.bench.serving.drive import Stream
from deploy.bench.serving.serve import arrival_figures, main, stream_figures
from server.messages import MAX_GAP_MS


def test_figures_of_the_engine(capsys: pytest.CaptureFixture[str]):
    main(["--model", "demo", "--quantize", "bf16", "--clients", "1,3", "--json"])
    figures = {figure["name"]: figure for figure in json.loads(capsys.readouterr().out)}
    for n in (1, 3):
        assert figures[f"{n} clients: throughput"]["value"] > 0
        assert 0 < figures[f"{n} clients: time outside kernels"]["value"] < 1
        assert figures[f"{n} clients: first token p50"]["value"] <= figures[f"{n} clients: first token p99"]["value"]
    assert 0 < figures["prefix: second first token, of the first's"]["value"] < 1
    assert not any(name.startswith("arrival") for name in figures), "2,000 tokens do not fit the demo model"
    assert all(figure["goal"] is None for figure in figures.values()), "the goals are for another model"


def test_two_bursts_stand_beside_the_ideal(capsys: pytest.CaptureFixture[str]):
    main(["--model", "demo", "--quantize", "bf16", "--burst", "3", "--json"])
    figures = {figure["name"]: figure["value"] for figure in json.loads(capsys.readouterr().out)}
    for name in ("first burst of 3", "second burst of 3"):
        assert figures[f"{name}: of the model alone"] > 0
        median, worst = (figures[f"{name}: {which} first token, of all prompts"] for which in ("median", "worst"))
        assert 0 < median <= worst


def stream(began_s: float, times_s: Sequence[float]) -> Stream:
    return Stream(began_s, len(times_s), list(times_s))


def test_percentiles_and_throughput():
    streams = [stream(0.0, [1.0, 1.5, 3.0]), stream(0.0, [2.0, 3.0, 4.0])]
    values = {figure.name.removeprefix("x: "): figure.value for figure in stream_figures("x", streams)}
    assert values["throughput"] == 6 / 4.0
    assert values["first token p99"] == 2000
    assert values["between tokens p50"] == 1000 and values["between tokens p99"] == 1500


def test_what_a_late_prompt_costs_the_others():
    """One gap of 3 while the prompt is computed, beside gaps of 1; what happens before all have begun does not count."""
    others = [stream(0.0, [1, 2, 3, 4, 7, 8, 9]), stream(0.0, [2.5, 3.5, 4.5, 6.5, 7.5, 8.5])]
    late = stream(4.2, [7.0])
    gap, first = arrival_figures(others, late, stream(20.0, [21.75]), "")
    assert gap.value == 3000 and gap.goal == MAX_GAP_MS and gap.reached is False
    assert first.value == pytest.approx(1.6) and first.reached is False
