from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.gpu.fixtures import _library as _library
from tests.gpu.fixtures import software_gpu as software_gpu

STAND_INS = Path(__file__).parent / "stand_ins"


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give child processes stand-ins for the packages of peers on GPUs. Return the file in which they log their calls."""
    folder = tmp_path / "stand_ins"
    for file in STAND_INS.glob("*.py"):
        about = folder / f"{file.stem}-0.1.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {file.stem}\nVersion: 0.1\n")
        shutil.copy(file, folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    return tmp_path / "log"
