"""What LLVM makes at every start is made once and then remembered; on another machine it is made anew."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiler.machine.target import host
from runtime import remembered as module
from runtime.remembered import remember_in, remembered
from tests.conftest import ROOT


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    remember_in(tmp_path / "kernels")
    yield tmp_path / "kernels"
    remember_in(None)


def numbered() -> Iterator[bytes]:
    yield from (b"first", b"second", b"third")


def test_what_was_made_is_found_again(folder: Path) -> None:
    made = numbered()
    assert [remembered("name", b"text", lambda: next(made)) for _ in range(2)] == [b"first"] * 2
    assert remembered("other", b"text", lambda: next(made)) == b"second"
    assert remembered("name", b"other", lambda: next(made)) == b"third"
    assert len(list(folder.glob("*.code"))) == 3


def test_what_is_found_counts_as_used(folder: Path) -> None:
    """The files that were used least recently go first if there are too many."""
    remembered("name", b"", lambda: b"content")
    (file,) = folder.glob("*.code")
    os.utime(file, (0, 0))
    assert remembered("name", b"", lambda: b"other") == b"content" and file.stat().st_mtime > 0


def test_another_machine_makes_it_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = numbered()
    for cpu, expected in ((b"flags: avx2", b"first"), (b"flags: avx2 avx512f", b"second"), (b"flags: avx2", b"first")):
        monkeypatch.setattr(module, "_cpu", lambda cpu=cpu: cpu)
        assert remembered("name", b"", lambda: next(made)) == expected
    monkeypatch.setattr(module, "_cpu", lambda: None)  # a system that says nothing of its CPU
    assert remembered("name", b"", lambda: next(made)) == b"third"


def test_a_file_that_somebody_changed_is_made_again(folder: Path) -> None:
    made = numbered()
    remembered("name", b"", lambda: next(made))
    (file,) = folder.glob("*.code")
    file.write_bytes(file.read_bytes().replace(b"first", b"worst"))
    assert remembered("name", b"", lambda: next(made)) == b"second"


def test_nothing_is_remembered_before_a_folder_is_named() -> None:
    made = numbered()
    assert [remembered("name", b"", lambda: next(made)) for _ in range(2)] == [b"first", b"second"]


def test_a_second_start_does_without_llvm(tmp_path: Path) -> None:
    text = f"""
import sys
from pathlib import Path
from runtime.remembered import remember_in
remember_in(Path({str(tmp_path / "kernels")!r}))
from compiler.driver import compile_module
from compiler.machine.target import host
from runtime.device.cpu.team import Team
Team(2)
print(host().key, "llvmlite.binding" in sys.modules)
"""
    said = [subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert said == [f"{host().key} True\n", f"{host().key} False\n"]
