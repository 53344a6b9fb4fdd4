"""The benchmark of encoding an image, run with a small image and a small encoder."""

from __future__ import annotations

import json

import pytest

from tests.lab.compute import see


def test_it_counts_all_arithmetic(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 2, "patch_size": 16, "num_patches": 4}
    for name, value in (("SHAPE", sizes), ("EDGE", 64), ("SPAN_S", 0.01), ("MOST_RUNS", 3)):
        monkeypatch.setattr(see, name, value)
    counted: list[float] = []
    count = see.operations
    monkeypatch.setattr(see, "operations", lambda *args: counted.append(count(*args)) or counted[-1])
    see.main(["--layers", "1", "--threads", "1", "--json"])
    (figure,) = json.loads(capsys.readouterr().out)
    assert figure["value"] > 0
    layer = 16 * (4 * 48 * 48 + 2 * 48 * 80) + 2 * 16 * 16 * 48
    assert counted == [2.0 * (layer + 16 * 48 * (768 + 4) + 4 * 80 * (4 * 48 + 64))]
