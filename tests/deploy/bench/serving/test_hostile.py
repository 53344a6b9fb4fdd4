"""The benchmark of delays, on the demo model and the fields of one endpoint."""

from __future__ import annotations

import json

import pytest

from deploy.bench.serving.hostile import main


def test_it_tries_every_field_beside_a_stream_and_a_probe(capsys: pytest.CaptureFixture[str]):
    main(["--json", "--only", "POST /detokenize", "--rounds", "1"])
    figures = {figure["name"]: figure for figure in json.loads(capsys.readouterr().out)}
    fields = {"model", "tokens", "skip_special_tokens", "unknown"}
    assert set(figures) == {"nothing", "worst", *(f"POST /detokenize {field}" for field in fields)}
    assert all(figure["value"] > 0 for figure in figures.values())
    assert figures["worst"]["value"] == max(figures[f"POST /detokenize {field}"]["value"] for field in fields)
    assert "8 requests, status 200, 400" in figures["POST /detokenize tokens"]["note"]
