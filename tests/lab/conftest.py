from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.fixtures import _library as _library
from tests.gpu.fixtures import software_gpu as software_gpu
from tests.lab.gpu_day.rehearse import lay_peers


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give child processes stand-ins for the packages of peers on GPUs. Return the file in which they log their calls."""
    folder = tmp_path / "stand_ins"
    lay_peers(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    return tmp_path / "log"
