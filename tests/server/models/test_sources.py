"""The models below the model root that may be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.models import sources
from server.models.sources import offered
from server.settings import ServerSettings


def test_a_model_among_many_folders_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server examines only the first entries of the folder. It offers the model also if none of these entries is a file."""
    monkeypatch.setattr(sources, "MOST_ENTRIES", 2)
    found = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: iter(sorted(found(path))))
    for name in ("a", "b"):
        (tmp_path / "crowded" / name).mkdir(parents=True)
    (tmp_path / "crowded" / "config.json").touch()
    (one,) = offered(ServerSettings(model_root=tmp_path))
    assert one.source == "crowded" and one.modified_s > 0
