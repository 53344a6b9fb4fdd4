"""`python -m tests.lab cuda-day` runs all measurements and tests that need a GPU. Here it runs on the software GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.fixtures import SoftwareGpu, needs_pycuda
from tests.lab.compute import cuda_day

pytestmark = needs_pycuda


def test_a_quick_visit_finds_something_in_every_part(tmp_path: Path, software_gpu: SoftwareGpu, stand_ins: Path) -> None:
    """With --quick, every part of the script reports times and no errors. On a software GPU, and with stand-ins for peers, the times
    themselves mean nothing."""
    cuda_day.main(["--quick", "--out", str(tmp_path / "day.json")])
    found = json.loads((tmp_path / "day.json").read_text())
    assert "error" not in json.dumps(found), found
    assert found["card"]["target"].startswith("sm_") and found["card"]["free_bytes"] > 0
    assert found["copies"]["bytes_per_s"] > 0
    assert found["products"]["differ"] == [] and found["products"]["flops"] > 0
    prefill, one, four = found["steps"]
    assert (prefill["case"], one["case"], four["case"]) == ("prefill 16", "decode 1 x 40", "decode 4 x 24")
    assert 0 < one["planned_bytes"] < four["planned_bytes"] and one["share_of_copies"] > 0
    launches = sum(kernel["launches"] for kernel in one["kernels"].values())
    assert launches == 7 + 6 + 3, "7 launches per layer; embedding, cast, angles, row, norm, logits; three safe copies of indices"
    assert list(found["peers"]) == ["torch eager", "torch compiled", "vllm"]
    assert found["peers"]["torch compiled"]["difference"] < 0.02
    assert [row["name"] for row in found["peers"]["vllm"]["rows"]] == [row["case"] for row in found["steps"]]
    assert found["tests"] == {"left_out": "by --quick"}


def test_a_part_that_fails_leaves_its_error_and_the_next_one_runs(
    tmp_path: Path, software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(name: str, error: Exception | None = None) -> None:
        def run(_: cuda_day.Visit) -> dict[str, Any]:
            if error is not None:
                raise error
            return {}

        run.__name__ = name
        monkeypatch.setattr(cuda_day.Visit, name, run)

    part("copies", RuntimeError("no copies today"))
    part("products")
    part("steps")
    part("peers")
    found = cuda_day.visit("cuda", cuda_day.QUICK, tmp_path / "day.json")
    assert found["copies"] == {"error": "RuntimeError: no copies today"}
    assert found["tests"] == {"left_out": "by --quick"}
    assert json.loads((tmp_path / "day.json").read_text()) == found
