"""The benchmark of the delays that hostile requests cause, run on the demo model with one field of one endpoint."""

from __future__ import annotations

import json

import pytest

from deploy.bench.serving.hostile import NOTHING, Delay, figures, main


def test_it_tries_a_field_in_every_shape_beside_a_stream_and_a_probe(capsys: pytest.CaptureFixture[str]):
    """The benchmark sends one field with values of every JSON shape, while a stream and health probes run. tests/server/test_delays.py
    tests the other fields."""
    name = "POST /detokenize tokens"
    main(["--json", "--kind", "fields", "--only", name, "--rounds", "1"])
    found = {figure["name"]: figure for figure in json.loads(capsys.readouterr().out)}
    assert set(found) == {"without requests", "worst of all fields", name}
    assert all(figure["value"] > 0 for figure in found.values())
    assert found["worst of all fields"]["value"] == found[name]["value"]
    assert "8 requests, status 200, 400" in found[name]["note"]


def test_the_worst_delay_is_that_of_any_field():
    found = {name: Delay(ms, 1.0, "own limit", 1, frozenset({200})) for name, ms in ((NOTHING, 90.0), ("a", 2.0), ("b", 7.0), ("c", 3.0))}
    assert [(figure.name, figure.value) for figure in figures(found)] == [
        (NOTHING, 90.0),
        ("a", 2.0),
        ("b", 7.0),
        ("c", 3.0),
        ("worst of all fields", 7.0),
    ]
