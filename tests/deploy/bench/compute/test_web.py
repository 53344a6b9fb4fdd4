"""The benchmarks of web exports, run on a model with one small layer."""

from __future__ import annotations

import json

import pytest

from compiler.machine.target import get
from deploy.bench import chromium
from deploy.bench.compute import embed, web
from deploy.bench.synthetic import SHAPES
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
