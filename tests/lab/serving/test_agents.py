"""`python -m tests.lab agents` gives each agent a repository of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from deploy.agents import AGENTS
from tests.lab.serving import agents


def test_all_ways_to_find_the_folder_name_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """opencode works in the folder that PWD names, and would otherwise edit the checkout in which the bench runs."""
    monkeypatch.setenv("PWD", str(tmp_path))

    def finished(_command: tuple[str, ...], folder: Path, environment: Mapping[str, str], _patience_s: float) -> tuple[int, str]:
        assert environment["PWD"] == str(folder) and folder != tmp_path
        assert (folder / agents.FILE).read_text() == agents.WRONG
        (folder / agents.FILE).write_text(agents.WRONG.replace("+", "*"))
        return 0, "Mended."

    monkeypatch.setattr(agents, "finished", finished)
    (log := tmp_path / "log").touch()
    ran = agents.run(AGENTS["opencode"], tmp_path, "http://127.0.0.1:1", log, 1.0)
    assert ran.is_mended and ran.status == 0
