"""The benchmarks of web exports, run on a model with one small layer."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from compiler.machine.target import get
from deploy.bench.synthetic import SHAPES, RandomWeights, shapes_of, synthetic_config
from tests.lab import chromium
from tests.lab.compute import embed, web
from tests.lab.peer import Subject
from tests.lab.peers.llama_cpp import LlamaCpp
from tests.node import node

TINY = (64, 1, 2, 1, 32, 96, 2048)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "0.5b", TINY)


def test_products_threads_and_decoding_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert node()  # `node` skips the test if Node.js is not installed
    for name in ("ROUNDS", "REPEATS", "TOKENS"):
        monkeypatch.setattr(web, name, 1)
    web.main(["--json"])
    figures = json.loads(capsys.readouterr().out)
    names = ["f32 product over the measured peak", "two threads over one", "module, runtime and program"]
    native = ["int4 decode over one native thread (x86-64-v3)"] if get(web.NATIVE).can_run_here else []
    browser = ["from the browser's cache to the demo's first token"] if chromium.installed() else []
    assert [figure["name"] for figure in figures] == names + native + browser
    assert all(figure["value"] > 0 for figure in figures)


def test_figures_are_ratios_of_the_best_times() -> None:
    times = {"peak": [2.0, 1.0], "product on 1": [8.0, 4.0], "product on 2": [2.0, 3.0], "decode": [0.5], "native decode": [0.25, 1.0]}
    operations = 2.0 * 2 * web.ROWS * web.SIZE**2
    found = web.figures(times, operations, 200_000)
    assert [figure.value for figure in found] == [1 / 8, 2.0, 200.0, 0.5]


def test_a_c_library_is_weighed(capsys: pytest.CaptureFixture[str]) -> None:
    embed.main(["--json"])
    figures = {figure["name"]: figure["value"] for figure in json.loads(capsys.readouterr().out)}
    assert 0 < figures["archive and header"] < 1 and all(value > 0 for value in figures.values())


def test_a_sequence_is_compared_with_llama_cpps_compute_buffer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(embed, "check", lambda peer, held: None)
    monkeypatch.setattr(embed, "compute_buffer_bytes", lambda config: 1e9)
    embed.main(["--json", "--peer", embed.PEER])
    figures = json.loads(capsys.readouterr().out)
    planned = next(figure for figure in figures if figure["name"] == "a sequence beside its keys and values")
    assert figures[-1]["value"] == pytest.approx(planned["value"] / 1000) and figures[-1]["reached"]


def test_llama_cpps_log_states_its_compute_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    logs: list[Any] = []

    def open_context(_model: object, params: SimpleNamespace) -> object:
        for kind, size in (("KV", 12), ("compute", params.n_ubatch)):
            logs[-1](2, f"llama_context: CPU {kind} buffer size = {size}.50 MiB\n".encode(), None)
        return object()

    lib = SimpleNamespace(
        llama_log_callback=lambda function: function,
        llama_log_set=lambda log, _data: logs.append(log),
        llama_context_default_params=SimpleNamespace,
        llama_init_from_model=open_context,
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", lib)
    monkeypatch.setitem(sys.modules, "llama_cpp._logger", SimpleNamespace(llama_log_callback="usual"))
    config = synthetic_config("0.5b")
    peer = LlamaCpp(lib, object(), Subject(config, RandomWeights(shapes_of(config)), "int4-32", 1))
    assert peer.compute_buffer_bytes(2048, 512) == 512.5 * (1 << 20)
    assert logs[1:] == ["usual"]
