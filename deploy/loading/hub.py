"""A model from the hub: what of it is missing here, and how much of that has come. Imported on demand: the package is an extra."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import DryRunFileInfo, snapshot_download
from huggingface_hub.utils import tqdm

# What a served model needs; no pickles, no duplicates in other formats or under other names.
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
DUPLICATES = ["consolidated*", "original/*", "onnx/*", "openvino/*", "coreml/*"]

STORED = "huggingface_hub.snapshot_download"  # the one of its bars that counts bytes on disk


def download(source: str, report: Callable[[float], None], token: str | None = None) -> Path:
    """The folder of a hub id, resumed where it broke off."""
    arrived = _Arrived(_missing_bytes(source, token), report)
    return Path(snapshot_download(source, allow_patterns=PATTERNS, ignore_patterns=DUPLICATES, tqdm_class=_bar(arrived.add), token=token))


def revision(source: str, token: str | None = None) -> str:
    """The commit that a download would bring now; empty where the hub does not say."""
    return next((file.commit_hash for file in _offered(source, token)), "")


def _missing_bytes(source: str, token: str | None) -> int:
    """0 where the hub does not say; without a network, what is here already is served."""
    return sum(file.file_size or 0 for file in _offered(source, token) if file.will_download)


def _offered(source: str, token: str | None) -> list[DryRunFileInfo]:
    """The files of a download; none where the hub does not say: the download itself then tells why."""
    try:
        return snapshot_download(
            source, allow_patterns=PATTERNS, ignore_patterns=DUPLICATES, tqdm_class=_bar(lambda _: None), dry_run=True, token=token
        )
    except Exception:
        return []


class _Arrived:
    """Bytes of several threads; told when another hundredth has come."""

    def __init__(self, num_bytes: int, report: Callable[[float], None]) -> None:
        self._expected = num_bytes
        self._report = report
        self._arrived = self._told = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._arrived += num_bytes
            percent = min(100, 100 * self._arrived // self._expected) if self._expected else 0
            if percent > self._told:
                self._told = percent
                self._report(percent / 100)


def _bar(add: Callable[[int], None]) -> type[tqdm]:
    class Bar(tqdm):
        """Draws nothing."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts = options.get("name") == STORED
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                add(int(n or 0))

    return Bar
