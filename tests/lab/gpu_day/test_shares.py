"""Test the figures of a day with a card, on the software GPU and with stand-ins for peers. The times themselves mean nothing here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from deploy.bench.compute.case import Case
from deploy.bench.synthetic import llama_config
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda
from tests.lab.gpu_day import shares
from tests.lab.gpu_day.peers import peers
from tests.lab.gpu_day.shares import Card, Extent, extent, repeated_share

CASES = (Case(16, 1, 16), Case(1, 1, 40), Case(4, 4, 24))
TINY = Extent(llama_config(64, 1, 2, 1, 32, 128, 256), 1 << 16, (65, 64, 64), CASES, 1)


@needs_pycuda
def test_a_shape_has_figures_for_each_step_and_kernel(software_gpu: SoftwareGpu) -> None:
    bound, prefill, one, four = Card.of(TINY).steps("bf16")
    assert bound["copies_bytes_per_s"] > 0 and bound["weight_bytes"] > 0
    assert [row["step"] for row in (prefill, one, four)] == ["prefill 16", "decode 1 x 40", "decode 4 x 24"]
    assert all(row["is_finite"] and row["seconds"] > 0 for row in (prefill, one, four))
    assert 0 < one["planned_bytes"] < four["planned_bytes"] and one["share_of_copies"] > 0
    launches = sum(kernel["launches"] for kernel in one["kernels"])
    assert launches == 8 + 6 + 3, (
        "8 launches per layer, two of them attention; embedding, cast, angles, row, norm, logits; three safe copies of indices"
    )


@needs_pycuda
def test_a_product_has_the_same_bits_in_every_batch(
    software_gpu: SoftwareGpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shares, "extent", lambda *, is_small: TINY)
    with pytest.raises(SystemExit) as ended:
        shares.main(["product", "--small"])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0 and found["counts_that_differ"] == [] and found["flops"] > 0


@needs_pycuda
def test_peers_run_the_same_steps(software_gpu: SoftwareGpu, stand_ins: Path) -> None:
    rows = list(peers(Card.of(TINY), sys.executable))
    assert list(dict.fromkeys(row["peer"] for row in rows)) == ["torch eager", "torch compiled", "vllm"]
    assert [row["name"] for row in rows if row["peer"] == "vllm"] == [str(case) for case in CASES]
    assert all(row["difference"] < 0.02 for row in rows if row["peer"] == "torch compiled")


def test_the_shape_has_steps_of_one_eight_and_sixty_four_sequences() -> None:
    whole = extent(is_small=False)
    assert [case.sequences for case in whole.cases if not case.is_prefill] == [1, 8, 64] and whole.cases[0].is_prefill
    assert whole.bounds.max_seqs == 64 and whole.bounds.max_tokens == 2048


def test_kernels_that_every_layer_repeats_are_scaled() -> None:
    count, seconds = {"product": 8, "norm": 4, "logits": 1}, {"product": 0.5, "norm": 0.1, "logits": 0.2}
    assert repeated_share(count, seconds, 4) == pytest.approx(0.75)
