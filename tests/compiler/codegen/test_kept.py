"""Issue 38, part 1: the machine code of a kernel is kept, and found again by programs that have the same kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compiler.codegen.kept import KeptCode, key_of
from compiler.codegen.link import emitted
from compiler.driver import Options, compile_module
from compiler.ir.text.parser import parse
from compiler.machine.target import host
from runtime.executable import Executable
from runtime.session import Session

PROGRAM = """func main(x: f32[n, 4], y: f32[m, 4]) -> object where n in 1..64, m in 1..{most} {{
  a = softmax(x)
  b = exp(y)
  c = (a, b)
  return c
}}"""


def compiled(kernels: KeptCode | None, most: int = 1024) -> Executable:
    return compile_module(parse(PROGRAM.format(most=most)), Options(emit=kernels.emit if kernels else emitted))


def test_other_limits_compile_only_what_changed(tmp_path: Path) -> None:
    """The range of `m` is part of the code of `exp`, not of `softmax`."""
    compiled(first := KeptCode(tmp_path))
    executable = compiled(second := KeptCode(tmp_path), most=2048)
    assert second.num_reused >= 1 and second.num_reused + second.num_emitted == first.num_emitted
    session, x, y = Session(executable, device_threads=1), np.ones((3, 4), np.float32), np.zeros((1500, 4), np.float32)
    a, b = session.call("main", x, y)
    np.testing.assert_allclose(a, np.full((3, 4), 0.25), rtol=1e-6)
    assert (b == 1).all()


def test_kept_code_is_the_code_of_the_compiler(tmp_path: Path) -> None:
    compiled(KeptCode(tmp_path))
    assert compiled(KeptCode(tmp_path)).object_code == compiled(None).object_code


@pytest.mark.parametrize("at", [0, -1])
def test_a_changed_entry_is_compiled_again(tmp_path: Path, at: int) -> None:
    compiled(first := KeptCode(tmp_path))
    for path in first.paths():
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)
    executable = compiled(second := KeptCode(tmp_path))
    assert second.num_reused == 0 and executable.object_code == compiled(None).object_code


def test_a_folder_that_takes_nothing_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    executable = compiled(kernels := KeptCode(tmp_path / "file"))
    assert kernels.num_emitted > 1 and executable.object_code == compiled(None).object_code
    assert [record.levelname for record in caplog.records] == ["WARNING"] and str(tmp_path) in caplog.text


def test_entries_that_were_used_least_recently_go_first(tmp_path: Path) -> None:
    compiled(kernels := KeptCode(tmp_path))
    assert all(path.stat().st_mode & 0o077 == 0 for path in kernels.paths())
    KeptCode(tmp_path, most_bytes=0).trim()
    assert not kernels.paths()


def test_the_key_holds_the_text_and_the_target() -> None:
    here = host()
    others = [key_of("b", here), key_of("a", replace(here, cpu="x")), key_of("a", replace(here, code_model="large"))]
    assert key_of("a", here) not in others
