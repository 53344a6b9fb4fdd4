"""`python -m tests.lab` lists, runs and keeps benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.bench.measure import Figure, report
from deploy.cli.bench import modules
from tests.conftest import ROOT
from tests.lab.__main__ import keep, known


def test_it_knows_the_benchmarks_of_users_and_its_own() -> None:
    assert modules().keys() == {"fleet", "kernels", "model", "quality", "serve"}
    assert known().keys() > modules().keys() | {"report", "hostile", "web"}
    assert known()["model"] == "tests.lab.compute.model" and known()["kernels"] == modules()["kernels"]


def test_it_lists_and_runs_benchmarks() -> None:
    assert ", http, " in lab().stdout
    assert "write BENCHMARKS.md" in lab("report", "--help").stdout
    unknown = lab("nothing", status=2)
    assert unknown.stderr.startswith("error: benchmark 'nothing' is unknown; known: ")


def lab(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "tests.lab", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done


def test_it_keeps_what_a_benchmark_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tests.lab.reporting.record.RESULTS", tmp_path)
    keep("one", ["--few"], lambda options: report([Figure("first token", 12.34, "ms")], as_json="--json" in options))
    (file,) = tmp_path.glob("*/one-few.json")
    record = json.loads(file.read_text())
    assert (record["benchmark"], record["arguments"], record["found"][0]["value"]) == ("one", ["--few"], 12.34)
    assert str(file) in capsys.readouterr().out
