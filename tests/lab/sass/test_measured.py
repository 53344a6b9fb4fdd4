"""Measured times are found by the card, the format, the step and the kernel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.settings import SettingsError
from tests.lab.sass.measured import read_measured


def lines(*, is_rehearsal: bool) -> str:
    told = {"machine": "m", "date": "2026-01-01", "commit": "c", "is_rehearsal": is_rehearsal, "card": "NVIDIA H200, 580.1, 143771 MiB"}
    kernels = [{"kernel": "linear", "launches": 4, "seconds": 8e-6}, {"kernel": "norm", "launches": 1, "seconds": 3e-6}]
    steps = {
        "machine": [told],
        "shape int4-128": [{"copies_bytes_per_s": 4e12}, {"step": "decode 1 x 1024", "seconds": 1e-3, "kernels": kernels}],
        "copies": [{"copies_bytes_per_s": 4e12}],
    }
    rows = ({"step": name, "outcome": "passed", "seconds": 1.0, "said": "", "found": found} for name, found in steps.items())
    return "\n".join(map(json.dumps, rows))


def test_times_are_those_of_one_launch_on_that_card(tmp_path: Path) -> None:
    (tmp_path / "day.jsonl").write_text(lines(is_rehearsal=False))
    found = read_measured(tmp_path / "day.jsonl")
    assert found.seconds("H200", "int4-128", "decode 1 x 1024", "linear") == pytest.approx(2e-6)
    for other in (("H100", "int4-128", "decode 1 x 1024"), ("H200", "bf16", "decode 1 x 1024"), ("H200", "int4-128", "prefill 2048")):
        assert found.seconds(*other, "linear") is None


def test_a_rehearsal_has_no_times(tmp_path: Path) -> None:
    (tmp_path / "day.jsonl").write_text(lines(is_rehearsal=True))
    with pytest.raises(SettingsError, match="rehearsal"):
        read_measured(tmp_path / "day.jsonl")
