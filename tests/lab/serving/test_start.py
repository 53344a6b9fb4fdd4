"""The benchmark of starting a server, run on the demo model: the second start reuses what the first start compiled."""

from __future__ import annotations

import json

import pytest

from tests.lab.serving.start import main


def test_it_measures_both_starts_and_a_stream(capsys: pytest.CaptureFixture[str]):
    main(["--json"])
    cold, warm, stream = json.loads(capsys.readouterr().out)
    assert 0 < warm["value"] < cold["value"]
    assert stream["value"] > 0 and stream["at_least"]
