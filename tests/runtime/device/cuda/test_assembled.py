"""The driver assembles each program only once, because the assembled code is cached. If the cached file is damaged, the program is
assembled again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compiler.driver import Options, compile_module
from compiler.ir.text.parser import parse
from compiler.machine.target import get
from runtime.device.cuda.assembled import SUFFIX
from runtime.errors import DamagedCode
from runtime.executable import Executable
from runtime.session import Session
from tests.gpu.fixtures import SoftwareGpu, needs_pycuda

pytestmark = needs_pycuda

PROGRAM = "func main(x: f32[n]) -> f32[n] where n in 0..64 {\n  dataflow {\n    y = add(x, x)\n  }\n  return y\n}\n"
X = np.arange(5, dtype=np.float32)


@pytest.fixture(scope="module")
def executable() -> Executable:
    return compile_module(parse(PROGRAM), Options(get("sm_80")))


def doubled(executable: Executable, beside: Path) -> bool:
    return bool((Session(executable, assembled=beside).call("main", X) == 2 * X).all())


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"key-*{SUFFIX}"))


def test_a_second_start_assembles_nothing(executable: Executable, software_gpu: SoftwareGpu, tmp_path: Path) -> None:
    before = software_gpu.assembled
    assert doubled(executable, tmp_path / "key") and software_gpu.assembled == before + 1
    assert doubled(executable, tmp_path / "key") and software_gpu.assembled == before + 1
    assert len(kept(tmp_path)) == 1 and len(list(tmp_path.iterdir())) == 2  # and the key


@pytest.mark.parametrize("content", [b"", b"short", bytes(2000), None])
def test_a_damaged_file_is_made_anew(content: bytes | None, executable: Executable, software_gpu: SoftwareGpu, tmp_path: Path) -> None:
    """A damaged file of assembled code is replaced. In the case None, the test flips a single bit of the file."""
    assert doubled(executable, tmp_path / "key")
    (path,) = kept(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:] if content is None else content)
    before = software_gpu.assembled
    assert doubled(executable, tmp_path / "key")
    assert software_gpu.assembled == before + 1 and path.read_bytes() == whole


def test_another_driver_has_a_file_of_its_own(
    executable: Executable, software_gpu: SoftwareGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.gpu.driver.card import machine

    assert doubled(executable, tmp_path / "key")
    monkeypatch.setattr(machine, "driver_version", 12080)
    assert doubled(executable, tmp_path / "key")
    assert len(kept(tmp_path)) == 2


def test_a_folder_that_cannot_be_written_costs_the_assembling_alone(
    executable: Executable, software_gpu: SoftwareGpu, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    assert doubled(executable, tmp_path / "file" / "key")


def test_what_the_assembler_refuses_is_told_in_its_words(executable: Executable, software_gpu: SoftwareGpu, tmp_path: Path) -> None:
    wrong = replace(executable, object_code=executable.object_code.replace(b".target", b".goal"))
    with pytest.raises(DamagedCode, match=r"the PTX of the executable: .*INVALID_PTX"):
        Session(wrong, assembled=tmp_path / "key")
    assert not kept(tmp_path)
