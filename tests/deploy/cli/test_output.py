"""What commands write to the terminal."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy.cache import kept
from deploy.cli import admin, doctor, output
from deploy.client import Client
from deploy.machine import EXTRAS, _is_installed, survey
from runtime import flags
from runtime.errors import UnsafeCache

MODEL = {"id": "qwen", "aliases": [], "source": "/data/models [old]/[/qwen]"}


def test_brackets_of_a_path_are_no_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Server(Client):
        def get(self, path: str) -> Any:
            return {"data": [MODEL]}

    monkeypatch.setattr(admin, "Client", Server)
    admin.ps(url="http://127.0.0.1:1")
    assert MODEL["source"] in capsys.readouterr().out


def test_brackets_in_the_name_of_a_model_that_loads_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(output, "errors", Console(file=file, force_terminal=True, width=100))
    with output.Bars() as bars:
        bars.show("models [old]", "load [/x]", 0.5)
        bars._progress.refresh()
    assert "models [old]" in file.getvalue() and "load [/x]" in file.getvalue()


def test_doctor_knows_the_extras_of_the_documents() -> None:
    table = (Path(__file__).parents[3] / "docs" / "deployment.md").read_text().partition("| Extra | Adds |")[2].partition("\n\n")[0]
    extras = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted([*EXTRAS, "dynamo"]) == sorted(extras), "Dynamo has an environment of its own"
    assert not {name for name, (module, _) in EXTRAS.items() if _is_installed(module)} & {*survey().missing_extras}


def test_doctor_fails_where_loads_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with flags.scope(cache=tmp_path / "cache"):
        found = {subject: (mark, text) for mark, subject, text in doctor.examine(survey())}
        with pytest.raises(UnsafeCache) as refused:
            kept()
    assert found["cache"] == (doctor.FAULT, str(refused.value))


@pytest.mark.parametrize("cause", ["named", "open", "fifo"])
def test_doctor_fails_where_the_key_of_the_cache_is_refused(tmp_path: Path, cause: str) -> None:
    """Every load that compiles a model would fail."""
    key = tmp_path / "key" if cause == "named" else tmp_path / "cache" / "executables" / ".key"
    key.parent.mkdir(parents=True, exist_ok=True)
    if cause == "fifo":
        os.mkfifo(key)
    else:
        key.write_bytes(bytes(32))
        key.chmod(0o644)
    with flags.scope(cache=tmp_path / "cache", cache_key_file=key if cause == "named" else None):
        found = {subject: (mark, text) for mark, subject, text in doctor.examine(survey())}
    assert found["cache"][0] == doctor.FAULT and str(key) in found["cache"][1]
    with flags.scope(cache=tmp_path / "cache", no_cache=True):
        assert survey().cache.refusal == ""


def test_doctor_makes_no_key(tmp_path: Path) -> None:
    (tmp_path / "executables").mkdir()
    with flags.scope(cache=tmp_path):
        assert survey().cache.refusal == ""
    assert [path.name for path in tmp_path.rglob("*")] == ["executables"]


def test_a_cache_that_cannot_be_written_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads continue without it, as docs/operations.md says."""
    monkeypatch.setattr("os.access", lambda *_: False)
    with flags.scope(cache=tmp_path / "cache"):
        found = {subject: (mark, text) for mark, subject, text in doctor.examine(survey())}
    assert found["cache"][0] == doctor.NOTE and "cannot be written" in found["cache"][1]
    assert "cannot be downloaded, and uploads and batches need batch_dir; set RELAXSERVE_CACHE to another" in found["cache"][1]


def test_doctor_colours_its_marks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(doctor, "answers", Console(file=file, force_terminal=True, width=200, markup=False, color_system="standard"))
    found = survey()
    monkeypatch.setattr("deploy.machine.survey", lambda: found)
    monkeypatch.setattr(type(found), "features", property(lambda _: ("[red]",)))
    doctor.doctor()
    assert "\x1b[32mok" in file.getvalue() and "[red]" in file.getvalue()
