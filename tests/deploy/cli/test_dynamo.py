"""The command `relaxserve dynamo` where Dynamo is not installed."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from deploy.cli.commands import app
from server.settings import SettingsError


@pytest.fixture(autouse=True)
def without_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("dynamo.", "deploy.dynamo."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dynamo", None)


def test_it_says_what_to_install() -> None:
    found = CliRunner().invoke(app, ["dynamo", "demo"])
    assert isinstance(found.exception, SettingsError)
    assert str(found.exception).startswith("Dynamo is not installed: in a checkout, install '.[dynamo]'")


def test_its_help_is_shown() -> None:
    said = CliRunner().invoke(app, ["dynamo", "--help"], prog_name="relaxserve")
    assert said.exit_code == 0
    assert "relaxserve dynamo demo --discovery-backend file" in said.output
    assert "install '.[dynamo]'" in said.output
