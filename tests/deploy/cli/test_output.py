"""What commands write to the terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from deploy.cli import admin, doctor, output
from deploy.client import Client
from deploy.machine import survey

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


def test_doctor_colours_its_marks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(doctor, "answers", Console(file=file, force_terminal=True, width=200, markup=False, color_system="standard"))
    found = survey()
    monkeypatch.setattr("deploy.machine.survey", lambda: found)
    monkeypatch.setattr(type(found), "features", property(lambda _: ("[red]",)))
    doctor.doctor()
    assert "\x1b[32mok" in file.getvalue() and "[red]" in file.getvalue()
