"""The benchmark that compares a model with other inference engines. A fake engine takes the place of the other engine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest

from deploy.bench import synthetic
from deploy.bench.compute import model as of_users
from deploy.bench.compute.case import Case, Work
from deploy.bench.compute.model import Row
from deploy.bench.synthetic import RandomWeights, synthetic_config
from runtime.device.cpu.cores import available_cores
from server.settings import SettingsError
from tests.deploy.bench.compute.test_model import Known
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda
from tests.lab import peer
from tests.lab.compute import model
from tests.lab.compute.model import Compared, measure_peer
from tests.lab.peer import Package, Subject

VOCAB = 128


GAUGE: Any = Known()
ONES = np.ones((2, VOCAB), np.float32)


class Other:
    """A fake inference engine with which the benchmark compares relaxserve. Its logits are zeros."""

    cores: ClassVar[set[int]] = set()
    closed = False

    def step(self, tokens: int, sequences: int, context: int) -> Callable[[], Any]:
        assert tokens % sequences == 0 and context >= tokens // sequences
        Other.cores = os.sched_getaffinity(0)
        return lambda: np.zeros((sequences, VOCAB), np.float32)

    def close(self) -> None:
        Other.closed = True


@pytest.fixture(autouse=True)
def other(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tests.lab.peers.other")
    module.__dict__["open_model"] = lambda subject: Other()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(peer.PEERS, "other", Package("other", "json", "other-engine", {"bf16": "halves"}))
    monkeypatch.setitem(synthetic.SHAPES, "small", (64, 1, 4, 2, 16, 96, VOCAB))


def test_a_peer_has_a_column_beside_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(of_users, "Gauge", Known)
    monkeypatch.setattr(model, "MOST_DIFFERENCE", 1.1)
    for name, values in {"PREFILLS": (32,), "BATCHES": (1, 4), "CONTEXTS": (64,)}.items():
        monkeypatch.setattr(of_users, name, values)
    monkeypatch.setenv("COLUMNS", "120")
    model.main(["--synthetic", "small", "--head-size", "80", "--kv-heads", "1", "--kv-dtype", "bf16", "--peer", "other"])
    printed = capsys.readouterr().out
    assert "other differ by 100.0%" in printed
    _, *lines = printed.partition("tokens/s (share of the limit)")[2].splitlines()
    header, *rows = [[cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]] for line in lines if line[:1] in ("┃", "│")]
    assert header == ["", "relaxserve", "other"] and [row[0] for row in rows] == ["prefill 32", "decode 1 x 64", "decode 4 x 64"]
    for (_, own, beside), tokens in zip(rows, (32, 1, 4), strict=True):
        assert own == beside and own.startswith(f"{tokens:.1f} (")


@pytest.fixture
def subject() -> Subject:
    return Subject(synthetic_config("small"), RandomWeights({}), "bf16", 1)


def test_a_peer_has_all_cores_and_is_closed(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "MOST_DIFFERENCE", 1.1)
    everywhere = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {available_cores()[0]})
        found = measure_peer("other", subject, {Case(2, 2, 8): Work(1e6, 0.0)}, GAUGE, ONES)
    finally:
        os.sched_setaffinity(0, everywhere)
    assert Other.cores == set(available_cores()) and Other.closed
    assert found == Compared(1.0, [Row("decode 2 x 8", 2.0, 1e6, 0.0, 1.0)])


def test_other_weights_are_noticed(subject: Subject) -> None:
    with pytest.raises(SettingsError, match="differ from ours by 100%"):
        measure_peer("other", subject, {Case(2, 2, 8): Work(1e6, 0.0)}, GAUGE, ONES)


def test_a_peer_that_is_not_there_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    peer.check("other", "bf16")
    with pytest.raises(SettingsError, match="'other' supports the weight formats bf16, not int8"):
        peer.check("other", "int8")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(SettingsError, match="install it with: pip install openvino"):
        peer.check("openvino", "int4-32")


@needs_pycuda
def test_a_model_on_a_gpu_is_compared_with_the_limits_of_the_gpu(
    software_gpu: SoftwareGpu, stand_ins: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --device cuda, every step has a share of the GPU's own limits: its copies and its products. Peers run the same steps. On a
    GPU in software, and with a stand-in for the peer, the figures mean nothing."""
    for module in (model, of_users):
        monkeypatch.setattr(module, "config_of", lambda _: synthetic.llama_config(64, 1, 2, 1, 32, 128, VOCAB))
    monkeypatch.setattr(of_users, "CardGauge", partial(of_users.CardGauge, copied_bytes=1 << 16, side=64))
    for name, value in {"PREFILLS": (16,), "BATCHES": (1, 2), "CONTEXTS": (32,)}.items():
        monkeypatch.setattr(of_users, name, value)
    model.main(["--device", "cuda", "--json", "--peer", "torch"])
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["rows"]] == ["prefill 16", "decode 1 x 32", "decode 2 x 32"]
    assert all(row["share"] > 0 for row in found["rows"]) and found["limits"]["bytes_per_s"] > 0
    names = [[row["name"] for row in compared["rows"]] for compared in found["peers"].values()]
    assert list(found["peers"]) == ["torch eager", "torch compiled"] and names == 2 * [[row["name"] for row in found["rows"]]]
    assert software_gpu.launches > 0 and not software_gpu.faults


def test_a_peer_runs_on_the_cpu_or_on_a_gpu() -> None:
    with pytest.raises(SettingsError, match="'vllm' runs on GPUs; the peers on the CPU are torch, "):
        model.main(["--synthetic", "small", "--peer", "vllm"])
    with pytest.raises(SettingsError, match="'openvino' does not run on GPUs; the peers on GPUs are torch, vllm"):
        model.main(["--synthetic", "small", "--peer", "openvino", "--device", "cuda"])
