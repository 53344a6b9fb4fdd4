"""A source as a folder here: a path as it is, a hub id by download."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deploy.fetch import local_folder
from server.handle import LoadError


def hub(monkeypatch: pytest.MonkeyPatch, download: Any) -> None:
    module = ModuleType("huggingface_hub")
    module.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_a_path_needs_no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert local_folder(str(tmp_path)) == tmp_path
    with pytest.raises(LoadError, match=r"'org/name' is no path here, .* pip install 'relaxserve\[hub\]'"):
        local_folder("org/name")


def test_what_is_downloaded_is_what_is_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, list[str]] = {}

    def download(source: str, **patterns: list[str]) -> str:
        asked.update(patterns)
        return str(tmp_path / source)

    hub(monkeypatch, download)
    assert local_folder("org/name") == tmp_path / "org/name"

    def wanted(file: str) -> bool:
        allowed, ignored = (any(fnmatchcase(file, pattern) for pattern in asked[f"{kind}_patterns"]) for kind in ("allow", "ignore"))
        return allowed and not ignored

    assert all(map(wanted, ("config.json", "1_Pooling/config.json", "model-00001-of-00002.safetensors", "chat_template.jinja")))
    assert not any(map(wanted, ("pytorch_model.bin", "consolidated.safetensors", "original/params.json", "onnx/model.onnx", "model.gguf")))


def test_a_failed_download_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(source: str, **_: Any) -> str:
        raise ConnectionError("no route to the hub")

    hub(monkeypatch, download)
    with pytest.raises(LoadError, match="did not deliver it: no route to the hub"):
        local_folder("org/name")
