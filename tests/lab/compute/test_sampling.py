"""The benchmark of sampling, run with a small vocabulary."""

from __future__ import annotations

import json

import pytest

from tests.lab.compute import sampling


def test_it_measures_every_kind_of_draw(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sampling, "VOCAB", 2000)
    monkeypatch.setattr(sampling, "best_s", lambda run: run() and 0.001)
    sampling.main(["--threads", "1", "--json"])
    figures = json.loads(capsys.readouterr().out)
    assert [figure["name"] for figure in figures] == [f"{kind}, {logits}" for kind in sampling.KINDS for logits in ("flat", "peaked")]
    assert all(figure["value"] == 1.0 for figure in figures)
