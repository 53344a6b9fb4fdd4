"""Images of other projects are pinned by digest."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docker.pin_images import FILES, ROOT, unpinned

# Images whose digest nobody has looked up yet. `python docker/pin_images.py` looks them up. This list only shrinks.
WITHOUT_DIGEST = {"python:3.12-slim-bookworm", "prom/prometheus:v3.5.0", "grafana/grafana:12.1.0"}


def test_every_other_image_has_a_digest() -> None:
    assert unpinned() == WITHOUT_DIGEST


@pytest.mark.parametrize(("answer", "status"), [("sha256:" + "a" * 64, 0), ("no such image", 1)])
def test_pinning_writes_the_digest_behind_each_tag(tmp_path: Path, answer: str, status: int) -> None:
    for file in (*FILES, "docker/pin_images.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "docker" / "docker").write_text(f"#!/bin/sh\necho '{answer}'\n")
    (tmp_path / "docker" / "docker").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'docker'}:{os.environ['PATH']}"}
    command = [sys.executable, tmp_path / "docker" / "pin_images.py"]
    for _ in range(2):  # a second run renews the digests
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == status and (not status or "expected sha256: and 64 hexadecimal digits" in result.stderr)
    before, after = ("".join((root / file).read_text() for file in FILES) for root in (ROOT, tmp_path))
    assert unpinned(tmp_path) == (unpinned() if status else set())
    assert re.sub("@" + answer, "", after) == before
