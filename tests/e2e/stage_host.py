"""`relaxserve stage`, run on this machine for tests."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from runtime.launch import command
from tests.network import Machine

SECRET = "the secret of these tests"


@contextmanager
def stage_host(folder: Path, port: int = 0, machine: Machine | None = None) -> Generator[tuple[int, subprocess.Popen[str]]]:
    """Offer stages to servers that know SECRET, on this machine or another one. Yield the port and the process."""
    (folder / "secret").write_text(SECRET + "\n")
    inside, host = ((), "127.0.0.1") if machine is None else (machine.inside, machine.far)
    words = [*inside, *command("deploy.cli"), "stage", "--listen", f"{host}:{port}", "--secret-file", str(folder / "secret")]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        found = re.search(r"port (\d+)", process.stderr.readline())
        assert found is not None
        yield int(found.group(1)), process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
